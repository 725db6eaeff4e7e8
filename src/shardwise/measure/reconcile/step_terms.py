"""Terms of a step, predicted and measured: seconds, bytes of the fullest device, and issued collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated

from shardwise.model.job import OVERLAP_CONVENTIONS
from shardwise.price import Estimate, Problem
from shardwise.price.estimate import estimate
from shardwise.records import MeasuredMemory, RunInspection, StepRecord
from shardwise.records.step_log import MEASURED_TERMS
from shardwise.run import TrainingRecipe
from shardwise.run.trainer.engine_prediction import comparable_counts, engine_instance
from shardwise.search import Plan
from shardwise.search.explain.constant_sensitivity import worsen_constants
from shardwise.sharding import ROWS, IssuedCollective
from shardwise.step import count_collectives
from shardwise.values import MEMORY_TERMS, TIME_TERMS, Flat, Payload, printed

TIME_TOLERANCE = 0.05  # relative: a step closer to its prediction has no attribution
OTHER_TERM = "other"  # measured seconds that no other term has
LEAST_CHANGE = 1e-6  # of a step: a term that moves by more depends on the constant that was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm(Payload):
    """One term. `predicted_s` is None for what no estimate has; `hidden_s` is traffic that is predicted behind compute."""

    name: str
    predicted_s: float | None
    measured_s: float
    hidden_s: float = 0.0

    @property
    @printed
    def difference_s(self) -> float:
        return self.measured_s - (self.predicted_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime(Payload):
    """A step: predicted, with its 90% prediction interval (None: the prediction is a bound), and measured.

    `measured_s` is the mean over the middle half of `num_steps` steps by their time, and each term's seconds are the mean over
    the same steps: they add up to it. `low_s` and `high_s` are the 10th and 90th percentile of all steps; `rest_s` is the part of
    `measured_s` that no term of the estimate has.
    """

    predicted_s: float
    interval90: tuple[float, float] | None
    measured_s: float
    low_s: float
    high_s: float
    num_steps: int
    rest_s: float
    terms: tuple[TimeTerm, ...]

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s

    @property
    @printed
    def within(self) -> bool | None:
        """True if the measured step is inside the interval; None without an interval."""
        return None if self.interval90 is None else self.interval90[0] <= self.measured_s <= self.interval90[1]

    @property
    @printed
    def rest_share(self) -> float:
        return self.rest_s / self.measured_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution(Payload):
    """The term whose difference is the most of the step's error, `part` of it, and what it depends on, the most first."""

    term: TimeTerm
    part: float
    depends_on: tuple[str, ...]

    @property
    @printed
    def ratio(self) -> float | None:
        """Measured over predicted; None for a term that is not predicted."""
        return self.term.measured_s / self.term.predicted_s if self.term.predicted_s else None


def compare_step_time(predicted: Estimate, steps: Sequence[StepRecord]) -> StepTime:
    """Return the predicted and measured seconds of every term."""
    ordered = sorted(steps, key=lambda record: record.step_time_s)
    tenth, quarter = len(ordered) // 10, len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    terms = tuple(_time_terms(predicted, middle))
    return StepTime(
        predicted_s=predicted.step_time_s, interval90=predicted.interval90,
        measured_s=fmean(record.step_time_s for record in middle), low_s=ordered[tenth].step_time_s,
        high_s=ordered[-1 - tenth].step_time_s, num_steps=len(ordered), terms=terms,
        rest_s=sum(term.measured_s for term in terms if term.name not in TIME_TERMS),
    )  # fmt: skip


def _time_terms(estimate: Estimate, steps: Sequence[StepRecord]) -> Iterator[TimeTerm]:
    """Yield the means over steps; "other" takes what no other term of a step has."""
    for name in MEASURED_TERMS:
        predicted = (
            estimate.time.get(name, 0.0) if name in TIME_TERMS else None
        )  # a plan of an earlier version may lack it
        measured = fmean(_other_s(record) if name == OTHER_TERM else record.seconds.get(name, 0.0) for record in steps)
        yield TimeTerm(name=name, predicted_s=predicted, measured_s=measured, hidden_s=estimate.hidden.get(name, 0.0))


