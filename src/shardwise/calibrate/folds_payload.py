"""Predictions of runs that were left out of the fit, as plain data: what `shardwise validate --folds --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from typing_extensions import TypedDict

from shardwise.calibrate.accuracy import ErrorStatistics
from shardwise.calibrate.published import STRATA, Published, fold_ranking, fold_statistics, noise
from shardwise.calibrate.ranking import Ranking

SCHEMA = "shardwise.validate.folds/1"


class FoldRow(TypedDict):
    """A run: measured, and predicted by the fit to all and by that of each fold which leaves it out (null: it does not)."""

    id: str
    measured_step_time_s: float
    fitted_step_time_s: float | None
    model_step_time_s: float | None
    source_step_time_s: float | None
    lab_step_time_s: float | None
    three_step_time_s: float | None


class FoldsPayload(TypedDict):
    """Errors of runs that were left out of the fit, by fold and stratum; spread, coverage and ranking by fold."""

    schema: Literal["shardwise.validate.folds/1"]
    rows: list[FoldRow]
    summary: dict[str, dict[str, ErrorStatistics]]
    spread: dict[str, dict[str, tuple[float, float]]]
    coverage: dict[str, float]
    ranking: dict[str, Ranking]
    noise: dict[str, ErrorStatistics]


def fold_payload(found: Published) -> dict[str, Any]:
    """What `shardwise validate --folds --json` prints.

    Predictions of each run by fold, statistics by fold and stratum, spread, coverage and ranking.
    """
    seconds = {"fitted": found.in_sample, **found.folds}
    return {
        "schema": SCHEMA,
        "rows": [
            {
                "id": one.row.id,
                "measured_step_time_s": float(found.measured[i]),
                **{f"{fold}_step_time_s": _known(float(draws[0][i])) for fold, draws in seconds.items()},
            }
            for i, one in enumerate(found.judged)
        ],
        "summary": {
            fold: {
                name: asdict(one)
                for name, stratum in STRATA.items()
                if (one := fold_statistics(found, draws, stratum)) is not None
            }
            for fold, draws in seconds.items()
        },
        "spread": {fold: found.spread(fold) for fold in found.folds},
        "coverage": {fold: found.coverage(fold) for fold in found.folds},
        "ranking": {
            fold: asdict(ranks) for fold, draws in seconds.items() if (ranks := fold_ranking(found, draws)) is not None
        },
        "noise": {kind: asdict(one) for kind, one in noise(found).items()},
    }


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value
