"""Errors of predictions: of each run, their statistics by stratum, and a likely cause of an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.measure.calibrate.published_runs.prediction_from_row import RowPrediction, RunCase, predict_cached
from shardwise.measure.calibrate.published_runs.run_table import (
    RunRow,
    SkippedRow,
    duplicate_weights,
    find_instrument,
    instrument_reading,
)
from shardwise.price import loss_kind
from shardwise.values import COMMUNICATION_TERMS, Progress, ignore_progress

SCORED_QUALITIES = ("A", "A-", "")  # qualities that count: all known, all but recompute; users' own rows need none


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRun:
    """A row with its prediction, or with the reason for none (`skipped`)."""

    row: RunRow
    prediction: RowPrediction | None
    skipped: SkippedRow | None
    weight: float

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, less 1; None if either is missing."""
        return self._error(self.prediction.estimate.step_time_s if self.prediction else None, self.row.step_time_s)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory as the row's instrument reads it; None if either is missing."""
        return self._error(self.predicted_peak_memory_gb, self.row.peak_memory_gb)

    @property
    def predicted_peak_memory_gb(self) -> float | None:
        """Predicted reading of the row's instrument in decimal gigabytes."""
        if self.prediction is None:
            return None
        case = self.prediction.case
        loss = loss_kind(case.cluster, case.job)
        return instrument_reading(self.prediction.estimate.memory, loss, self.row.instrument) / 1e9

    @staticmethod
    def _error(predicted: float | None, measured: float | None) -> float | None:
        return predicted / measured - 1.0 if predicted is not None and measured is not None else None

    @property
    def covered(self) -> bool | None:
        """True if the measured time is inside the 90% interval; None if either is missing."""
        interval = self.prediction.estimate.interval90 if self.prediction else None
        measured = self.row.step_time_s
        return interval[0] <= measured <= interval[1] if interval and measured is not None else None

    @property
    def scored(self) -> bool:
        return self.row.quality in SCORED_QUALITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatistics:
    """Statistics of |predicted / measured - 1| over weighted rows: mean, median, 90th percentile, largest; the signed mean.

    `coverage`: the share of rows whose measured time lies in the predicted 90% interval; None where there are no intervals.
    """

    num_rows: int
    weight: float
    mean: float
    median: float
    p90: float
    worst: float
    bias: float
    coverage: float | None = None


def predict_rows(
    rows: Sequence[RunRow], *, bound: bool = False, progress: Progress = ignore_progress
) -> tuple[EvaluatedRun, ...]:
    """Predict every row. A row weighs 1 over the number of duplicates that have a prediction and count. `bound` prices
    at the rates of micro-benchmarks."""
    outcomes = []
    for number, row in enumerate(rows):
        progress("runs predicted", number, len(rows))
        outcomes.append((row, predict_cached(row.inputs, bound=bound)))
    weights = duplicate_weights(
        row for row, outcome in outcomes if isinstance(outcome, RowPrediction) and row.quality in SCORED_QUALITIES
    )
    return tuple(
        EvaluatedRun(
            row=row,
            prediction=outcome if isinstance(outcome, RowPrediction) else None,
            skipped=outcome if isinstance(outcome, SkippedRow) else None,
            weight=weights.get(row.dup_group, 1.0),
        )
        for row, outcome in outcomes
    )


Stratum = Callable[[EvaluatedRun], str]


def _case(run: EvaluatedRun) -> RunCase:
    assert run.prediction is not None
    return run.prediction.case


STRATA: Mapping[str, Stratum] = {
    "overall": lambda run: "all",
    "chip": lambda run: run.row.cell("chip"),
    "dtype": lambda run: run.row.cell("dtype") or "not stated",
    "model": lambda run: "MoE" if _case(run).architecture.num_experts else "dense",
    "source": lambda run: run.row.family or "not stated",
    "quality": lambda run: run.row.quality or "not stated",
    "recompute": lambda run: "stated" if run.row.cell("recompute") else "not stated",
    "stack": lambda run: "known" if _case(run).software.stack.is_known else "new",
}
MEMORY_STRATA: Mapping[str, Stratum] = {**STRATA, "measured": lambda run: find_instrument(run.row.instrument).name}


def error_tables(
    runs: Sequence[EvaluatedRun],
    error: Callable[[EvaluatedRun], float | None] = lambda run: run.error,
    strata: Mapping[str, Stratum] = STRATA,
) -> dict[str, dict[str, ErrorStatistics]]:
    """Return statistics by stratum and value, over the rows that count and have both numbers."""
    scored = [run for run in runs if run.scored and error(run) is not None]
    tables: dict[str, dict[str, ErrorStatistics]] = {}
    for name, stratum in strata.items():
        runs_by_value: dict[str, list[EvaluatedRun]] = {}
        for run in scored:
            runs_by_value.setdefault(stratum(run), []).append(run)
        tables[name] = {
            value: replace(
                error_statistics([(error(run) or 0.0, run.weight) for run in stratum_runs]),
                coverage=_coverage(stratum_runs),
            )
            for value, stratum_runs in sorted(runs_by_value.items())
        }
    return tables


def _coverage(runs: Sequence[EvaluatedRun]) -> float | None:
    """Return the weighted share of runs inside their intervals; None if no run has one."""
    covered = [(run.covered, run.weight) for run in runs if run.covered is not None]
    return (
        sum(weight for inside, weight in covered if inside) / sum(weight for _, weight in covered) if covered else None
    )


def memory_error_tables(runs: Sequence[EvaluatedRun]) -> dict[str, dict[str, ErrorStatistics]]:
    """Return the statistics of peak memory, also by instrument; it has no intervals."""
    tables = error_tables(runs, lambda run: run.memory_error, MEMORY_STRATA)
    return {
        name: {value: replace(errors, coverage=None) for value, errors in table.items()}
        for name, table in tables.items()
    }


