"""JSON Schemas of everything that `--json` prints, by verb."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardwise.present.pictures.payload_schemas import json_schema
from shardwise.values import lookup

# Where the type of each payload of a verb is. The errors of all verbs are `ERROR`.
PAYLOADS: Mapping[str, tuple[str, ...]] = {
    "plan": (
        "search.plan_file:PlanPayload", "search.payloads:ComparisonPayload", "search.payloads:SweepPayload",
        "search.payloads:ToLossPayload",
    ),
    "estimate": ("search.plan_file:PlanPayload",),
    "explain": ("search.payloads:ExplanationPayload",),
    "instructions": ("search.instruction_listing:InstructionsPayload",),
    "memory": ("search.layout_memory:MemoryPayload",),
    "kv-cache": ("book_formulas.kv_cache:CachePayload",),
    "roofline": ("book_formulas.rooflines.payloads:KernelsPayload", "book_formulas.rooflines.payloads:BlockPayload"),
    "rule": ("book_formulas.named_rules:RulePayload",),
    "matmul": ("present.pictures.sharded_product_payload:MatmulPayload",),
    "reshard": ("present.pictures.sharded_product_payload:ReshardPayload",),
    "collective": ("hardware.network.compare_collective_algorithms:CollectivePayload",),
    "schedule": ("pipeline.compare_schedules:TimelinePayload", "pipeline.compare_schedules:SchedulesPayload"),
    "simulate": ("price.simulation.result:SimulationPayload",),
    "precision": ("present.pictures.number_format_payload:PrecisionPayload",),
    "explore": ("present.explore.payload:ExplorePayload",),
    "export": ("interop.launches.export_launch:ExportPayload",),
    "read": ("interop.read_launch:ReadPayload",),
    "mfu": ("measure.utilisation:MfuPayload",),
    "show": ("present.pictures.catalogue.sourced_entries:ShowPayload",),
    "completion": ("present.pictures.shell_completion_scripts:CompletionPayload",),
    "figures": ("present.api.figures.payload:FigurePayload", "present.api.figures.payload:FiguresPayload"),
    "validate": (
        "measure.calibrate.payloads:ValidatePayload", "measure.calibrate.payloads:FoldsPayload",
        "measure.calibrate.payloads:LayoutGroupsPayload",
    ),
    "bench": ("measure.microbenchmarks.benchmark_lines:BenchPayload", "measure.microbenchmarks.machine_benchmark:MachinePayload"),
    "calibrate": ("measure.calibrate.payloads:CalibratePayload",),
    "tokenize": ("run.data.shard_index:CorpusPayload",),
    "verify": ("verify.training.plan_verification:VerifyPayload",),
    "rehearse": ("measure.reconcile.payloads:RehearsePayload",),
    "convert": ("interop.weights.convert:ConvertPayload",),
    "train": ("records.run_summary:SummaryPayload",),
    "trace": ("measure.reconcile.payloads:TracePayload",),
    "batch": (
        "batch_size.payloads:BatchFitPayload", "batch_size.payloads:RunNoisePayload", "batch_size.payloads:BatchRunsPayload",
        "batch_size.payloads:BatchBranchesPayload",
    ),
    "reconcile": ("measure.reconcile.payloads:ReconcilePayload",),
}  # fmt: skip
ERROR = "present.pictures.payload_schemas:ErrorPayload"


def json_schemas(verb: str) -> dict[str, dict[str, Any]]:
    """JSON Schemas (draft 2020-12) of what `shardwise VERB --json` prints, by the payload's `schema`; that of errors comes last.

    Raises `InputError` for an unknown verb.

    >>> import shardwise as sw
    >>> list(sw.json_schemas("plan"))
    ['shardwise.plan/3', 'shardwise.comparison/2', 'shardwise.sweep/2', 'shardwise.to_loss/1', 'shardwise.error/1']
    >>> sw.json_schemas("memory")["shardwise.memory/2"]["properties"]["model"]
    {'$ref': '#/$defs/Architecture'}
    """
    found = (json_schema(_type(place)) for place in (*lookup(PAYLOADS, verb, "verb"), ERROR))
    return {schema["title"]: schema for schema in found}


def _type(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"shardwise.{module}"), name)
