"""The package's serving constants as text: values, their widths over folds, factors of releases, and spreads of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.measure.serving.serving_fit import (
    FOLDS,
    TPOT_OFFSETS,
    TTFT_OFFSETS,
    FittedConstants,
    FoldPredictions,
    RowTable,
    constant_keys,
    fit_constants,
    predict_left_out,
    release_offsets,
)
from shardwise.measure.serving.serving_rows import row_architecture
from shardwise.serve.estimate import INPUT_SHARES, LOADS
from shardwise.serve.serving_constants import CONSTANT_NAMES, ENGINE_CONSTANTS
from shardwise.serve.steady_state import INTERVAL_DEVIATIONS

Array = NDArray[np.float64]
QUANTILE = 0.91  # of errors with a family left out that a 90% interval reaches: classes inside a cell differ
POOLED_ROWS = 10.0  # a cell of an engine is drawn towards all cells by as many rows
HEADER = (
    "# Constants of serving engines, fitted to measure/serving/serving_rows.csv; measure.serving.fitted_constants makes this.",
    "# width: standard deviation of the logarithm of a constant over fits without a family, chip, engine or source of rows.",
)


def fit_everything(table: RowTable) -> tuple[FittedConstants, Mapping[str, FoldPredictions]]:
    """Return the constants of all rows, and the predictions of each fold."""
    fitted = fit_constants(table, np.ones(len(table.rows), dtype=bool))
    return fitted, {fold: predict_left_out(table, fitted, fold) for fold in FOLDS}


def constants_text(table: RowTable, fitted: FittedConstants, folds: Mapping[str, FoldPredictions]) -> str:
    """Return the text of `serving_constants.toml`."""
    widths = _widths(fitted, folds)
    lines = [*HEADER, "", "[constants]"]
    lines += [_line(name, fitted, widths, None) for name in CONSTANT_NAMES if name not in ENGINE_CONSTANTS]
    for engine in _engines(table):
        lines += ["", f"[engine_constants.{engine}]"]
        lines += [_line(name, fitted, widths, engine) for name in ENGINE_CONSTANTS]
    lines += [
        "",
        "# Deviations of logarithms of what was measured over predictions with the family left out: of TPOT by the share of",
    ]
    lines += [f"# other inputs, {INPUT_SHARES}; of TTFT by requests in an instance, {LOADS}."]
    for latency in ("tpot", "ttft"):
        for engine, kinds in _spreads(table, folds["family"], fitted, latency).items():
            lines += [f"[spreads.{latency}.{engine}]", *(f"{kind} = {values}" for kind, values in kinds.items()), ""]
    lines += ["# Factors of releases on passes and on first tokens, drawn towards 1."]
    for row in _releases(table, fitted):
        lines += ["[[releases]]", *(f"{key} = {value}" for key, value in row.items()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _engines(table: RowTable) -> tuple[str, ...]:
    return tuple(sorted({row.engine for row in table.rows}))


def _line(
    name: str, fitted: FittedConstants, widths: Mapping[tuple[str, str | None], float], engine: str | None
) -> str:
    key = name, engine
    return f"{name} = {{ value = {fitted.values[key]:.4g}, width = {widths[key]:.2f} }}"


def _widths(fitted: FittedConstants, folds: Mapping[str, FoldPredictions]) -> dict[tuple[str, str | None], float]:
    fits = [constants for fold in folds.values() for constants in fold.constants.values()]
    return {
        key: float(np.sqrt(np.mean([np.log(fit.values[key] / fitted.values[key]) ** 2 for fit in fits])))
        for key in constant_keys()
    }


def _spreads(
    table: RowTable, fold: FoldPredictions, fitted: FittedConstants, latency: str
) -> dict[str, dict[str, list[float]]]:
    """Return the deviations of each engine and kind of model by cell."""
    residuals = np.abs(fold.tpot if latency == "tpot" else fold.ttft)
    cells = prediction_cells(table, fitted, latency)
    pooled = float(np.log(np.quantile(residuals, QUANTILE)))
    spreads: dict[str, dict[str, list[float]]] = {}
    for engine in _engines(table):
        for kind in ("dense", "experts"):
            deviations = []
            for cell in range(3):
                inside = residuals[[key == (engine, kind, cell) for key in cells]]
                share = len(inside) / (len(inside) + POOLED_ROWS)
                logarithm = (
                    share * float(np.log(np.quantile(inside, QUANTILE))) + (1 - share) * pooled
                    if len(inside)
                    else pooled
                )
                deviations.append(round(float(np.exp(logarithm)) / INTERVAL_DEVIATIONS, 3))
            spreads.setdefault(engine, {})[kind] = deviations
    return spreads


def prediction_cells(table: RowTable, fitted: FittedConstants, latency: str) -> list[tuple[str, str, int]]:
    """Return the cell of each row that its interval is of: engine, kind of model, and share of inputs or load."""
    if latency == "tpot":
        shares = np.zeros(len(table.rows))
        for stack in table.stacks:
            shares[stack.index] = stack.solve(fitted.of_engine(stack.engine.name)).input_share
        cells: Sequence[int] = np.digitize(shares, INPUT_SHARES).tolist()
    else:
        cells = np.digitize([row.concurrency / row.layout.replicas for row in table.rows], LOADS).tolist()
    kinds = ["experts" if row_architecture(row.model).num_experts else "dense" for row in table.rows]
    return list(zip((row.engine for row in table.rows), kinds, cells, strict=True))


def _releases(table: RowTable, fitted: FittedConstants) -> list[dict[str, str]]:
    """Return a table of factors for each release, and for each of its chips and formats."""
    predictions = table.predict(fitted)
    tpot = release_offsets(predictions.tpot, table, table.weights, TPOT_OFFSETS)
    ttft = release_offsets(predictions.ttft, table, table.weights, TTFT_OFFSETS)
    factors: dict[tuple[str, ...], list[int]] = {}
    for position, row in enumerate(table.rows):
        factors.setdefault((row.engine, row.release_name, "", ""), []).append(position)
        factors.setdefault((row.engine, row.release_name, row.chip, row.expert_or_weight_format), []).append(position)
    rows = []
    for (engine, release, chip, weights), positions in sorted(factors.items()):
        names = {"engine": engine, "release": release, **({"chip": chip, "weights": weights} if chip else {})}
        rows.append(
            {
                **{key: f'"{value}"' for key, value in names.items()},
                "pass_factor": f"{float(np.exp(np.mean(tpot[positions]))):.3f}",
                "first_token_factor": f"{float(np.exp(np.mean(ttft[positions] - tpot[positions]))):.3f}",
                "num_rows": str(len(positions)),
            }
        )
    return rows
