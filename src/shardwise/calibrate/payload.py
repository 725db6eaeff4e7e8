"""Predictions compared with measured runs, as plain data: published runs, and a user's own, to which a cluster is fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.calibrate.accuracy import ErrorStatistics, Judged, memory_summary, refuted_fits, skipped_kinds, summary
from shardwise.calibrate.own import Moved, OwnFit, Residual
from shardwise.calibrate.published_runs.case import Prediction
from shardwise.calibrate.published_runs.rows import unreadable
from shardwise.layout.payload import LayoutPayload, layout_payload
from shardwise.schema import Fields

CALIBRATE_SCHEMA = "shardwise.calibrate/1"
VALIDATE_SCHEMA = "shardwise.validate/2"


class CalibratedCluster(TypedDict):
    """The cluster that was calibrated."""

    name: str
    chip: str
    num_devices: int


class Identified(TypedDict):
    """Whether the measurements say what the constant is."""

    identified: bool


class ErrorsPayload(TypedDict):
    """Errors of the predictions before and after the fit; null where there is nothing to compare."""

    count: int
    before: ErrorStatistics | None
    after: ErrorStatistics | None


class CalibratePayload(TypedDict):
    """Constants of a cluster and its stack, before and after a fit to runs and micro-benchmarks."""

    schema: Literal["shardwise.calibrate/1"]
    cluster: CalibratedCluster
    stack: str
    source: str
    constants: dict[str, Annotated[dict[str, Any], Fields(Moved, Identified)]]
    runs: ErrorsPayload
    benches: ErrorsPayload
    residuals: list[Residual]
    spread: dict[str, tuple[float, float]]
    left_aside: dict[str, int]


class PredictedRow(TypedDict):
    """A published run: measured and predicted, or why there is no prediction (`skipped`)."""

    id: str
    predicted_step_time_s: float | None
    interval90: tuple[float, float] | None
    predicted_peak_memory_gb: float | None
    skipped: str | None
    measured_step_time_s: float | None
    measured_peak_memory_gb: float | None
    scored: bool
    weight: float
    layout: LayoutPayload | None
    approximations: list[str]


class FitsPayload(TypedDict):
    """Runs that say what they recompute, and how many of them the memory model says would not fit."""

    stated: int
    would_not_fit: int
    by_over_a_tenth: int


class SkippedPayload(TypedDict):
    """Rows without a prediction for one reason, and how many of them would count."""

    rows: int
    scored: int


class ValidatePayload(TypedDict):
    """Predictions of published runs; `summary` has errors of step times by group and value."""

    schema: Literal["shardwise.validate/2"]
    rows: list[PredictedRow]
    summary: dict[str, dict[str, ErrorStatistics]]
    memory_summary: dict[str, dict[str, ErrorStatistics]]
    fits: FitsPayload
    skipped: dict[str, SkippedPayload]
    unreadable: list[list[str]]


def calibrate_payload(found: OwnFit, name: str, source: str) -> dict[str, Any]:
    """A calibration, as `shardwise calibrate --json` prints it."""
    return {
        "schema": CALIBRATE_SCHEMA,
        "cluster": {"name": name, "chip": found.own.nominal.chip.name, "num_devices": found.own.nominal.num_devices},
        "stack": found.stack.name,
        "source": source,
        "constants": {one.name: {**asdict(one), "identified": one.identified} for one in found.constants},
        "runs": _errors(found, benches=False),
        "benches": _errors(found, benches=True),
        "residuals": [asdict(one) for one in found.residuals],
        "spread": {kind: list(pair) for kind, pair in found.spread.items()},
        "left_aside": dict(found.aside),
    }


def _errors(found: OwnFit, *, benches: bool) -> dict[str, Any]:
    """Errors before and after; None without any."""
    both = {"before": found.errors(False, benches=benches), "after": found.errors(True, benches=benches)}
    return {
        "count": len(found.benches if benches else found.runs),
        **{when: asdict(one) if one else None for when, one in both.items()},
    }


def validate_payload(judged: Sequence[Judged]) -> dict[str, Any]:
    """Predictions of published runs and their errors, as `shardwise validate --json` prints them."""

    def tables(found: Mapping[str, Mapping[str, ErrorStatistics]]) -> dict[str, Any]:
        return {name: {value: asdict(one) for value, one in table.items()} for name, table in found.items()}

    return {
        "schema": VALIDATE_SCHEMA,
        "rows": [_row_payload(one) for one in judged],
        "summary": tables(summary(judged)),
        "memory_summary": tables(memory_summary(judged)),
        "fits": dict(zip(("stated", "would_not_fit", "by_over_a_tenth"), refuted_fits(judged), strict=True)),
        "skipped": {kind: {"rows": rows, "scored": scored} for kind, (rows, scored) in skipped_kinds(judged).items()},
        "unreadable": [list(cell) for cell in unreadable(one.row for one in judged)],
    }


def _row_payload(one: Judged) -> dict[str, Any]:
    found = one.prediction
    estimate = found.estimate if found else None
    return {
        "id": one.row.id,
        "predicted_step_time_s": estimate.step_time_s if estimate else None,
        "interval90": list(estimate.interval90) if estimate and estimate.interval90 else None,
        "predicted_peak_memory_gb": one.predicted_peak_memory_gb,
        "skipped": str(one.skipped) if one.skipped else None,
        "measured_step_time_s": one.row.step_time_s,
        "measured_peak_memory_gb": one.row.peak_memory_gb,
        "scored": one.scored,
        "weight": one.weight,
        "layout": _layout_payload(found) if found else None,
        "approximations": list(found.case.approximations) if found else [],
    }


def _layout_payload(found: Prediction) -> dict[str, Any]:
    case = found.case
    return layout_payload(case.layout, case.architecture, case.job, case.cluster.topology)
