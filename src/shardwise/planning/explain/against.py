"""Another layout of the same job, term by term."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwise.cost.estimate import Estimate, estimate
from shardwise.layout.family import atomic_degrees
from shardwise.layout.layout import Layout
from shardwise.layout.legality import degrees_of
from shardwise.layout.placement import Placement, cut_levels, placements
from shardwise.planning.explain.losses import fitting_loss, leaner_losses
from shardwise.planning.explain.reasons import ADVICE, changed_fields, verdict, why_slower
from shardwise.planning.plan import Plan

Nearest = Callable[[Layout], Layout | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A term of both layouts: `other - plan` is `change`."""

    plan: float
    other: float
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Another layout, priced; differences are the other's less the plan's. `filled`: those of its choices that a search made."""

    layout: str
    filled: str
    placement: str
    changed: Mapping[str, tuple[object, object]]
    estimate: Estimate
    lead: float
    verdict: str
    reason: str
    time: Mapping[str, Difference]
    memory: Mapping[str, Difference]
    smallest_change: str | None


def against(plan: Plan, layout: Layout, nearest: Nearest, filled: str = "") -> Against:
    """Compare with another layout, whose choices in `filled` a search made; `nearest` finds a layout that fits. Raises
    `InputError` with every rule that it breaks.

    A placement that is not given is the fastest one. `lead` is the other's step time over the plan's, minus one.
    """
    placed, priced = best_placed(plan, layout)
    return Against(
        layout=str(placed), filled=filled, placement=str(placed.placement), changed=changed_fields(plan.layout, placed),
        estimate=priced, lead=priced.step_time_s / plan.estimate.step_time_s - 1, verdict=verdict(priced, plan.estimate),
        reason=why_slower(priced, plan.estimate) if priced.step_time_s >= plan.estimate.step_time_s else "",
        time=differences(plan.estimate.time, priced.time), memory=differences(plan.estimate.memory, priced.memory),
        smallest_change=None if priced.fits else smallest_change(plan, placed, nearest),
    )  # fmt: skip


def best_placed(plan: Plan, layout: Layout) -> tuple[Layout, Estimate]:
    """The layout on its own placement, or without one on the fastest, with its estimate."""
    options = [layout.placement] if layout.placement else _different_placements(plan, layout)
    placed = [replace(layout, placement=option) for option in options]
    priced = [(one, estimate(plan.model, plan.cluster, plan.job, one)) for one in placed]
    return min(priced, key=lambda pair: pair[1].step_time_s)


def _different_placements(plan: Plan, layout: Layout) -> list[Placement]:
    """One placement of each kind: placements that give every axis the same links cost the same."""
    topology, degrees = plan.cluster.topology, atomic_degrees(plan.model, degrees_of(layout))
    kinds: dict[tuple[object, ...], Placement] = {}
    for option in placements(topology):
        cuts = cut_levels(topology, option, degrees)
        kinds.setdefault(tuple((axis, cuts[axis]) for axis in sorted(cuts) if degrees[axis] > 1), option)
    return list(kinds.values())


def differences(plan: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Difference]:
    """Both sides of every term that either layout has."""
    return {
        term: Difference(plan=value, other=other[term], change=other[term] - value)
        for term, value in plan.items()
        if value or other[term]
    }


def smallest_change(plan: Plan, layout: Layout, nearest: Nearest) -> str:
    """The changes with which a layout of a plan's job fits: fields of the layout, or the kind of loss."""
    leaner = fitting_loss(leaner_losses(plan.model, plan.cluster, plan.job, layout))
    fitting = nearest(layout)
    if fitting is None:
        return leaner or f"nothing fits: {ADVICE}"
    changes = changed_fields(layout, fitting).items()
    changed = ", ".join(f"{name} {_text(mine)} → {_text(its)}" for name, (mine, its) in changes) or "another placement"
    return f"{changed}; or {leaner}" if leaner else changed


def _text(value: object) -> str:
    if value is None:  # layers that recompute
        return "all"
    return str(value).lower() if isinstance(value, bool) else str(value)
