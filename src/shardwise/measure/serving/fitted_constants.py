"""The package's serving constants as text: values, their widths over folds, factors of releases, and spreads of predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from shardwise.measure.calibrate.prediction_spread import group_share, weighted_quantile
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
from shardwise.serve.serving_constants import CONSTANT_NAMES, EARLIER_RELEASES, ENGINE_CONSTANTS
from shardwise.serve.steady_state import INTERVAL_DEVIATIONS

Array = NDArray[np.float64]
# Share of errors with a family left out that a 90% interval reaches: with widths from other families it then holds 90% of rows.
QUANTILE = 0.925
LEAST_ERROR = 1e-6
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
        lines += ["", f"[engine_constants.{_quote(engine)}]"]
        names = (*ENGINE_CONSTANTS, *EARLIER_RELEASES.get(engine, ()))
        lines += [_line(name, fitted, widths, engine) for name in names]
    lines += [
        "",
        "# Deviations of logarithms of what was measured over predictions with the family left out: of TPOT by the share of",
    ]
    lines += [f"# other inputs, {INPUT_SHARES}; of TTFT by requests in an instance, {LOADS}."]
    for latency in ("tpot", "ttft"):
        for engine, kinds in _spreads(table, folds["family"], fitted, latency).items():
            lines += [
                f"[spreads.{latency}.{_quote(engine)}]",
                *(f"{kind} = {values}" for kind, values in kinds.items()),
                "",
            ]
    lines += ["# Factors of releases on passes and on first tokens, drawn towards 1."]
    for row in _releases(table, fitted):
        lines += ["[[releases]]", *(f"{key} = {value}" for key, value in row.items()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _engines(table: RowTable) -> tuple[str, ...]:
    return tuple(sorted({row.constants_name for row in table.rows}))


def _quote(name: str) -> str:
    return name if name.isalnum() else f'"{name}"'


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
    deviations = CellErrors.of(table, fold, fitted, latency).deviation
    return {
        engine: {kind: [round(deviations(engine, kind, cell), 3) for cell in range(3)] for kind in ("dense", "experts")}
        for engine in _engines(table)
    }


Cell = tuple[str, str, int]  # engine, kind of model, and share of inputs or load


@dataclass(frozen=True, slots=True, kw_only=True)
class CellErrors:
    """Errors of rows whose group was left out: magnitudes of logarithms of predictions over measurements, the weights of rows in
    the fit, their cells, and the groups that a fold leaves out."""

    sizes: Array
    weights: Array
    cells: Sequence[Cell]
    groups: Sequence[str]

    @classmethod
    def of(cls, table: RowTable, fold: FoldPredictions, fitted: FittedConstants, latency: str) -> CellErrors:
        """Return the errors of a fold."""
        residuals = fold.tpot if latency == "tpot" else fold.ttft
        cells = prediction_cells(table, fitted, latency)
        return cls(sizes=np.abs(residuals), weights=table.weights, cells=cells, groups=fold.groups)

    def only(self, is_member: NDArray[np.bool_]) -> CellErrors:
        """Return the errors of some rows."""
        return CellErrors(
            sizes=self.sizes[is_member], weights=self.weights[is_member], cells=list(compress(self.cells, is_member)),
            groups=list(compress(self.groups, is_member)),
        )  # fmt: skip

    def deviation(self, engine: str, kind: str, cell: int) -> float:
        """Return the deviation of the logarithms of rows in a cell, from what `QUANTILE` of its errors are within.

        It is drawn towards that of the kind of model in all engines, this towards that of all models, and this towards that of
        all rows, each the more, the fewer groups it has (`prediction_spread.group_share`).
        """
        logarithm = self._quantile(lambda _: True, 0.0, share=1.0)
        logarithm = self._quantile(lambda key: key[2] == cell, logarithm)
        logarithm = self._quantile(lambda key: key[1:] == (kind, cell), logarithm)
        return math.exp(self._quantile(lambda key: key == (engine, kind, cell), logarithm)) / INTERVAL_DEVIATIONS

    def _quantile(self, is_inside: Callable[[Cell], bool], wider: float, share: float | None = None) -> float:
        """Return the logarithm of the quantile of the errors in some cells, drawn towards a wider one's."""
        inside = np.array([is_inside(cell) for cell in self.cells]) & (self.weights > 0.0)
        if not inside.any():
            return wider
        share = group_share(set(compress(self.groups, inside))) if share is None else share
        quantile = weighted_quantile(self.sizes[inside], self.weights[inside], QUANTILE)
        return share * math.log(max(quantile, LEAST_ERROR)) + (1.0 - share) * wider


def nested_deviations(table: RowTable, fold: FoldPredictions, fitted: FittedConstants, latency: str) -> Array:
    """Return the deviation of each row from the errors of the other groups that a fold leaves out: nothing of a row's own group
    is in its interval."""
    errors = CellErrors.of(table, fold, fitted, latency)
    deviations = np.zeros(len(errors.cells))
    for group in dict.fromkeys(fold.groups):
        outside = np.array([name != group for name in fold.groups])
        of_others = errors.only(outside)
        left_out = list(compress(errors.cells, ~outside))
        by_cell = {cell: of_others.deviation(*cell) for cell in set(left_out)}
        deviations[~outside] = [by_cell[cell] for cell in left_out]
    return deviations


def prediction_cells(table: RowTable, fitted: FittedConstants, latency: str) -> list[Cell]:
    """Return the cell of each row that its interval is of: engine, kind of model, and share of inputs or load."""
    if latency == "tpot":
        shares = np.zeros(len(table.rows))
        for stack in table.stacks:
            shares[stack.index] = stack.solve(fitted.of_engine(stack.engine.constants_name)).input_share
        cells: Sequence[int] = np.digitize(shares, INPUT_SHARES).tolist()
    else:
        cells = np.digitize([row.concurrency / row.layout.replicas for row in table.rows], LOADS).tolist()
    kinds = ["experts" if row_architecture(row.model).num_experts else "dense" for row in table.rows]
    return list(zip((row.constants_name for row in table.rows), kinds, cells, strict=True))


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
