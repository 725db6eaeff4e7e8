"""JSON Schemas of everything that `--json` prints, by verb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.present.registry import load_object
from shardwise.values import Payload, lookup

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class ErrorFields:
    """Problems of a command, a sentence each, and the exit code."""

    problems: list[str]
    exit_code: int


@dataclass(frozen=True)
class ErrorPayload(Payload):
    """Stands on the error stream in place of a payload (`values.errors.format_problems`); here, for every command loads that."""

    SCHEMA = "shardwise.error/1"
    error: ErrorFields


def json_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a payload's type. Fields of values are required even where they have a default: all are printed.

    >>> @dataclass(frozen=True)
    ... class Size(Payload):
    ...     SCHEMA = "example.size/1"
    ...     num_bytes: float = 0.0
    >>> schema = json_schema(Size)
    >>> schema["title"], schema["required"], schema["properties"]["num_bytes"]["type"]
    ('example.size/1', ['schema', 'num_bytes'], 'number')
    """
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class AsPrinted(GenerateJsonSchema):
        def field_is_required(self, field: Any, total: bool) -> bool:
            return field["type"] != "typed-dict-field" or super().field_is_required(field, total)

    schema = TypeAdapter(kind).json_schema(schema_generator=AsPrinted)
    return {"$schema": DIALECT, **schema, "title": schema["properties"]["schema"]["const"]}


# Where the type of each payload of a verb is. The errors of all verbs are `ERROR`.
PAYLOADS: Mapping[str, tuple[str, ...]] = {
    "plan": (
        "search.plan_file:PlanRecord", "search.payloads:ComparisonRecord", "search.payloads:SweptRecord",
        "search.payloads:LossSearchRecord",
    ),
    "estimate": ("search.plan_file:PlanRecord",),
    "explain": ("search.payloads:ExplanationRecord",),
    "instructions": ("search.instruction_listing:InstructionsRecord",),
    "memory": ("search.layout_memory:MemoryRecord",),
    "kv-cache": ("book_formulas.kv_cache:KvCacheRecord",),
    "serve": (
        "search.serving.payloads:ServingEstimateRecord", "search.serving.payloads:ServingPlanRecord",
        "search.serving.payloads:PooledEstimateRecord",
        "interop.serving.price_serving:ServingLaunchRecord", "interop.serving.price_pools:PooledLaunchRecord",
    ),
    "roofline": ("book_formulas.rooflines.payloads:KernelsRecord", "book_formulas.rooflines.payloads:BlockRecord"),
    "rule": ("book_formulas.named_rules:RuleRecord",),
    "matmul": ("verify.product_checks:MatmulRecord",),
    "reshard": ("verify.product_checks:ReshardRecord",),
    "collective": ("hardware.network.compare_collective_algorithms:CollectiveRecord",),
    "cheat-sheet": ("book_formulas.cheat_sheet:CheatSheet",),
    "network": ("layout.network_groups:ClusterNetwork",),
    "schedule": ("pipeline.compare_schedules:TimelineRecord", "pipeline.compare_schedules:ScheduleComparisonRecord"),
    "simulate": ("price.simulation.result:SimulationRecord",),
    "precision": ("values.dtypes:FormatsRecord",),
    "explore": ("present.explorer.explorer:ExplorePayload",),
    "export": ("interop.launches.export_launch:ExportRecord",),
    "read": ("interop.read_launch:LaunchRecord",),
    "mfu": ("measure.utilisation:UtilisationRecord",),
    "show": ("present.catalogue_values:CatalogueRecord",),
    "completion": ("present.shell_completion:ShellCompletion",),
    "doctor": ("present.diagnosis:Diagnosis",),
    "figures": ("present.figures.figure:FigurePayload", "present.figures.figure:FiguresPayload"),
    "validate": (
        "measure.calibrate.payloads:ValidationRecord", "measure.calibrate.payloads:FoldsRecord",
        "measure.calibrate.payloads:RankedLayoutsRecord", "measure.serving.serving_validation:ServingValidation",
    ),
    "bench": (
        "measure.microbenchmarks.benchmark_lines:BenchmarkResult", "measure.microbenchmarks.machine_benchmark:MachineRecord",
    ),
    "kernels": ("measure.kernel_ladders.workbench:KernelLadders",),
    "calibrate": (
        "measure.calibrate.payloads:CalibrationRecord", "measure.serving.calibrated_launch:CalibratedServingRecord",
    ),
    "tokenize": ("run.data.shard_index:CorpusPayload",),
    "verify": ("verify.training.plan_verification:VerificationRecord",),
    "rehearse": ("measure.reconcile.payloads:RehearsalRecord",),
    "mcp": (),  # it prints messages of the protocol
    "convert": ("interop.weights.convert:ConversionRecord",),
    "train": ("records.run_summary:SummaryPayload",),
    "trace": ("measure.reconcile.payloads:TraceRecord",),
    "batch": (
        "batch_size.payloads:SweepFitRecord", "batch_size.payloads:RunNoiseRecord", "batch_size.payloads:SweptRunsRecord",
        "batch_size.payloads:BranchesRecord",
    ),
    "experiments": (
        "measure.experiments.ledger_summary:ExperimentStatus", "measure.experiments.experiment_report:ExperimentReport",
    ),
    "reconcile": ("measure.reconcile.payloads:ReconciliationRecord",),
}  # fmt: skip
ERROR = "present.json_schemas:ErrorPayload"


def json_schemas(verb: str) -> dict[str, dict[str, Any]]:
    """Return the JSON Schemas (draft 2020-12) of what `shardwise VERB --json` prints, by `schema`; that of errors is the last.

    Raises `InputError` for an unknown verb.

    >>> import shardwise as sw
    >>> list(sw.json_schemas("plan"))
    ['shardwise.plan/3', 'shardwise.comparison/2', 'shardwise.sweep/2', 'shardwise.to_loss/1', 'shardwise.error/1']
    >>> sw.json_schemas("memory")["shardwise.memory/2"]["properties"]["model"]
    {'$ref': '#/$defs/ModelFacts'}
    """
    schemas = (json_schema(load_object(place)) for place in (*lookup(PAYLOADS, verb, "verb"), ERROR))
    return {schema["title"]: schema for schema in schemas}
