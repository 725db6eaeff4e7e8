"""Layouts near a plan's, and which of them would mend what a run was seen to lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.cost.estimate import Estimate
from shardwise.errors import InputError
from shardwise.layout.layout import Layout
from shardwise.layout.legality import violations
from shardwise.planning.explain.against import best_placed
from shardwise.planning.explain.options import one_change
from shardwise.planning.plan import Plan
from shardwise.planning.runnable import require_runnable
from shardwise.precision import precision_named

AXES = ("tp", "cp", "pp")
LEAST = 0.01  # of the plan's step: a smaller gain is no advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of layout: what it is, the layout, its predicted step, and the seconds of a step that it would save."""

    what: str
    layout: str
    step_time_s: float
    saves_s: float


Amount = Callable[[Layout, Estimate], float]


def neighbours(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """Layouts with one choice of a plan changed: those that `explain` prices, degrees halved for more replicas, more ZeRO,
    smaller micro-batches, and more virtual stages."""
    layout = plan.layout
    yield from one_change(plan)
    grown = "fsdp" if layout.zero_stage else "dp"
    for axis in AXES:
        degree = getattr(layout, axis)
        if degree > 2 and degree % 2 == 0:
            yield (
                f"{axis} = {degree // 2}, and more replicas",
                replace(layout, **{axis: degree // 2, grown: 2 * getattr(layout, grown)}),
            )
    if not layout.zero_stage and layout.dp > 1:
        for stage in (1, 2, 3):
            yield f"ZeRO stage {stage} over the replicas", replace(layout, zero_stage=stage, fsdp=layout.dp, dp=1)
    for stage in range(layout.zero_stage + 1, 4) if layout.zero_stage else ():
        yield f"ZeRO stage {stage} in place of {layout.zero_stage}", replace(layout, zero_stage=stage)
    if layout.micro_batch_seqs % 2 == 0:
        yield (
            "micro-batches half as large, twice as many",
            replace(layout, micro_batch_seqs=layout.micro_batch_seqs // 2),
        )
    if layout.pp > 1 and layout.num_virtual_stages == 1:
        yield "two virtual stages on each rank", replace(layout, num_virtual_stages=2, schedule="interleaved")


def remedy(plan: Plan, measured_s: float, amount: Amount) -> Remedy | None:
    """The neighbour of a plan's layout that would save most of a step, or None where none would.

    A step lost `measured_s` to something of which a layout has an `amount`, in any unit. The loss is taken to be proportional to
    it; all else changes as predicted, with the plan's own prediction of what was lost left out on both sides.
    """
    mine = amount(plan.layout, plan.estimate)
    found = [one for what, layout in neighbours(plan) if (one := _judged(plan, what, layout, measured_s, mine, amount))]
    best = max(found, key=lambda one: one.saves_s, default=None)
    return best if best and best.saves_s >= LEAST * plan.estimate.step_time_s else None


def _judged(plan: Plan, what: str, layout: Layout, measured_s: float, mine: float, amount: Amount) -> Remedy | None:
    """A neighbour that is legal, runs, fits, and has less of what was lost."""
    layout = replace(layout, placement=None, micro_batch_seqs=_most_seqs(plan, layout))
    if violations(plan.model, plan.job, plan.cluster.num_devices, layout) or not _runs(plan, layout):
        return None
    placed, priced = best_placed(plan, layout)
    its = amount(placed, priced)
    if not priced.fits or its >= mine:
        return None
    saves = measured_s * (1.0 - its / mine) + plan.estimate.step_time_s - priced.step_time_s
    return Remedy(what=what, layout=str(layout), step_time_s=priced.step_time_s, saves_s=saves)


def _most_seqs(plan: Plan, layout: Layout) -> int:
    """Sequences of a micro-batch, of which each of more replicas may have fewer."""
    return min(layout.micro_batch_seqs, max(plan.job.num_seqs // layout.num_replicas, 1))


def _runs(plan: Plan, layout: Layout) -> bool:
    try:
        require_runnable(plan.model, layout, precision_named(plan.job.precision), plan.job.optimizer)
    except InputError:
        return False
    return True


def of_terms(terms: Sequence[str]) -> Amount:
    """Seconds of some terms of the time, with the traffic that is predicted to be hidden."""
    return lambda _, priced: sum(priced.time.get(term, 0.0) + priced.hidden.get(term, 0.0) for term in terms)


def launches(plan: Plan) -> Amount:
    """Passes through layers that a rank runs in a step, to which the kernels that it launches are proportional."""
    model, num_seqs = plan.model, plan.job.num_seqs
    return lambda layout, _: (
        -(-num_seqs // (layout.num_replicas * layout.micro_batch_seqs)) * (model.num_layers + 1) / layout.pp
    )
