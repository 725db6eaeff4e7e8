"""JSON Schemas of everything that `--json` prints, by verb."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardwise.errors import chosen
from shardwise.schema import json_schema

# Where the type of each payload of a verb is. The errors of all verbs are `schema:ErrorPayload`.
PAYLOADS: Mapping[str, tuple[str, ...]] = {
    "plan": (
        "planning.payload:PlanPayload", "planning.compare:ComparisonPayload", "search.sweep.payload:SweepPayload",
        "search.to_loss.loss_payload:ToLossPayload",
    ),
    "estimate": ("planning.payload:PlanPayload",),
    "explain": ("planning.explain.payload:ExplainPayload",),
    "instructions": ("planning.instructions:InstructionsPayload",),
    "memory": ("planning.memory:MemoryPayload",),
    "kv-cache": ("books.kv_cache:CachePayload",),
    "roofline": ("books.roofline.payload:KernelsPayload", "books.roofline.payload:BlockPayload"),
    "rule": ("books.rule_payload:RulePayload",),
    "matmul": ("cost.product_payload:MatmulPayload",),
    "reshard": ("cost.product_payload:ReshardPayload",),
    "collective": ("network.collectives:CollectivePayload",),
    "schedule": ("schedule.compare:TimelinePayload", "schedule.compare:SchedulesPayload"),
    "simulate": ("simulate.result:SimulationPayload",),
    "precision": ("floats.payload:PrecisionPayload",),
    "explore": ("explore.payload:ExplorePayload",),
    "export": ("export.exporting:ExportPayload",),
    "read": ("export.verdict:ReadPayload",),
    "mfu": ("planning.measured:MfuPayload",),
    "show": ("sourced:ShowPayload",),
    "completion": ("shells:CompletionPayload",),
    "figures": ("api.figures.payload:FigurePayload", "api.figures.payload:FiguresPayload"),
    "validate": (
        "calibrate.payload:ValidatePayload", "calibrate.folds_payload:FoldsPayload", "calibrate.groups:GroupsPayload",
    ),
    "bench": ("bench.record:BenchPayload", "bench.machine.report:MachinePayload"),
    "calibrate": ("calibrate.payload:CalibratePayload",),
    "tokenize": ("data.index:CorpusPayload",),
    "verify": ("verify.training.verify:VerifyPayload",),
    "rehearse": ("reconcile.rehearsal:RehearsePayload",),
    "convert": ("train.conversion.convert:ConvertPayload",),
    "train": ("measurement.summary:SummaryPayload",),
    "trace": ("reconcile.traces.payload:TracePayload",),
    "batch": (
        "batch.payload:BatchFitPayload", "planning.run_noise_payload:RunNoisePayload", "batch.sweep_payload:BatchRunsPayload",
        "batch.branch_payload:BatchBranchesPayload",
    ),
    "reconcile": ("reconcile.payload:ReconcilePayload",),
}  # fmt: skip
ERROR = "schema:ErrorPayload"


def json_schemas(verb: str) -> dict[str, dict[str, Any]]:
    """JSON Schemas (draft 2020-12) of what `shardwise VERB --json` prints, by the payload's `schema`; that of errors comes last.

    Raises `InputError` for an unknown verb.

    >>> import shardwise as sw
    >>> list(sw.json_schemas("plan"))
    ['shardwise.plan/3', 'shardwise.comparison/2', 'shardwise.sweep/2', 'shardwise.to_loss/1', 'shardwise.error/1']
    >>> sw.json_schemas("memory")["shardwise.memory/2"]["properties"]["model"]
    {'$ref': '#/$defs/Architecture'}
    """
    found = (json_schema(_type(place)) for place in (*chosen(PAYLOADS, verb, "verb"), ERROR))
    return {schema["title"]: schema for schema in found}


def _type(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"shardwise.{module}"), name)
