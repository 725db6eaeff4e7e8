"""Errors of predictions: of each run, their statistics by stratum, and a likely cause of an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.measure.calibrate.published_runs.prediction_from_row import Prediction, RunCase, predict_cached
from shardwise.measure.calibrate.published_runs.run_table import (
    RunRow,
    SkippedRow,
    duplicate_weights,
    find_instrument,
    instrument_reading,
)
from shardwise.model.architecture import Architecture
from shardwise.price.roofline import loss_kind
from shardwise.values.estimate_terms import COMMUNICATION_TERMS
from shardwise.values.progress import Progress, ignore_progress

SCORED_QUALITIES = ("A", "A-", "")  # qualities that count: all known, all but recompute; users' own rows need none


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRun:
    """A row with its prediction, or with why there is none (`skipped`)."""

    row: RunRow
    prediction: Prediction | None
    skipped: SkippedRow | None
    weight: float

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, less 1; None where one of the two is missing."""
        return self._error(self.prediction.estimate.step_time_s if self.prediction else None, self.row.step_time_s)

    @property
    def memory_error(self) -> float | None:
        """The same for the peak memory, as the row's instrument would have read it."""
        return self._error(self.predicted_peak_memory_gb, self.row.peak_memory_gb)

    @property
    def predicted_peak_memory_gb(self) -> float | None:
        """Decimal gigabytes that the row's instrument would have read, by the prediction."""
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
        """Whether the measured step time lies in the predicted interval; None without one of the two."""
        interval = self.prediction.estimate.interval90 if self.prediction else None
        measured = self.row.step_time_s
        return interval[0] <= measured <= interval[1] if interval and measured is not None else None

    @property
    def scored(self) -> bool:
        return self.row.quality in SCORED_QUALITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatistics:
    """Of |predicted / measured - 1|, each row weighted: mean, median, 90th percentile, largest; and the mean with its sign.

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
    """Predict every row. A row counts 1 over the number of rows of its group of duplicates among those that have a prediction."""
    found = []
    for number, row in enumerate(rows):
        progress("runs predicted", number, len(rows))
        found.append((row, predict_cached(row.inputs, bound=bound)))
    counted = duplicate_weights(
        row for row, one in found if isinstance(one, Prediction) and row.quality in SCORED_QUALITIES
    )
    return tuple(
        EvaluatedRun(
            row=row,
            prediction=one if isinstance(one, Prediction) else None,
            skipped=one if isinstance(one, SkippedRow) else None,
            weight=counted.get(row.dup_group, 1.0),
        )
        for row, one in found
    )


Stratum = Callable[[EvaluatedRun], str]


def _case(judged: EvaluatedRun) -> RunCase:
    assert judged.prediction is not None
    return judged.prediction.case


STRATA: Mapping[str, Stratum] = {
    "overall": lambda one: "all",
    "chip": lambda one: one.row.cell("chip"),
    "dtype": lambda one: one.row.cell("dtype") or "not stated",
    "model": lambda one: "MoE" if _case(one).architecture.num_experts else "dense",
    "source": lambda one: one.row.family or "not stated",
    "quality": lambda one: one.row.quality or "not stated",
    "recompute": lambda one: "stated" if one.row.cell("recompute") else "not stated",
    "stack": lambda one: "known" if _case(one).software.stack.known else "new",
}
MEMORY_STRATA: Mapping[str, Stratum] = {**STRATA, "measured": lambda one: find_instrument(one.row.instrument).name}


def error_tables(
    judged: Sequence[EvaluatedRun],
    error: Callable[[EvaluatedRun], float | None] = lambda one: one.error,
    strata: Mapping[str, Stratum] = STRATA,
) -> dict[str, dict[str, ErrorStatistics]]:
    """Statistics by stratum and its values, of the rows that count and have both numbers."""
    scored = [one for one in judged if one.scored and error(one) is not None]
    tables: dict[str, dict[str, ErrorStatistics]] = {}
    for name, stratum in strata.items():
        members: dict[str, list[EvaluatedRun]] = {}
        for one in scored:
            members.setdefault(stratum(one), []).append(one)
        tables[name] = {
            value: replace(
                error_statistics([(error(one) or 0.0, one.weight) for one in found]), coverage=_coverage(found)
            )
            for value, found in sorted(members.items())
        }
    return tables


def _coverage(judged: Sequence[EvaluatedRun]) -> float | None:
    """Weighted share of runs inside their intervals, of those that have one."""
    known = [(one.covered, one.weight) for one in judged if one.covered is not None]
    return sum(weight for inside, weight in known if inside) / sum(weight for _, weight in known) if known else None


def memory_error_tables(judged: Sequence[EvaluatedRun]) -> dict[str, dict[str, ErrorStatistics]]:
    """The same for the peak memory, by the instrument too; it has no intervals."""
    tables = error_tables(judged, lambda one: one.memory_error, MEMORY_STRATA)
    return {
        name: {value: replace(one, coverage=None) for value, one in table.items()} for name, table in tables.items()
    }


def error_statistics(errors: Sequence[tuple[float, float]]) -> ErrorStatistics:
    """Statistics of (error with its sign, weight), of which there is at least one."""
    total = sum(weight for _, weight in errors)
    sizes = sorted((abs(error), weight) for error, weight in errors)
    return ErrorStatistics(
        num_rows=len(errors), weight=total, mean=sum(e * w for e, w in sizes) / total, median=_quantile(sizes, 0.5),
        p90=_quantile(sizes, 0.9), worst=sizes[-1][0], bias=sum(e * w for e, w in errors) / total,
    )  # fmt: skip


def _quantile(sizes: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest error that so much of the weight does not exceed."""
    left = share * sum(weight for _, weight in sizes)
    for size, weight in sizes:
        left -= weight
        if left <= 1e-9:
            return size
    return sizes[-1][0]


