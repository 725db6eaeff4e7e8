"""All that the traces of a step say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.measurement.folder import RunFolder
from shardwise.planning.codec import load_plan
from shardwise.planning.plan import Plan
from shardwise.reconcile.traces.arrivals import Lateness, lateness
from shardwise.reconcile.traces.bottlenecks import Bottleneck, Finder
from shardwise.reconcile.traces.differences import Difference, differences
from shardwise.reconcile.traces.occupancy import Occupancy, occupancy
from shardwise.reconcile.traces.stalls import Stall, stalls
from shardwise.reconcile.traces.traced_step import TracedStep, read_step
from shardwise.simulate.result import Simulation, simulate


@dataclass(frozen=True)
class Traced:
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
        return tuple(map(occupancy, self.step.ranks))

    @cached_property
    def lateness(self) -> tuple[Lateness, ...]:
        """When each rank came to collectives."""
        return lateness(self.step)

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Where it differs from the planned step, the largest difference first."""
        return differences(self.step, self.planned.found)

    @cached_property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """What holds the step up, the longest first."""
        finder = Finder(
            self.plan, self.step, self.planned.found, self.occupancies, self.lateness, self.stalls, self.differences
        )
        return finder.bottlenecks()

    @cached_property
    def stalls(self) -> tuple[Stall, ...]:
        """What took far longer than is usual, the longest first."""
        return stalls(self.step)


def read_traced(run: RunFolder, step: int | None = None) -> Traced:
    """A traced step of a run, by default the last one. Raises `InputError` where there is none."""
    traced = read_step(run, step)
    return Traced(load_plan(run.plan), traced)