def error_statistics(errors: Sequence[tuple[float, float]]) -> ErrorStatistics:
    """Return the statistics of (signed error, weight) pairs, of which there is at least one."""
    total = sum(weight for _, weight in errors)
    sizes = sorted((abs(error), weight) for error, weight in errors)
    return ErrorStatistics(
        num_rows=len(errors), weight=total, mean=sum(e * w for e, w in sizes) / total, median=_quantile(sizes, 0.5),
        p90=_quantile(sizes, 0.9), worst=sizes[-1][0], bias=sum(e * w for e, w in errors) / total,
    )  # fmt: skip


def _quantile(sizes: Sequence[tuple[float, float]], share: float) -> float:
    """Return the smallest error that covers a share of the weight."""
    remaining = share * sum(weight for _, weight in sizes)
    for size, weight in sizes:
        remaining -= weight
        if remaining <= 1e-9:
            return size
    return sizes[-1][0]


def count_skipped(runs: Sequence[EvaluatedRun]) -> dict[str, tuple[int, int]]:
    """Count the rows without a prediction by reason, the most common first: all of them, and those that would count."""
    counts = Counter(run.skipped.kind for run in runs if run.skipped)
    scored_counts = Counter(run.skipped.kind for run in runs if run.skipped and run.scored)
    return {kind: (count, scored_counts[kind]) for kind, count in counts.most_common()}


def count_refuted_fits(runs: Sequence[EvaluatedRun]) -> tuple[int, int, int]:
    """Count the runs that state what they recompute; of these, those whose predicted memory does not fit although they
    ran, and those that exceed the memory by over a tenth."""
    estimates = [run.prediction.estimate for run in runs if run.scored and run.prediction and run.row.cell("recompute")]
    num_refuted = sum(not estimate.fits for estimate in estimates)
    return len(estimates), num_refuted, sum(estimate.margin < -0.1 for estimate in estimates)


def count_tight_fits(runs: Sequence[EvaluatedRun]) -> int:
    """Count the runs that state what they recompute whose predicted memory is tight (`price.device_memory`)."""
    estimates = [run.prediction.estimate for run in runs if run.scored and run.prediction and run.row.cell("recompute")]
    return sum(estimate.verdict == "tight" for estimate in estimates)


def largest_errors(runs: Sequence[EvaluatedRun], limit: int) -> Iterator[EvaluatedRun]:
    """Yield up to `limit` rows that count with the largest errors, one of each group of duplicates."""
    groups: set[str] = set()
    for run in sorted(
        (run for run in runs if run.scored and run.error is not None), key=lambda run: -abs(run.error or 0.0)
    ):
        if run.row.dup_group not in groups and len(groups) < limit:
            groups.add(run.row.dup_group)
            yield run


FEW_TOKENS, NARROW = 4096, 1024
Applies = Callable[[RowPrediction], bool]


def _tokens(prediction: RowPrediction) -> float:
    """Return the tokens that a device's kernels process in one micro-batch."""
    return prediction.case.layout.micro_batch_seqs * prediction.case.job.seq_len / prediction.case.layout.cp


def _attention_share(prediction: RowPrediction) -> float:
    """Return the FLOPs of attention scores over those of a block's matrices: about seq_len / 6 D in a usual block."""
    architecture = prediction.case.architecture
    return (
        prediction.case.job.seq_len * architecture.num_heads * architecture.head_dim / (6.0 * architecture.d_model**2)
    )


def _hidden_share(prediction: RowPrediction) -> float:
    return sum(prediction.estimate.hidden.values()) / prediction.estimate.step_time_s


# What makes a run slower than predicted; the first that applies.
CAUSES_OF_SLOWNESS: tuple[tuple[Applies, str], ...] = (
    (lambda p: not p.case.software.stack.is_known, "a stack that no run measured: priced as others of its kind"),
    (lambda p: _hidden_share(p) > 0.4, "much traffic, taken as hidden behind compute for the most part"),
    (
        lambda p: bool(p.case.architecture.num_experts),
        "routing, the dispatcher and the host's waiting are priced by rules of thumb",
    ),
    (
        lambda p: min(p.case.architecture.d_ff / p.case.layout.tp, p.case.architecture.d_model) < 2 * NARROW,
        "narrow matmuls: many short kernels",
    ),
    (lambda p: _tokens(p) <= FEW_TOKENS, "few tokens a micro-batch: partial waves of tiles are not priced"),
    (lambda p: _attention_share(p) > 0.2, "much attention, whose kernels differ by release"),
    (lambda p: True, "no obvious cause: noise, or a release slower than others of its stack"),
)  # fmt: skip


def guess_error_cause(run: EvaluatedRun) -> str:
    """Return a likely cause of a row's error: an approximation, or a part of the step that is priced wrongly."""
    prediction = run.prediction
    assert prediction is not None
    if (run.error or 0.0) < 0:
        return next((text for text in prediction.case.approximations if text.startswith("attention")), "") or next(
            text for applies, text in CAUSES_OF_SLOWNESS if applies(prediction)
        )
    time = {axis: prediction.estimate.time[axis] for axis in COMMUNICATION_TERMS}
    longest = max(time, key=lambda axis: time[axis])
    if time[longest] > 0.1 * prediction.estimate.step_time_s:
        return f"communication over {longest} may hide behind compute"
    if prediction.estimate.time["bubble"] > 0.1 * prediction.estimate.step_time_s:
        return "the pipeline may be interleaved more than stated"
    return "recompute may be less than it is priced as"