def _other_s(record: StepRecord) -> float:
    return record.step_time_s - sum(seconds for name, seconds in record.seconds.items() if name != OTHER_TERM)


def attribute_error(step_time: StepTime, depends_on: Callable[[str], tuple[str, ...]]) -> Attribution | None:
    """Return the term that the error is attributed to; None if the step is as predicted within `TIME_TOLERANCE`."""
    error = step_time.difference_s
    if abs(error) <= TIME_TOLERANCE * step_time.measured_s:
        return None
    worst = max(step_time.terms, key=lambda term: term.difference_s / error)
    return Attribution(term=worst, part=worst.difference_s / error, depends_on=depends_on(worst.name))


def find_dependencies(plan: Plan, term: str) -> tuple[str, ...]:
    """Return the constants and conventions that a term's price depends on: those whose change moves it, the most first.
    Empty for a term that is not predicted."""
    if term not in TIME_TERMS:
        return ()
    reference = estimate(plan.problem, plan.layout)
    variants = [(name, cluster, plan.job) for name, _, cluster in worsen_constants(plan)]
    variants += [
        ("job.overlap", plan.cluster, replace(plan.job, overlap=convention)) for convention in OVERLAP_CONVENTIONS
    ]
    change_by_name: dict[str, float] = {}
    for name, cluster, job in variants:
        change = abs(estimate(Problem(plan.model, cluster, job), plan.layout).time[term] - reference.time[term])
        if change > LEAST_CHANGE * reference.step_time_s:
            change_by_name[name] = max(change, change_by_name.get(name, 0.0))
    return tuple(sorted(change_by_name, key=lambda name: -change_by_name[name]))


