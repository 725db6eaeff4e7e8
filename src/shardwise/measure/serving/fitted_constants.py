"""The package's serving constants as text: values, their widths over folds, factors of releases, and spreads of predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
# Share of errors with a family left out that a 90% interval reaches: with widths from other families it then holds 90% of rows.
QUANTILE = 0.94
POOLED_ROWS = 20.0  # a cell of an engine is drawn towards that of all engines by as many rows
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
    residuals = fold.tpot if latency == "tpot" else fold.ttft
    deviations = cell_deviations(residuals, prediction_cells(table, fitted, latency))
    return {
        engine: {kind: [round(deviations(engine, kind, cell), 3) for cell in range(3)] for kind in ("dense", "experts")}
        for engine in _engines(table)
    }


Cell = tuple[str, str, int]


def cell_deviations(residuals: Array, cells: Sequence[Cell]) -> Callable[[str, str, int], float]:
    """Return the deviation of the logarithms of rows by cell: what `QUANTILE` of the errors in the cell are within, drawn towards
    those of the kind of model in all engines, and these towards all."""
    sizes = np.log(np.maximum(np.abs(residuals), 1e-6))

    def quantile(inside: Sequence[bool], wider: float) -> float:
        values = sizes[np.array(inside, dtype=bool)]
        share = len(values) / (len(values) + POOLED_ROWS)
        return share * float(np.quantile(values, QUANTILE)) + (1.0 - share) * wider if len(values) else wider

    everything = float(np.quantile(sizes, QUANTILE))

    def deviation(engine: str, kind: str, cell: int) -> float:
        of_kind = quantile([key[1:] == (kind, cell) for key in cells], everything)
        return float(np.exp(quantile([key == (engine, kind, cell) for key in cells], of_kind))) / INTERVAL_DEVIATIONS

    return deviation


def nested_deviations(table: RowTable, fold: FoldPredictions, fitted: FittedConstants, latency: str) -> Array:
    """Return the deviation of each row from the errors of the other groups that a fold leaves out: nothing of a row's own group
    is in its interval."""
    residuals = fold.tpot if latency == "tpot" else fold.ttft
    cells = prediction_cells(table, fitted, latency)
    deviations = np.zeros(len(cells))
    for group in dict.fromkeys(fold.groups):
        outside = np.array([name != group for name in fold.groups])
        deviation_of = cell_deviations(residuals[outside], [cells[row] for row in np.flatnonzero(outside)])
        by_cell = {cell: deviation_of(*cell) for cell in {cells[row] for row in np.flatnonzero(~outside)}}
        deviations[~outside] = [by_cell[cells[row]] for row in np.flatnonzero(~outside)]
    return deviations


def prediction_cells(table: RowTable, fitted: FittedConstants, latency: str) -> list[Cell]:
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
