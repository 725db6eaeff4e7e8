"""Predictions held against measured runs, as plain data: of published runs, and of one's own that a cluster is fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.calibrate.accuracy import ErrorStatistics, Judged, memory_summary, refuted_fits, skipped_kinds, summary
from shardwise.calibrate.own import OwnFit
from shardwise.calibrate.published_runs.rows import unreadable

CALIBRATE_SCHEMA = "shardwise.calibrate/1"
VALIDATE_SCHEMA = "shardwise.validate/1"


def calibrate_payload(found: OwnFit, name: str, source: str) -> dict[str, Any]:
    """A calibration, as `shardwise calibrate --json` prints it."""
    return {
        "schema": CALIBRATE_SCHEMA,
        "cluster": {"name": name, "chip": found.own.nominal.chip.name, "num_devices": found.own.nominal.num_devices},
        "stack": found.stack.name,
        "source": source,
        "constants": {
            one.name: {
                **{key: value for key, value in asdict(one).items() if key != "name"},
                "identified": one.identified,
            }
            for one in found.constants
        },
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
        "layout": str(found.case.layout) if found else None,
        "approximations": list(found.case.approximations) if found else [],
    }
