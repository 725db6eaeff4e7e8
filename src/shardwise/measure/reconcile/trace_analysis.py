"""A traced step of a plan, and its bottlenecks: on which rank, for how long, and which change of layout would help.

`load_trace_analysis` reads a step of a run and gives everything that its traces say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwise.measure.reconcile.aligned_traces import TracedStep, event_axis, read_traced_step
from shardwise.measure.reconcile.rank_time import (
    Occupancy,
    RankLateness,
    Stall,
    find_stalls,
    measure_lateness,
    measure_occupancy,
    waits_for_late_ranks,
)
from shardwise.measure.reconcile.step_differences import (
    LEAST_CORE_SHARE,
    OperationKey,
    StepDifference,
    compare_step,
    match_operations,
    rank_core_share,
)
from shardwise.price.simulation.result import Simulation, simulate
from shardwise.price.simulation.simulated_step import SimulatedStep
from shardwise.records.run_folder import RunFolder
from shardwise.search.explain.neighbour_layouts import (
    AmountOfLayout,
    Remedy,
    find_remedy,
    num_layer_passes,
    seconds_of_terms,
)
from shardwise.search.plan import Plan
from shardwise.search.plan_file import load_plan
from shardwise.values.units import format_percent, format_seconds

BottleneckKind = Literal["stall", "straggler", "exposed", "bubble", "launch gaps", "kernels", "update", "data"]
LEAST_SHARE = 0.02  # of the step: less holds nothing up
STRAGGLER_SHARE, LEAST_DELAYED = (
    2 / 3,
    3,
)  # a straggler keeps others at so many collectives, and for so much of all such waits
UPDATE, DATA, PIPELINE = "update", "data", "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """`seconds` of a step of the rank that loses most. `advice` says what would mend it, `remedy` which layout, if one would."""

    kind: BottleneckKind
    what: str
    rank: int
    seconds: float
    share: float
    advice: str
    remedy: Remedy | None = None


@dataclass(frozen=True)
class BottleneckFinder:
    """What a step's traces say, by whoever has worked it out."""

    plan: Plan
    step: TracedStep
    planned: SimulatedStep
    occupancies: tuple[Occupancy, ...]
    lateness: tuple[RankLateness, ...]
    stalls: tuple[Stall, ...]
    differences: tuple[StepDifference, ...]

    def find_bottlenecks(self) -> tuple[Bottleneck, ...]:
        """All of them, the longest first."""
        every = (
            *self.find_stalled_work(),
            *self.find_stragglers(),
            *self.find_exposed_traffic(),
            *self.find_launch_gaps(),
            *self.find_slow_phases(),
            *self.find_slow_kernels(),
        )
        found = [one for one in every if one.share >= LEAST_SHARE]
        return tuple(sorted(found, key=lambda one: -one.seconds))

    def build_bottleneck(
        self,
        kind: BottleneckKind,
        what: str,
        rank: int,
        seconds: float,
        advice: str,
        amount: AmountOfLayout | None = None,
    ) -> Bottleneck:
        change = find_remedy(self.plan, seconds - self._predicted(kind, amount), amount) if amount else None
        return Bottleneck(
            kind=kind,
            what=what,
            rank=rank,
            seconds=seconds,
            share=seconds / self.step.seconds,
            advice=advice,
            remedy=change,
        )

    def _predicted(self, kind: BottleneckKind, amount: AmountOfLayout | None) -> float:
        """What of a loss the plan's own prediction has."""
        if amount is None or kind == "launch gaps":  # which are no term of an estimate
            return 0.0
        return amount(self.plan.layout, self.plan.estimate)

    def find_stalled_work(self) -> Iterator[Bottleneck]:
        for one in self.stalls:
            what = f"{one.where} took {format_seconds(one.seconds)}, where {format_seconds(one.usual_s)} is usual"
            when = f"{format_seconds(one.start_s)} into the step"
            advice = f"no layout mends it: look at what else ran on the host of rank {one.rank}, {when}"
            yield self.build_bottleneck("stall", what, one.rank, one.excess_s, advice)

    def find_stragglers(self) -> Iterator[Bottleneck]:
        """Ranks that come last again and again; what a stall explains is none."""
        for one in self.lateness:
            stalled = sum(stall.excess_s for stall in self.stalls if stall.rank == one.rank)
            every = sum(other.kept_s for other in self.lateness)
            if one.num_kept < LEAST_DELAYED or one.kept_s < STRAGGLER_SHARE * every or stalled >= one.kept_s / 2:
                continue
            what = f"kept others at {one.num_kept} of {one.num_met} collectives, for {format_seconds(one.kept_s)}"
            advice = f"no layout mends a slow rank: {self._slowest(one.rank)}"
            yield self.build_bottleneck("straggler", what, one.rank, one.kept_s, advice)

    def _slowest(self, rank: int) -> str:
        """The operation that takes the most longer on a rank than on the others of its stage."""
        own = next(one for one in self.step.ranks if one.trace.rank == rank)
        stage = own.trace.coordinate.get(PIPELINE, 0)
        peers = [one for one in self.step.ranks if one is not own and one.trace.coordinate.get(PIPELINE, 0) == stage]
        mine = {key: one.measured_s for key, one in match_operations(own, self.planned).items()}
        others: dict[OperationKey, float] = {}
        for peer in peers:
            for key, one in match_operations(peer, self.planned).items():
                others[key] = others.get(key, 0.0) + one.measured_s / len(peers)
        key = max(mine, key=lambda key: mine[key] - others.get(key, 0.0))
        return (
            f"its {key.name} ({key.unit} {key.phase}) takes {format_seconds(mine[key])}, on its peers "
            f"{format_seconds(others.get(key, 0.0))}"
        )

    def find_exposed_traffic(self) -> Iterator[Bottleneck]:
        """Of each axis the rank that waits most for traffic to move, once all have come."""
        kept: dict[tuple[int, str], float] = {}
        for rank, waits in waits_for_late_ranks(self.step).items():
            for span, _, seconds in waits:
                kept[rank, event_axis(span.event)] = kept.get((rank, event_axis(span.event)), 0.0) + seconds
        for axis in dict.fromkeys(axis for one in self.occupancies for axis in one.exposed):
            waited = {
                one.rank: one.exposed.get(axis, 0.0) - kept.get((one.rank, axis), 0.0) for one in self.occupancies
            }
            rank = max(waited, key=lambda one: waited[one])
            if axis == PIPELINE:
                what, terms = "waits for other stages: the bubble, and messages", ("bubble", PIPELINE)
                yield self.build_bottleneck(
                    "bubble", what, rank, waited[rank], "more micro-batches, or fewer stages", seconds_of_terms(terms)
                )
            else:
                what = f"communication over {axis} is exposed"
                yield self.build_bottleneck(
                    "exposed", what, rank, waited[rank], _advice(axis), seconds_of_terms((axis,))
                )

    def find_launch_gaps(self) -> Iterator[Bottleneck]:
        """Gaps between kernels, without those that are stalls."""
        stalled = {rank.trace.rank: 0.0 for rank in self.step.ranks}
        for stall in self.stalls:
            stalled[stall.rank] += stall.seconds if stall.in_gap else 0.0
        one = max(self.occupancies, key=lambda one: one.gaps_s - stalled[one.rank])
        seconds = max(one.gaps_s - stalled[one.rank], 0.0)
        what = f"the host is late with {one.num_gaps:,} kernels: {format_seconds(seconds / max(one.num_gaps, 1))} each"
        on_core = rank_core_share(next(rank for rank in self.step.ranks if rank.trace.rank == one.rank))
        if on_core is not None and on_core < LEAST_CORE_SHARE:
            what += f"; its thread had a core for {format_percent(on_core)} of the time of its kernels"
            yield self.build_bottleneck("launch gaps", what, one.rank, seconds, _CORES_ADVICE)
        else:
            advice = "fewer, larger micro-batches; --compile joins kernels"
            yield self.build_bottleneck("launch gaps", what, one.rank, seconds, advice, num_layer_passes(self.plan))

    def find_slow_phases(self) -> Iterator[Bottleneck]:
        for phase, kind, what, advice, amount in _PHASES:
            one = max(self.occupancies, key=lambda one: one.busy.get(phase, 0.0))
            yield self.build_bottleneck(kind, what, one.rank, one.busy.get(phase, 0.0), advice, amount)

    def find_slow_kernels(self) -> Iterator[Bottleneck]:
        """Kernels that take longer than planned, together; the worst of them is named."""
        slower = [
            one for one in self.differences if one.kind == "kernel" and one.difference_s > 0 and one.where != DATA
        ]
        if slower:
            worst, rank = slower[0], max(self.occupancies, key=lambda one: one.busy_s).rank
            together = sum(one.difference_s for one in slower)
            part = format_percent(worst.difference_s / together)
            what = (
                f"kernels take {format_seconds(together)} longer than planned, {part} of it in "
                f"{worst.name} ({worst.where}): {worst.cause}"
            )
            advice = (
                "calibrate the cluster with this run: shardwise calibrate"
                if worst.cause != "contention"
                else _CORES_ADVICE
            )
            yield self.build_bottleneck("kernels", what, rank, together, advice)


