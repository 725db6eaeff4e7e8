"""Predictions of published serving configurations beside what was measured: errors, coverage of intervals, picks under limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.measure.serving.batch_rows import SOURCE as BATCH_SOURCE
from shardwise.measure.serving.fitted_constants import fit_everything, nested_deviations
from shardwise.measure.serving.pool_validation import PoolValidation, validate_pool_rows
from shardwise.measure.serving.power_fit import PowerValidation, validate_power
from shardwise.measure.serving.serving_errors import ServingErrors
from shardwise.measure.serving.serving_fit import FoldPredictions, RowTable, fitted_rows
from shardwise.measure.serving.serving_rows import ServingRow, row_architecture
from shardwise.measure.serving.throughput_validation import ThroughputValidation, validate_throughput_rows
from shardwise.serve.steady_state import INTERVAL_DEVIATIONS, latency_within
from shardwise.values import Payload, Progress, ignore_progress

Array = NDArray[np.float64]
FEWEST_CONFIGURATIONS = 6  # of a group that picks are made in
FEWEST_ROWS = 200  # of a class that coverage is stated of
TPOT_LIMITS_S = (0.01, 0.02, 0.03, 0.05)
SLACK = 1.05  # a pick breaks a limit beyond this multiple of it
CLASSES = ("engine", "chip", "model", "source", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFold(Payload):
    """Errors with all rows of a family, a chip, an engine or a source left out in turn (`fold`; "none": with none)."""

    fold: str
    tpot: ServingErrors
    ttft: ServingErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCoverage(Payload):
    """Share of a class of rows, `key` = `value`, that lies in its 90% intervals where its model's family is left out, of the fit
    and of the errors that the intervals' widths are from."""

    key: str
    value: str
    num_rows: int
    tpot: float
    ttft: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingChoice(Payload):
    """Picks of most tokens per second and device under a limit on TPOT, the family left out: `num_groups` have a pick, of which
    `num_broken` break the limit by more than 5%; the others lose `mean_regret` of the best throughput within the limit. In
    `num_without_pick` groups none is predicted to meet it though one does."""

    limit_s: float
    num_groups: int
    num_broken: int
    num_without_pick: int
    mean_regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingValidation(Payload):
    """Predictions of the published serving rows, by the package's constants (`fitted`) and with rows left out.

    `batches` are the folds of `num_batches` single batches (Splitwise's), which are fitted too: TPOT is that of a token, TTFT the
    time of all inputs. `pools` are rows whose prefill and decode part, on which their widths rest, `launched_pools` others, to
    which nothing is fitted, `throughput` is of a table that no constant is fitted to.
    `power` is the fit of the watts of batches.
    """

    SCHEMA = "shardwise.validate.serving/1"
    num_rows: int
    fitted: ServingFold
    folds: Sequence[ServingFold]
    num_batches: int
    batches: Sequence[ServingFold]
    coverage: Sequence[ServingCoverage]
    choices: Sequence[ServingChoice]
    pools: PoolValidation
    launched_pools: PoolValidation
    throughput: ThroughputValidation
    power: PowerValidation


def validate_serving_rows(progress: Progress = ignore_progress) -> ServingValidation:
    """Return errors, coverage and picks of the published serving rows."""
    progress("serving rows: one table of all")
    table = RowTable.of(fitted_rows())
    progress("serving rows: constants without each family, chip, engine and source")
    fitted, folds = fit_everything(table)
    is_batch = np.array([row.source == BATCH_SOURCE for row in table.rows])
    residuals = {"none": _shipped_residuals(table)} | {name: (fold.tpot, fold.ttft) for name, fold in folds.items()}
    of_loads, of_batches = (
        {
            name: ServingFold(fold=name, tpot=ServingErrors.of(tpot[rows]), ttft=ServingErrors.of(ttft[rows]))
            for name, (tpot, ttft) in residuals.items()
        }
        for rows in (~is_batch, is_batch)
    )
    family = folds["family"]
    spreads = nested_deviations(table, family, fitted, "tpot"), nested_deviations(table, family, fitted, "ttft")
    return ServingValidation(
        num_rows=int((~is_batch).sum()), fitted=of_loads["none"], folds=[of_loads[name] for name in folds],
        num_batches=int(is_batch.sum()), batches=list(of_batches.values()), coverage=_coverage(table, family, spreads),
        choices=[_choose(table, family, spreads[0], limit_s) for limit_s in TPOT_LIMITS_S],
        pools=validate_pool_rows(states_workers=True),
        launched_pools=validate_pool_rows(states_workers=False), throughput=validate_throughput_rows(), power=validate_power(),
    )  # fmt: skip


