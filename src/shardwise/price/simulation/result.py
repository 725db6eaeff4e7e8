"""Result of a simulated step: step time, exposed communication, critical path, memory over time, and why an estimate differs.

Memory: the terms of the price say how much of each there is, the simulated step when. Activations are live from the
start of their forward pass to the end of the pass that reads them last, as in a played schedule; the working set of a
unit, and the loss over the logits, during a backward pass. Micro-batches whose weight gradients wait hold only the
inputs of these, where the price keeps all that was saved; and a virtual stage holds what its own units save, where the
price counts a rank's layers as alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

from shardwise.layout import Layout, LayoutFacts, require_legal
from shardwise.model import ModelFacts
from shardwise.pipeline import BACKWARD_INPUT, FORWARD, FULL_BACKWARD, Slot
from shardwise.price.device_memory import DeviceMemory
from shardwise.price.estimate import Estimate
from shardwise.price.estimate import estimate as price_layout
from shardwise.price.estimate_terms import MEMORY
from shardwise.price.layout_pricer import Pricing
from shardwise.price.problem import Problem
from shardwise.price.simulation.contention import CONTENTION_BY_CHIP, NO_CONTENTION, PublishedContention
from shardwise.price.simulation.critical_path import CriticalPart, CriticalPass, critical_passes, find_critical_path
from shardwise.price.simulation.simulated_step import SimulatedStep, simulate_step
from shardwise.price.simulation.stage_passes import LIST
from shardwise.price.simulation.streams import HOST, StreamTimeline
from shardwise.price.simulation.unit_timings import VirtualStage
from shardwise.values import (
    COMMUNICATION_TERMS,
    Displayable,
    Flat,
    Payload,
    format_bytes,
    format_percent,
    format_seconds,
)

SAME_SHARE = 0.005  # of the estimate: steps that differ by less are the same; a choice
NAMED_SHARE = 0.1  # of the largest change: terms that change by less are not named; a choice
KERNEL_TERMS = ("forward", "backward", "recompute", "optimizer")


def describe_difference(step: SimulatedStep, time: Mapping[str, float], estimate: Estimate) -> str:
    """Return by how much a simulated step is longer or shorter than its estimate, in which terms, and why.

    `time`: seconds of the simulated step by term. "" where they are the same within half a percent.
    """
    change_s = step.step_time_s - estimate.step_time_s
    if abs(change_s) < SAME_SHARE * estimate.step_time_s:
        return ""
    changes = {
        term: time.get(term, 0.0) - estimate.time.get(term, 0.0) for term in dict.fromkeys((*time, *estimate.time))
    }
    largest_s = max(map(abs, changes.values()))
    named = sorted(
        (term for term, seconds in changes.items() if abs(seconds) >= NAMED_SHARE * largest_s),
        key=lambda term: -abs(changes[term]),
    )
    terms = ", ".join(
        f"{_term_name(term)} {'+' if changes[term] > 0 else '−'}{format_seconds(abs(changes[term]))}" for term in named
    )
    side = "longer" if change_s > 0 else "shorter"
    share = abs(change_s) / estimate.step_time_s
    return f"the simulated step is {share:.1%} {side} than the estimate ({terms}): {'; '.join(_reasons(step, estimate, named))}"


def _term_name(term: str) -> str:
    return f"exposed {term}" if term in (*COMMUNICATION_TERMS, "control", "host") else term


def _reasons(step: SimulatedStep, estimate: Estimate, terms: list[str]) -> Iterator[str]:
    """Yield a reason for each kind of term that differs."""
    kinds = {"kernels" if term in KERNEL_TERMS else "bubble" if term == "bubble" else "transfers" for term in terms}
    if "transfers" in kinds:
        waits = "where the instruction list does" if step.overlap == LIST else f"by the convention {step.overlap}"
        yield f"the simulation waits for transfers {waits}, the estimate exposes {_exposed(step, estimate)}"
    if "bubble" in kinds:
        yield "the simulation plays every pass of each stage, the estimate takes stages and messages as alike"
    if "kernels" in kinds and step.contention > 1.0:
        yield f"kernels take {step.contention:g} times as long beside transfers"
    elif "kernels" in kinds:
        yield "the simulation's kernels are those of the rank that waits least, the estimate's those of the slowest stage"


def _exposed(step: SimulatedStep, estimate: Estimate) -> str:
    pricing = step.pricing
    if pricing.cluster.calibration is None:
        return f"what the convention {pricing.job.overlap_convention} does"
    return f"{estimate.exposed_share:.0%} of communication, by the share that runs of the stack expose on average"


WORKING_TERMS = ("workspace", "logits")  # terms of a backward pass; others but activations are there all the time
ACTIVATIONS_TERM = "activations"


class MemoryCurve(NamedTuple):
    """Bytes on a device of a rank: the constant part, and the rest over time as (seconds, live bytes from then on)."""

    constant_bytes: float
    curve: tuple[tuple[float, float], ...]

    @property
    def peak_bytes(self) -> float:
        """The peak."""
        return max(live_bytes for _, live_bytes in self.curve)


def memory_over_time(step: SimulatedStep) -> tuple[MemoryCurve, ...]:
    """Return the memory over time of every rank."""
    memories = step.pricing.memories(step.pricing.stages())
    return tuple(_rank_curve(step, rank, memory) for rank, memory in enumerate(memories))


def _rank_curve(step: SimulatedStep, rank: int, memory: DeviceMemory) -> MemoryCurve:
    terms = MEMORY.values(memory)
    on_host = terms[ACTIVATIONS_TERM] if memory.stage.host.activations else 0.0  # those of the layers on their way
    working = sum(terms[name] for name in WORKING_TERMS)
    constant = on_host + sum(live for name, live in terms.items() if name not in (*WORKING_TERMS, ACTIVATIONS_TERM))
    changes_by_timeline: dict[StreamTimeline, tuple[float, float]] = {}
    now, live_bytes = 0.0, constant
    curve: list[tuple[float, float]] = []
    for slot, played, start, end in step.slots(rank):
        changes = changes_by_timeline.get(played)
        if changes is None:
            changes = changes_by_timeline[played] = _slot_changes(step.stages, slot, working)
        if start > now or not curve:
            curve.append((now, live_bytes))
        live_bytes += changes[0]
        curve.append((start, live_bytes))
        live_bytes += changes[1]
        now = end
    return MemoryCurve(constant, (*curve, (now, live_bytes), (step.step_time_s, live_bytes)))


def _slot_changes(stages: Sequence[VirtualStage], slot: Slot, working: float) -> tuple[float, float]:
    """Return the changes of a rank's live bytes as a slot starts, and as it ends."""
    changes = [_pass_changes(stages, action.kind, action.stage) for action in slot]
    workspace = working if any(action.kind in (FULL_BACKWARD, BACKWARD_INPUT) for action in slot) else 0.0
    return sum(at_start for at_start, _ in changes) + workspace, sum(at_end for _, at_end in changes) - workspace