_CORES_ADVICE = "fewer ranks on this host, or fewer threads of each"
_PHASES: tuple[tuple[str, BottleneckKind, str, str, AmountOfLayout | None], ...] = (
    (
        UPDATE,
        "update",
        "the optimizer's update",
        "more of the optimizer's state sharded",
        seconds_of_terms(("optimizer",)),
    ),
    (DATA, "data", "waits for its data", "a faster disk, or fewer ranks that read from it", None),
)


def _advice(axis: str) -> str:
    """What makes less of an axis' traffic, or hides more of it."""
    if axis in ("dp", "fsdp"):
        return "more tokens for each rank between reductions, or less ZeRO"
    if axis == "control":
        return "nothing but fewer steps makes less of it"
    return f"a lower degree of {axis}"


@dataclass(frozen=True)
class TraceAnalysis:
    """A traced step of a plan."""

    plan: Plan
    step: TracedStep

    @cached_property
    def planned(self) -> Simulation:
        """The step as the plan has it, on simulated streams."""
        plan = self.plan
        return simulate(plan.model, plan.cluster, plan.job, plan.layout)

    @cached_property
    def occupancies(self) -> tuple[Occupancy, ...]:
        """Where the time of each rank went."""
        return tuple(map(measure_occupancy, self.step.ranks))

    @cached_property
    def lateness(self) -> tuple[RankLateness, ...]:
        """When each rank came to collectives."""
        return measure_lateness(self.step)

    @cached_property
    def differences(self) -> tuple[StepDifference, ...]:
        """Where it differs from the planned step, the largest difference first."""
        return compare_step(self.step, self.planned.found)

    @cached_property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """What holds the step up, the longest first."""
        finder = BottleneckFinder(
            self.plan, self.step, self.planned.found, self.occupancies, self.lateness, self.stalls, self.differences
        )
        return finder.find_bottlenecks()

    @cached_property
    def stalls(self) -> tuple[Stall, ...]:
        """What took far longer than is usual, the longest first."""
        return find_stalls(self.step)


def load_trace_analysis(run: RunFolder, step: int | None = None) -> TraceAnalysis:
    """A traced step of a run, by default the last one. Raises `InputError` where there is none."""
    traced = read_traced_step(run, step)
    return TraceAnalysis(load_plan(run.plan), traced)