MEMORY_TOLERANCE = 0.05  # of a term, and of the peak
# Terms that a plan has only at its peak: logits if that is at the loss.
AT_PEAK = ("workspace", "logits", "buffers")
WITHOUT_TENSORS = ("runtime",)
ACTIVATIONS, GATHERED = "activations", "gathered"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerm(Payload):
    """One term in bytes, measured at the peak; `predicted` is None for what no plan has. `largest` is the most that was
    measured of it at any moment; None for what a plan has at its peak alone."""

    name: str
    predicted: float | None
    measured: float
    largest: float | None = None

    @property
    def compared_bytes(self) -> float:
        """Measured bytes compared with the prediction: the maximum, or the value at the peak."""
        return self.measured if self.largest is None or self.name == GATHERED else self.largest

    @property
    def difference(self) -> float:
        return self.compared_bytes - (self.predicted or 0.0)

    @property
    @printed
    def within(self) -> bool | None:
        """True if the prediction holds; None if there is none."""
        return self.is_within(MEMORY_TOLERANCE)

    def is_within(self, tolerance: float) -> bool | None:
        """Return True if the difference is at most this share of the prediction; None if there is none."""
        return None if self.predicted is None else abs(self.difference) <= tolerance * self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The terms, which add up to the peak; what the process had, and the device's allocator (None: it has none of its own).

    `undeclared_bytes` are of tensors that were made with the engine and that no term has; they count as workspace.
    """

    terms: tuple[MemoryTerm, ...]
    total: MemoryTerm
    runtime: float
    resident_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    undeclared_bytes: int = 0


def compare_memory(predicted: Mapping[str, float], inspection: RunInspection) -> StepMemory:
    """Compare memory by term; `inspection` has the memory of the inspected step.

    Terms are measured at the peak and add up to it. Terms that persist are judged by their maximum over the step;
    gathered weights at the peak, since neither a run nor a plan has all of them at that moment. Activations are those
    saved for the backward pass; what of them is freed before the peak is subtracted from the workspace, as in a plan.
    If the plan's peak is at the loss (`price.device_memory`), logits are compared with logits; if it is in a block,
    logits count as workspace, since the measured peak was at the loss after all.
    """
    assert inspection.memory is not None
    process = inspection.process
    terms = tuple(_memory_terms(predicted, inspection.memory))
    return StepMemory(
        terms=terms, runtime=sum(predicted.get(name, 0.0) for name in WITHOUT_TENSORS),
        total=MemoryTerm(
            name="peak", measured=inspection.memory.peak_bytes,
            predicted=sum(size for name, size in predicted.items() if name not in WITHOUT_TENSORS),
        ),
        resident_bytes=process.resident_bytes if process else None,
        allocated_bytes=process.allocated_bytes if process else None,
        reserved_bytes=process.reserved_bytes if process else None,
        undeclared_bytes=inspection.memory.undeclared_bytes,
    )  # fmt: skip


def _memory_terms(predicted: Mapping[str, float], memory: MeasuredMemory) -> Iterator[MemoryTerm]:
    remaining = float(memory.peak_bytes)
    for name in MEMORY_TERMS:
        if name not in (*AT_PEAK, *WITHOUT_TENSORS):
            largest = memory.largest.get(name, 0)
            measured = largest if name == ACTIVATIONS else memory.at_peak.get(name, 0)
            remaining -= measured
            if predicted[name] or largest:
                yield MemoryTerm(name=name, predicted=predicted[name], measured=measured, largest=largest)
    workspace = predicted["workspace"] + predicted["buffers"]
    if predicted["logits"]:
        logits = MemoryTerm(name="logits", predicted=predicted["logits"], measured=memory.at_peak.get("logits", 0))
        yield logits
        yield MemoryTerm(name="workspace", predicted=workspace or None, measured=remaining - logits.measured)
    else:
        yield MemoryTerm(name="workspace", predicted=workspace, measured=remaining)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveMismatch(Payload):
    """Collective that was issued more or fewer times than planned."""

    issued: Annotated[IssuedCollective, Flat]
    planned: int
    found: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveComparison(Payload):
    """Comparison of issued collectives with planned ones: their number, their payload in bytes by axes, and mismatches.

    With `uneven` rows of experts their bytes are not compared.
    """

    planned: int
    found: int
    planned_bytes: dict[str, int]
    found_bytes: dict[str, int]
    miscounted: tuple[CollectiveMismatch, ...]
    uneven: bool = False

    @property
    @printed
    def equal(self) -> bool:
        return not self.miscounted


def compare_collectives(
    plan: Plan,
    recipe: TrainingRecipe,
    num_tokens: int,
    issued: Counter[IssuedCollective],
    *,
    even: bool = False,
    pp_rank: int = 0,
) -> CollectiveComparison:
    """Compare kind, axes, format, bytes and count of collectives for a step of `num_tokens` on a rank of `pp_rank`.
    Bytes of experts' rows are compared only if routing is `even`."""
    layout = plan.layout
    num_seqs = num_tokens // plan.job.seq_len
    num_micro_batches = -(-num_seqs // (layout.num_replicas * layout.micro_batch_seqs))
    return compare_counts(
        count_collectives(engine_instance(plan, recipe).for_pp_rank(pp_rank), num_micro_batches), issued, even=even
    )


def compare_counts(
    planned: Counter[IssuedCollective], issued: Counter[IssuedCollective], *, even: bool = False
) -> CollectiveComparison:
    """Compare counts of planned and issued collectives (`comparable_counts`)."""
    planned_counts, issued_counts = comparable_counts(planned, issued, even=even)
    return CollectiveComparison(
        planned=planned.total(), found=issued.total(), planned_bytes=_bytes_by_axes(planned),
        found_bytes=_bytes_by_axes(issued),
        miscounted=tuple(
            CollectiveMismatch(issued=collective, planned=planned_counts[collective], found=issued_counts[collective])
            for collective in sorted({*planned_counts, *issued_counts})
            if planned_counts[collective] != issued_counts[collective]
        ),
        uneven=not even and any(collective.what == ROWS for collective in planned),
    )  # fmt: skip


def _bytes_by_axes(counts: Counter[IssuedCollective]) -> dict[str, int]:
    bytes_by_axes: dict[str, int] = {}
    for collective, count in sorted(counts.items()):
        axes = ", ".join(collective.axes)
        bytes_by_axes[axes] = bytes_by_axes.get(axes, 0) + count * collective.num_bytes
    return bytes_by_axes