def _pass_changes(stages: Sequence[VirtualStage], kind: str, number: int) -> tuple[float, float]:
    """Return the changes of the saved bytes as a pass starts, and as it ends."""
    stage = stages[number]
    if kind == FORWARD:
        return stage.saved_bytes, 0.0
    if kind == FULL_BACKWARD:
        return 0.0, -stage.saved_bytes
    return (0.0, stage.waiting_bytes - stage.saved_bytes) if kind == BACKWARD_INPUT else (0.0, -stage.waiting_bytes)


# Terms of time by the phase of their kernels.
PHASES: Mapping[str, str] = {
    "forward": "forward", "backward": "backward", "recompute": "recompute", "optimizer": "update",
}  # fmt: skip
EXPOSED_AXES = (*COMMUNICATION_TERMS, "control", HOST)


@dataclass(frozen=True)
class Simulation(Displayable):
    """A simulated step. Seconds are those of the rank that waits least for other stages, bytes those of the fullest device.

    `plan_estimate` is the estimate that the plan of the step has; None for a step without a plan.

    >>> import shardwise as sw
    >>> step = sw.simulation(sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024))
    >>> abs(sum(step.time.values()) / step.step_time_s - 1) < 1e-9, step.bubble
    (True, 0.0)
    """

    step: SimulatedStep
    plan_estimate: Estimate | None = None

    @cached_property
    def estimate(self) -> Estimate:
        """The estimate of the same layout: the plan's, else the price of the layout."""
        pricing = self.step.pricing
        problem = Problem(pricing.architecture, pricing.cluster, pricing.job)
        return self.plan_estimate or price_layout(problem, pricing.layout)

    @property
    def published_contention(self) -> PublishedContention | None:
        """Published slowdown of kernels beside traffic on the chip; None where nothing is published, so that it is not known."""
        return CONTENTION_BY_CHIP.get(self.step.pricing.cluster.chip.catalog_name)

    @cached_property
    def difference(self) -> str:
        """Why the step differs from its estimate, in words; "" where the two are the same."""
        return describe_difference(self.step, self.time, self.estimate)

    @property
    def step_time_s(self) -> float:
        """Seconds from the first kernel of any rank to the end of the last update."""
        return self.step.step_time_s

    @property
    def bubble_s(self) -> float:
        """Seconds of waiting for other stages."""
        return self.step.ranks[self.step.busiest].bubble_s

    @property
    def bubble(self) -> float:
        """Idle time over the rest of the step: (p - 1) / m for 1F1B. Source: "The Ultra-Scale Playbook", pipeline
        parallelism."""
        return self.bubble_s / (self.step_time_s - self.bubble_s)

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Exposed communication: seconds that the compute stream waits, by mesh axis; `host`: for copies to and from
        the host."""
        exposed = self.step.ranks[self.step.busiest].exposed
        return {axis: exposed[axis] for axis in EXPOSED_AXES if exposed.get(axis, 0.0) > 0.0}

    @cached_property
    def time(self) -> dict[str, float]:
        """Seconds by the terms of an estimate; they add up to the step."""
        computed = self.step.ranks[self.step.busiest].computed
        kernels = {term: computed.get(phase, 0.0) for term, phase in PHASES.items()}
        return {**kernels, **{axis: self.exposed.get(axis, 0.0) for axis in EXPOSED_AXES}, "bubble": self.bubble_s}

    @cached_property
    def memories(self) -> tuple[MemoryCurve, ...]:
        """Live bytes of a device of each rank, over time."""
        return memory_over_time(self.step)

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of the fullest device."""
        return max(memory.peak_bytes for memory in self.memories)

    @cached_property
    def critical_path(self) -> tuple[CriticalPart, ...]:
        """Parts of the step's critical path, the longest first; their seconds add up to the step."""
        return find_critical_path(self.step)

    def __repr__(self) -> str:
        exposed = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in self.exposed.items())
        return (
            f"Simulation: step {format_seconds(self.step_time_s)}, bubble {format_percent(self.bubble)}, "
            f"exposed: {exposed or 'nothing'}; peak {format_bytes(self.peak_bytes)}"
        )