def count_skipped(judged: Sequence[EvaluatedRun]) -> dict[str, tuple[int, int]]:
    """Reasons for rows without a prediction: how many rows, and how many of those that would count; the commonest first."""
    every = Counter(one.skipped.kind for one in judged if one.skipped)
    scored = Counter(one.skipped.kind for one in judged if one.skipped and one.scored)
    return {kind: (count, scored[kind]) for kind, count in every.most_common()}


def count_refuted_fits(judged: Sequence[EvaluatedRun]) -> tuple[int, int, int]:
    """Runs that state what they recompute, how many of them would not fit by our memory model, though they ran, and how many
    not by more than a tenth."""
    ran = [one.prediction.estimate for one in judged if one.scored and one.prediction and one.row.cell("recompute")]
    return len(ran), sum(not one.fits for one in ran), sum(one.margin < -0.1 for one in ran)


def largest_errors(judged: Sequence[EvaluatedRun], most: int) -> Iterator[EvaluatedRun]:
    """The rows that count with the largest errors, one of each group of duplicates."""
    seen: set[str] = set()
    for one in sorted(
        (one for one in judged if one.scored and one.error is not None), key=lambda one: -abs(one.error or 0.0)
    ):
        if one.row.dup_group not in seen and len(seen) < most:
            seen.add(one.row.dup_group)
            yield one


FEW_TOKENS, NARROW = 4096, 1024
Applies = Callable[[Prediction], bool]


def _tokens(found: Prediction) -> float:
    """Tokens that a device's kernels see in one micro-batch."""
    return found.case.layout.micro_batch_seqs * found.case.job.seq_len / found.case.layout.cp


def _width(architecture: Architecture, tp: int) -> float:
    return architecture.d_ff / tp


def _attention_share(found: Prediction) -> float:
    """FLOPs of attention's scores over those of a block's matrices, about seq_len / 6 D for one of the usual shape."""
    architecture = found.case.architecture
    return found.case.job.seq_len * architecture.num_heads * architecture.head_dim / (6.0 * architecture.d_model**2)


def _hidden_share(found: Prediction) -> float:
    return sum(found.estimate.hidden.values()) / found.estimate.step_time_s


# What makes a run slower than predicted; the first that applies.
CAUSES_OF_SLOWNESS: tuple[tuple[Applies, str], ...] = (
    (lambda p: not p.case.software.stack.known, "a stack that no run measured: priced as others of its kind"),
    (lambda p: _hidden_share(p) > 0.4, "much traffic, taken as hidden behind compute for the most part"),
    (
        lambda p: bool(p.case.architecture.num_experts),
        "routing, the dispatcher and the host's waiting are priced by rules of thumb",
    ),
    (
        lambda p: min(_width(p.case.architecture, p.case.layout.tp), p.case.architecture.d_model) < 2 * NARROW,
        "narrow matmuls: many short kernels",
    ),
    (lambda p: _tokens(p) <= FEW_TOKENS, "few tokens a micro-batch: partial waves of tiles are not priced"),
    (lambda p: _attention_share(p) > 0.2, "much attention, whose kernels differ by release"),
    (lambda p: True, "no obvious cause: noise, or a release slower than others of its stack"),
)  # fmt: skip


def guess_cause(judged: EvaluatedRun) -> str:
    """What may be behind a row's error: what was approximated, else what of the step is not priced, or priced too high."""
    found = judged.prediction
    assert found is not None
    if (judged.error or 0.0) < 0:
        return next((words for words in found.case.approximations if words.startswith("attention")), "") or next(
            words for applies, words in CAUSES_OF_SLOWNESS if applies(found)
        )
    time = {axis: found.estimate.time[axis] for axis in COMMUNICATION_TERMS}
    longest = max(time, key=lambda axis: time[axis])
    if time[longest] > 0.1 * found.estimate.step_time_s:
        return f"communication over {longest} may hide behind compute"
    if found.estimate.time["bubble"] > 0.1 * found.estimate.step_time_s:
        return "the pipeline may be interleaved more than stated"
    return "recompute may be less than it is priced as"
