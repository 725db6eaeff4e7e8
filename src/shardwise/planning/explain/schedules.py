"""The other pipeline schedules at a plan's degrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.layout.layout import Layout
from shardwise.layout.legality import violations
from shardwise.planning.explain.against import best_placed
from shardwise.planning.explain.reasons import verdict
from shardwise.planning.plan import Plan
from shardwise.schedule.schedule import pipeline_names, schedule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A plan's layout under another schedule: seconds, bytes and the comparison; None where it cannot run."""

    schedule: str
    num_virtual_stages: int
    step_time_s: float | None
    bubble_s: float | None
    memory_bytes: float | None
    fits: bool
    verdict: str


def schedules(plan: Plan) -> tuple[Scheduled, ...]:
    """The plan's schedule and every other one, for a plan with a pipeline. The others have their fastest placements."""
    return tuple(_scheduled(plan, layout) for layout in _layouts(plan.layout)) if plan.layout.pp > 1 else ()


def _layouts(layout: Layout) -> Iterator[Layout]:
    """The same degrees under each schedule; with two virtual stages where it needs some and the layout has none."""
    for schedule in pipeline_names():
        if schedule == layout.schedule:
            yield layout
        else:
            virtual = 1 if schedule_of(schedule).goes_with(layout.pp, 1) else 2
            given = None if virtual > 1 else layout.layers_per_stage
            yield replace(layout, schedule=schedule, num_virtual_stages=virtual, layers_per_stage=given, placement=None)


def _scheduled(plan: Plan, layout: Layout) -> Scheduled:
    broken = violations(plan.model, plan.job, plan.cluster.num_devices, layout)
    if broken:
        return Scheduled(
            schedule=layout.schedule, num_virtual_stages=layout.num_virtual_stages, step_time_s=None, bubble_s=None,
            memory_bytes=None, fits=False, verdict=broken[0],
        )  # fmt: skip
    own = layout == plan.layout
    priced = plan.estimate if own else best_placed(plan, layout)[1]
    return Scheduled(
        schedule=layout.schedule, num_virtual_stages=layout.num_virtual_stages, step_time_s=priced.step_time_s,
        bubble_s=priced.time["bubble"], memory_bytes=priced.memory_bytes, fits=priced.fits,
        verdict="the plan" if own else verdict(priced, plan.estimate),
    )  # fmt: skip