def simulate(
    problem: Problem, layout: Layout, *, overlap: str = LIST, contention: float = NO_CONTENTION,
    estimate: Estimate | None = None,
) -> Simulation:  # fmt: skip
    """Simulate a step of a layout.

    `overlap`: `list`, where every collective starts and is waited for where the instruction list says, or a convention: `sum`
    (all communication adds up, next to each pass), `max` (each axis by itself), `per_axis` (data-parallel communication next
    to the pass, the rest after it), `none` (every collective is waited for where it starts). `contention`: how many times as
    long a kernel takes while a transfer runs. `estimate` is the one to compare the step with, if it is not that of the layout.
    Raises `InputError` with every rule that the layout breaks, for an unknown overlap, and for a contention below 1.
    """
    require_legal(problem.architecture, problem.job, problem.cluster.num_devices, layout)
    return Simulation(simulate_step(Pricing(problem, layout), overlap, contention), estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPartRecord(Payload):
    """A part of the critical path, and its share of the step's time."""

    part: Annotated[CriticalPart, Flat]
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPassesRecord(Payload):
    """A piece of the critical path on one rank: its first and its last pass, how many there are, and their seconds."""

    rank: int
    first: str
    last: str
    passes: int
    seconds: float

    @classmethod
    def of(cls, piece: Sequence[CriticalPass]) -> CriticalPassesRecord:
        """Return the record of passes on one rank (`split_by_rank`)."""
        first, last = piece[0], piece[-1]
        return cls(
            rank=first.rank, first="&".join(map(str, first.slot)), last="&".join(map(str, last.slot)),
            passes=sum(len(leg.slot) for leg in piece), seconds=last.end - first.start,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRankRecord(Payload):
    """A rank of the pipeline: its computation, exposed communication, waiting for other stages, and memory."""

    rank: int
    computed_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    bubble_s: float
    constant_bytes: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRecord(Payload):
    """The estimate of the same layout."""

    step_time_s: float
    time: Mapping[str, float]
    memory_bytes: float
    memory: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionRecord(Payload):
    """Published slowdown of kernels beside traffic on the chip: average and highest factor, what was measured, and its source."""

    factor: float
    highest: float | None
    meaning: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRecord(Payload):
    """A step on simulated streams, with its estimate. `bubble` is the idle time over the rest of the step, `difference` says why
    the step and the estimate differ. `contention`: how many times as long kernels take beside traffic; `published_contention`:
    what is published about it for the chip, null where nothing is."""

    SCHEMA = "shardwise.simulation/2"
    model: ModelFacts
    layout: LayoutFacts
    overlap: str
    contention: float
    published_contention: ContentionRecord | None
    step_time_s: float
    time: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble_s: float
    bubble: float
    peak_bytes: float
    critical_path: Sequence[CriticalPartRecord]
    critical_passes: Sequence[CriticalPassesRecord]
    ranks: Sequence[SimulatedRankRecord]
    estimate: EstimateRecord
    difference: str

    @classmethod
    def of(cls, simulation: Simulation) -> SimulationRecord:
        """Return the record of a simulation."""
        step, pricing = simulation.step, simulation.step.pricing
        published = simulation.published_contention
        return cls.from_attributes(
            simulation, step,
            published_contention=published and ContentionRecord.from_attributes(published),
            model=ModelFacts.of(pricing.architecture),
            layout=LayoutFacts.of(pricing.layout, pricing.architecture, pricing.job, pricing.cluster.topology),
            critical_path=[
                CriticalPartRecord(part=part, share=part.seconds / simulation.step_time_s) for part in simulation.critical_path
            ],
            critical_passes=[CriticalPassesRecord.of(piece) for piece in split_by_rank(critical_passes(step))],
            ranks=[
                SimulatedRankRecord.from_attributes(
                    rank, memory, rank=number, computed_s=rank.computed, exposed_s=rank.exposed
                )
                for number, (rank, memory) in enumerate(zip(step.ranks, simulation.memories, strict=True))
            ],
            estimate=EstimateRecord.from_attributes(simulation.estimate),
        )  # fmt: skip


def split_by_rank(path: list[CriticalPass]) -> list[list[CriticalPass]]:
    """Split a path into runs of passes, each on one rank."""
    pieces: list[list[CriticalPass]] = []
    for leg in path:
        if pieces and pieces[-1][-1].rank == leg.rank:
            pieces[-1].append(leg)
        else:
            pieces.append([leg])
    return pieces
