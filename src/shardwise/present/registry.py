"""Functions by type of result: the one that makes its report, and the one that makes its payload.

Entries are names of functions, so that a result of one verb does not load the reports of the others; class names are unique in
the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.values import Payload, to_json

if TYPE_CHECKING:
    from shardwise.present.rendering.report import Report


class ResultFunctions(NamedTuple):
    """Functions "module:name" below `shardwise`: result -> report, and result -> payload of `--json`.

    A result that is a `Payload` is its own. One that is a text for programs has a text for a report, and may have no payload.
    `indent` is that of the JSON.
    """

    report: str
    payload: str = ""
    indent: int | None = 2


RESULTS: Mapping[str, ResultFunctions] = {
    "MemoryComparison": ResultFunctions("present.reports.memory:memory_report", "search.layout_memory:MemoryRecord.of"),
    "KvCacheSizes": ResultFunctions("present.reports.memory:cache_report", "book_formulas.kv_cache:KvCacheRecord.of"),
    "KernelComparison": ResultFunctions(
        "present.reports.rooflines_and_rules:roofline_report", "book_formulas.rooflines.payloads:KernelsRecord.of"
    ),
    "BlockRoofline": ResultFunctions(
        "present.reports.rooflines_and_rules:block_report", "book_formulas.rooflines.payloads:BlockRecord.of"
    ),
    "NamedRule": ResultFunctions(
        "present.reports.rooflines_and_rules:rule_report", "book_formulas.named_rules:RuleRecord.of"
    ),
    "RuleValue": ResultFunctions(
        "present.reports.rooflines_and_rules:rule_value_report", "book_formulas.named_rules:RuleRecord.of_value"
    ),
    "FormatComparison": ResultFunctions(
        "present.reports.rooflines_and_rules:formats_report", "values.dtypes:FormatsRecord.of"
    ),
    "CheckedProduct": ResultFunctions(
        "present.reports.sharded_products:product_report", "verify.product_checks:MatmulRecord.of"
    ),
    "EmittedProgram": ResultFunctions("present.reports.sharded_products:program_source"),
    "PlacedCollective": ResultFunctions(
        "present.reports.sharded_products:collective_report",
        "hardware.network.compare_collective_algorithms:CollectiveRecord.of",
    ),
    "CheatSheet": ResultFunctions("present.reports.cheat_sheets:cheat_sheet_report"),
    "ClusterNetwork": ResultFunctions("present.reports.switched_networks:network_report"),
    "Timeline": ResultFunctions(
        "present.reports.pipeline_schedule:timeline_report", "pipeline.compare_schedules:TimelineRecord.of", indent=None
    ),
    "ScheduleComparison": ResultFunctions(
        "present.reports.pipeline_schedule:comparison_report", "pipeline.compare_schedules:ScheduleComparisonRecord.of"
    ),
    "Simulation": ResultFunctions(
        "present.reports.step:simulation_report", "price.simulation.result:SimulationRecord.of"
    ),
    "InstructionListing": ResultFunctions(
        "present.reports.step:instructions_report", "search.instruction_listing:InstructionsRecord.of"
    ),
    "ExportedLaunch": ResultFunctions(
        "present.reports.interop:export_report", "interop.launches.export_launch:ExportRecord.of"
    ),
    "PricedLaunch": ResultFunctions("present.reports.interop:launch_report", "interop.read_launch:LaunchRecord.of"),
    "PricedPools": ResultFunctions(
        "present.reports.serving_launch:pooled_launch_report", "interop.serving.price_pools:PooledLaunchRecord.of"
    ),
    "PricedServing": ResultFunctions(
        "present.reports.serving_launch:serving_launch_report", "interop.serving.price_serving:ServingLaunchRecord.of"
    ),
    "CatalogueEntries": ResultFunctions(
        "present.reports.catalogue:catalogue_report", "present.catalogue_values:CatalogueRecord.of"
    ),
    "FigureSet": ResultFunctions(
        "present.reports.rooflines_and_rules:figures_report", "present.figures.figure:figures_payload"
    ),
    "ShellCompletion": ResultFunctions("present.shell_completion:completion_text"),
    "ExplorerSession": ResultFunctions(
        "present.explorer.session:session_report", "present.explorer.session:session_payload"
    ),
    "StaticBuild": ResultFunctions("present.explorer.static_build:build_report"),
    "Diagnosis": ResultFunctions("present.reports.diagnosis:diagnosis_report"),
    "ConvertedModel": ResultFunctions(
        "present.reports.interop:convert_report", "interop.weights.convert:ConversionRecord.of"
    ),
    "Plan": ResultFunctions("present.reports.plan:plan_report", "search.plan_file:PlanRecord.of"),
    "LayoutPlan": ResultFunctions(
        "present.reports.plan:layout_plan_report", "search.plan_file:PlanRecord.of_layout_plan"
    ),
    "Comparison": ResultFunctions(
        "present.reports.comparison:comparison_report", "search.payloads:ComparisonRecord.of"
    ),
    "ServingEstimate": ResultFunctions(
        "present.reports.serving:serving_estimate_report", "search.serving.payloads:ServingEstimateRecord.of"
    ),
    "PooledEstimate": ResultFunctions(
        "present.reports.serving_pools:pooled_estimate_report", "search.serving.payloads:PooledEstimateRecord.of"
    ),
    "ServingPlan": ResultFunctions(
        "present.reports.serving:serving_plan_report", "search.serving.payloads:ServingPlanRecord.of"
    ),
    "Swept": ResultFunctions("present.reports.sweep:sweep_report", "search.payloads:SweptRecord.of"),
    "LossSearch": ResultFunctions("present.reports.sweep:to_loss_report", "search.payloads:LossSearchRecord.of"),
    "Explanation": ResultFunctions(
        "present.reports.explanation:explain_report", "search.payloads:ExplanationRecord.of"
    ),
    "Reconciliation": ResultFunctions(
        "present.reports.run:reconcile_report", "measure.reconcile.payloads:ReconciliationRecord.of"
    ),
    "TraceAnalysis": ResultFunctions("present.reports.step:trace_report", "measure.reconcile.payloads:TraceRecord.of"),
    "UtilisationReport": ResultFunctions(
        "present.reports.utilisation:mfu_report", "measure.utilisation:UtilisationRecord.of"
    ),
    "Rehearsal": ResultFunctions(
        "present.reports.run:rehearsal_report", "measure.reconcile.payloads:RehearsalRecord.of"
    ),
    "PlanVerification": ResultFunctions(
        "present.reports.run:verification_report", "verify.training.plan_verification:VerificationRecord.of"
    ),
    "TokenizedCorpus": ResultFunctions("present.reports.run:corpus_report", "run.data.tokenized_text:corpus_payload"),
    "RunSummary": ResultFunctions("present.reports.run:summary_report", "records.run_summary:summary_payload"),
    "RunNoise": ResultFunctions("present.reports.batch_size:noise_report", "batch_size.payloads:RunNoiseRecord.of"),
    "SweptRuns": ResultFunctions("present.reports.batch_size:sweep_report", "batch_size.payloads:SweptRunsRecord.of"),
    "BranchOutcome": ResultFunctions(
        "present.reports.batch_size:branches_report", "batch_size.payloads:BranchesRecord.of"
    ),
    "SweepFit": ResultFunctions("present.reports.batch_size:fit_report", "batch_size.payloads:SweepFitRecord.of"),
    "ExperimentReport": ResultFunctions("present.reports.experiments:experiment_report"),
    "ExperimentStatus": ResultFunctions("present.reports.experiments:status_report"),
    "BenchmarkResult": ResultFunctions("present.reports.calibration:bench_report"),
    "KernelLadders": ResultFunctions("present.reports.kernels:kernels_report"),
    "MachineResult": ResultFunctions(
        "present.reports.calibration:machine_report", "measure.microbenchmarks.machine_benchmark:MachineRecord.of"
    ),
    "ClusterCalibration": ResultFunctions(
        "present.reports.calibration:calibrate_report", "measure.calibrate.payloads:CalibrationRecord.of"
    ),
    "CalibratedServing": ResultFunctions(
        "present.reports.serving_accuracy:serving_calibration_report",
        "measure.serving.calibrated_launch:CalibratedServingRecord.of",
    ),
    "EvaluatedRuns": ResultFunctions(
        "present.reports.calibration:validate_report", "measure.calibrate.payloads:ValidationRecord.of"
    ),
    "PublishedFit": ResultFunctions(
        "present.reports.calibration:fold_report", "measure.calibrate.payloads:FoldsRecord.of"
    ),
    "RankedLayouts": ResultFunctions(
        "present.reports.calibration:groups_report", "measure.calibrate.payloads:RankedLayoutsRecord.of"
    ),
    "ServingValidation": ResultFunctions("present.reports.serving_accuracy:serving_accuracy_report"),
}


def report_of(result: Any) -> Report | str:
    """Return the report of a verb's result, or the text that it is."""
    report: Report | str = load_object(_find(result).report)(result)
    return report


def has_payload(result: Any) -> bool:
    """Return True if `--json` prints a payload of the result; else it prints the result's text."""
    return bool(_find(result).payload) or isinstance(result, Payload)


def json_indent(result: Any) -> int | None:
    """Return the indent of the JSON of a verb's result; None for JSON on one line."""
    return _find(result).indent


def payload_of(result: Any) -> Mapping[str, Any]:
    """Return what `--json` prints of a verb's result."""
    place = _find(result).payload
    payload: Mapping[str, Any] = to_json(load_object(place)(result) if place else result)
    return payload


def _find(result: Any) -> ResultFunctions:
    return RESULTS[type(result).__name__]


def load_object(place: str) -> Any:
    """Return the function or type at a place, "module:name" or "module:Class.name" below `shardwise`."""
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(f"shardwise.{module}"))
