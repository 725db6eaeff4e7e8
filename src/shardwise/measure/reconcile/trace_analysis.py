"""A traced step of a plan, and its bottlenecks: on which rank, for how long, and which change of layout would help.

`load_trace_analysis` reads a step of a run and derives everything that its traces show.
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
    waits_by_last_arrival,
)
from shardwise.measure.reconcile.step_differences import (
    LEAST_CORE_SHARE,
    OperationKey,
    StepDifference,
    compare_step,
    match_operations,
    rank_core_share,
)
from shardwise.price import Simulation, simulate
from shardwise.records import RunFolder
from shardwise.search import Plan, load_plan
from shardwise.search.explain.neighbour_layouts import (
    AmountOfLayout,
    Remedy,
    find_remedy,
    num_layer_passes,
    seconds_of_terms,
)
from shardwise.values import format_percent, format_seconds

BottleneckKind = Literal["stall", "straggler", "exposed", "bubble", "launch gaps", "kernels", "update", "data"]
LEAST_SHARE = 0.02  # of the step: less is no bottleneck
# A straggler delays others at 3 collectives or more, for two thirds of all such waits.
STRAGGLER_SHARE, LEAST_DELAYED = 2 / 3, 3
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
class TraceAnalysis:
    """A traced step of a run, its plan, and what its traces show. `lists_bottlenecks`: reports and payloads have them."""

    plan: Plan
    step: TracedStep
    run: RunFolder
    lists_bottlenecks: bool = False

    @cached_property
    def planned(self) -> Simulation:
        """The planned step on simulated streams."""
        plan = self.plan
        return simulate(plan.problem, plan.layout, estimate=plan.estimate)

    @cached_property
    def occupancies(self) -> tuple[Occupancy, ...]:
        """Busy, exposed and idle time of each rank."""
        return tuple(map(measure_occupancy, self.step.ranks))

    @cached_property
    def lateness(self) -> tuple[RankLateness, ...]:
        """Lateness of each rank at collectives."""
        return measure_lateness(self.step)

    @cached_property
    def differences(self) -> tuple[StepDifference, ...]:
        """Differences from the planned step, the largest first."""
        return compare_step(self.step, self.planned.step)

    @cached_property
    def stalls(self) -> tuple[Stall, ...]:
        """Work that took far longer than usual, the longest first."""
        return find_stalls(self.step)

    @cached_property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """Bottlenecks of at least 2% of the step, the longest first."""
        bottlenecks = (
            *self.find_stalled_work(),
            *self.find_stragglers(),
            *self.find_exposed_traffic(),
            *self.find_launch_gaps(),
            *self.find_slow_phases(),
            *self.find_slow_kernels(),
        )
        large = [bottleneck for bottleneck in bottlenecks if bottleneck.share >= LEAST_SHARE]
        return tuple(sorted(large, key=lambda bottleneck: -bottleneck.seconds))

    def build_bottleneck(
        self,
        kind: BottleneckKind,
        text: str,
        rank: int,
        seconds: float,
        advice: str,
        amount: AmountOfLayout | None = None,
    ) -> Bottleneck:
        """Return a bottleneck, with the change of layout that reduces `amount` most if that is given."""
        remedy = find_remedy(self.plan, seconds - self._predicted(kind, amount), amount) if amount else None
        share = seconds / self.step.seconds
        return Bottleneck(kind=kind, what=text, rank=rank, seconds=seconds, share=share, advice=advice, remedy=remedy)

    def _predicted(self, kind: BottleneckKind, amount: AmountOfLayout | None) -> float:
        """Return the part of a loss that the plan's prediction includes."""
        if amount is None or kind == "launch gaps":  # no term of an estimate
            return 0.0
        return amount(self.plan.layout, self.plan.estimate)

    def find_stalled_work(self) -> Iterator[Bottleneck]:
        """Yield kernels, and gaps of the host, that took far longer than usual."""
        for stall in self.stalls:
            text = f"{stall.where} took {format_seconds(stall.seconds)}, where {format_seconds(stall.usual_s)} is usual"
            when = f"{format_seconds(stall.start_s)} into the step"
            advice = f"no layout mends it: look at what else ran on the host of rank {stall.rank}, {when}"
            yield self.build_bottleneck("stall", text, stall.rank, stall.excess_s, advice)

    def find_stragglers(self) -> Iterator[Bottleneck]:
        """Yield ranks that arrive last repeatedly, unless stalls explain it."""
        total_s = sum(late.kept_s for late in self.lateness)
        for late in self.lateness:
            stalled_s = sum(stall.excess_s for stall in self.stalls if stall.rank == late.rank)
            if late.num_kept < LEAST_DELAYED or late.kept_s < STRAGGLER_SHARE * total_s or stalled_s >= late.kept_s / 2:
                continue
            text = f"kept others at {late.num_kept} of {late.num_met} collectives, for {format_seconds(late.kept_s)}"
            advice = f"no layout mends a slow rank: {self._slowest(late.rank)}"
            yield self.build_bottleneck("straggler", text, late.rank, late.kept_s, advice)

    def _slowest(self, rank: int) -> str:
        """Return the text of the operation that takes the most longer on a rank than on the others of its stage."""
        planned = self.planned.step
        slow_rank = next(traced_rank for traced_rank in self.step.ranks if traced_rank.trace.rank == rank)
        stage = slow_rank.trace.coordinate.get(PIPELINE, 0)
        peers = [
            traced_rank
            for traced_rank in self.step.ranks
            if traced_rank is not slow_rank and traced_rank.trace.coordinate.get(PIPELINE, 0) == stage
        ]
        rank_s = {key: operation.measured_s for key, operation in match_operations(slow_rank, planned).items()}
        peers_s: dict[OperationKey, float] = {}
        for peer in peers:
            for key, operation in match_operations(peer, planned).items():
                peers_s[key] = peers_s.get(key, 0.0) + operation.measured_s / len(peers)
        key = max(rank_s, key=lambda key: rank_s[key] - peers_s.get(key, 0.0))
        return (
            f"its {key.name} ({key.unit} {key.phase}) takes {format_seconds(rank_s[key])}, on its peers "
            f"{format_seconds(peers_s.get(key, 0.0))}"
        )

    def find_exposed_traffic(self) -> Iterator[Bottleneck]:
        """Yield for each axis the rank that waits longest for traffic after the last arrival."""
        late_s: dict[tuple[int, str], float] = {}
        for rank, waits in waits_by_last_arrival(self.step).items():
            for span, _, seconds in waits:
                late_s[rank, event_axis(span.event)] = late_s.get((rank, event_axis(span.event)), 0.0) + seconds
        for axis in dict.fromkeys(axis for occupancy in self.occupancies for axis in occupancy.exposed):
            waited_s = {
                occupancy.rank: occupancy.exposed.get(axis, 0.0) - late_s.get((occupancy.rank, axis), 0.0)
                for occupancy in self.occupancies
            }
            rank = max(waited_s, key=lambda rank: waited_s[rank])
            if axis == PIPELINE:
                text, terms = "waits for other stages: the bubble, and messages", ("bubble", PIPELINE)
                yield self.build_bottleneck(
                    "bubble", text, rank, waited_s[rank], "more micro-batches, or fewer stages", seconds_of_terms(terms)
                )
            else:
                text = f"communication over {axis} is exposed"
                yield self.build_bottleneck(
                    "exposed", text, rank, waited_s[rank], _advice(axis), seconds_of_terms((axis,))
                )

    def find_launch_gaps(self) -> Iterator[Bottleneck]:
        """Yield the gaps between kernels of the rank with the most, without stalls."""
        stalled_s = {rank.trace.rank: 0.0 for rank in self.step.ranks}
        for stall in self.stalls:
            stalled_s[stall.rank] += stall.seconds if stall.in_gap else 0.0
        occupancy = max(self.occupancies, key=lambda occupancy: occupancy.gaps_s - stalled_s[occupancy.rank])
        seconds = max(occupancy.gaps_s - stalled_s[occupancy.rank], 0.0)
        gap_s = seconds / max(occupancy.num_gaps, 1)
        text = f"the host is late with {occupancy.num_gaps:,} kernels: {format_seconds(gap_s)} each"
        core_share = rank_core_share(next(rank for rank in self.step.ranks if rank.trace.rank == occupancy.rank))
        if core_share is not None and core_share < LEAST_CORE_SHARE:
            text += f"; its thread had a core for {format_percent(core_share)} of the time of its kernels"
            yield self.build_bottleneck("launch gaps", text, occupancy.rank, seconds, _CORES_ADVICE)
        else:
            advice = "fewer, larger micro-batches"
            yield self.build_bottleneck(
                "launch gaps", text, occupancy.rank, seconds, advice, num_layer_passes(self.plan)
            )

    def find_slow_phases(self) -> Iterator[Bottleneck]:
        """Yield the optimizer's update and the waits for data, on the rank with the most."""
        for phase, kind, text, advice, amount in _PHASES:
            occupancy = max(self.occupancies, key=lambda occupancy: occupancy.busy.get(phase, 0.0))
            yield self.build_bottleneck(kind, text, occupancy.rank, occupancy.busy.get(phase, 0.0), advice, amount)

    def find_slow_kernels(self) -> Iterator[Bottleneck]:
        """Yield the kernels that take longer than planned, as one bottleneck that names the worst."""
        slower = [
            kernel
            for kernel in self.differences
            if kernel.kind == "kernel" and kernel.difference_s > 0 and kernel.where != DATA
        ]
        if slower:
            worst, rank = slower[0], max(self.occupancies, key=lambda occupancy: occupancy.busy_s).rank
            total_s = sum(kernel.difference_s for kernel in slower)
            worst_share = format_percent(worst.difference_s / total_s)
            text = (
                f"kernels take {format_seconds(total_s)} longer than planned, {worst_share} of it in "
                f"{worst.name} ({worst.where}): {worst.cause}"
            )
            calibrate = "calibrate the cluster with this run: shardwise calibrate"
            advice = _CORES_ADVICE if worst.cause == "contention" else calibrate
            yield self.build_bottleneck("kernels", text, rank, total_s, advice)


_CORES_ADVICE = "fewer ranks on this host, or fewer threads of each"
_PHASES: tuple[tuple[str, BottleneckKind, str, str, AmountOfLayout | None], ...] = (
    (UPDATE, "update", "the optimizer's update", "more of the optimizer's state sharded", seconds_of_terms(("optimizer",))),
    (DATA, "data", "waits for its data", "a faster disk, or fewer ranks that read from it", None),
)  # fmt: skip


def _advice(axis: str) -> str:
    if axis in ("dp", "fsdp"):
        return "more tokens for each rank between reductions, or less ZeRO"
    if axis == "control":
        return "nothing but fewer steps makes less of it"
    return f"a lower degree of {axis}"


def load_trace_analysis(run: RunFolder, step: int | None = None, *, lists_bottlenecks: bool = False) -> TraceAnalysis:
    """Read a traced step of a run, by default the last one. Raises `InputError` if there is none."""
    traced_step = read_traced_step(run, step)  # first, for its error about a run without traces
    return TraceAnalysis(load_plan(run.plan), traced_step, run, lists_bottlenecks)