def _shipped_residuals(table: RowTable) -> tuple[Array, Array]:
    """Return logarithms of predictions by the package's constants over measurements, of TPOT and TTFT."""
    tpot_s, ttft_s = np.zeros(len(table.rows)), np.zeros(len(table.rows))
    for stack in table.stacks:
        factors = [
            row.serving_engine.release_factor(row.chip, row.expert_or_weight_format)
            for row in (table.rows[position] for position in stack.index)
        ]
        state = stack.solve(
            stack.engine.constants, np.array([f.pass_factor for f in factors]),
            np.array([f.first_token_factor for f in factors]),
        )  # fmt: skip
        tpot_s[stack.index], ttft_s[stack.index] = state.tpot_s, state.ttft_s
    return np.log(tpot_s / table.tpot_s), np.log(ttft_s / table.ttft_s)


def row_class(row: ServingRow, key: str) -> str:
    """Return the class of a row by a key of `CLASSES`."""
    if key == "kind":
        return "experts" if row_architecture(row.model).num_experts else "dense"
    return str(getattr(row, key))


def _coverage(table: RowTable, fold: FoldPredictions, spreads: tuple[Array, Array]) -> list[ServingCoverage]:
    inside_tpot, inside_ttft = (
        np.abs(residuals) <= INTERVAL_DEVIATIONS * spread
        for residuals, spread in zip((fold.tpot, fold.ttft), spreads, strict=True)
    )
    classes = []
    for key in CLASSES:
        values = np.array([row_class(row, key) for row in table.rows])
        for value in sorted(set(values)):
            rows = values == value
            if rows.sum() >= FEWEST_ROWS:
                classes.append(
                    ServingCoverage(
                        key=key,
                        value=str(value),
                        num_rows=int(rows.sum()),
                        tpot=float(inside_tpot[rows].mean()),
                        ttft=float(inside_ttft[rows].mean()),
                    )
                )
    return classes


def _choose(table: RowTable, fold: FoldPredictions, spread: Array, limit_s: float) -> ServingChoice:
    """Return how picks under a limit do, in groups of rows that differ in layout and concurrency alone."""
    predicted_tpot, predicted_ttft = table.tpot_s * np.exp(fold.tpot), table.ttft_s * np.exp(fold.ttft)
    high = predicted_tpot * np.exp(INTERVAL_DEVIATIONS * spread)
    meets = latency_within(limit_s, predicted_tpot, predicted_tpot, high)
    predicted = _throughput(table, predicted_tpot, predicted_ttft)
    measured = _throughput(table, table.tpot_s, table.ttft_s)
    num_groups = num_broken = num_without_pick = 0
    regrets = []
    for rows in alike_rows(table.rows).values():
        if table.rows[rows[0]].source == BATCH_SOURCE:  # batches are no loads that one chooses among
            continue
        feasible = table.tpot_s[rows] <= limit_s
        if len(rows) < FEWEST_CONFIGURATIONS or not feasible.any():
            continue
        if not meets[rows].any():
            num_without_pick += 1
            continue
        num_groups += 1
        candidates = rows[meets[rows]]
        pick = candidates[np.argmax(predicted[candidates])]
        if table.tpot_s[pick] > SLACK * limit_s:
            num_broken += 1
        else:
            regrets.append(max(1.0 - measured[pick] / measured[rows][feasible].max(), 0.0))
    return ServingChoice(
        limit_s=limit_s, num_groups=num_groups, num_broken=num_broken, num_without_pick=num_without_pick,
        mean_regret=float(np.mean(regrets)) if regrets else 0.0,
    )  # fmt: skip


def _throughput(table: RowTable, tpot_s: Array, ttft_s: Array) -> Array:
    """Return output tokens per second and device."""
    osl, concurrency, devices = (
        np.array(values)
        for values in zip(*((row.mean_osl, row.concurrency, row.layout.num_devices) for row in table.rows), strict=True)
    )
    throughput: Array = concurrency * osl / (ttft_s + osl * tpot_s) / devices
    return throughput


def alike_rows(rows: Sequence[ServingRow]) -> Mapping[tuple[object, ...], NDArray[np.int64]]:
    """Return the positions of rows that differ in layout and concurrency alone."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        key = row.model, row.chip, row.engine, row.release_name, row.formats, row.isl, row.osl, row.mtp_tokens
        groups[key].append(position)
    return {key: np.array(positions, dtype=np.int64) for key, positions in groups.items()}
