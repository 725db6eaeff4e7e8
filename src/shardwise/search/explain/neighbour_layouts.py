"""Layouts one choice away from a plan's, their fastest placements, and the neighbour that would reduce a loss measured in a
run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.layout import (
    Layout,
    Placement,
    atomic_degrees,
    cuts_by_axis,
    layout_degrees,
    require_runnable,
    stack_of,
    violations,
)
from shardwise.layout.choices import stack_recompute_policies
from shardwise.layout.placement import searched_placements
from shardwise.pipeline import natural_schedule
from shardwise.price import Estimate
from shardwise.price.estimate import estimate
from shardwise.search.plan import Plan
from shardwise.values import InputError, get_precision

REPLACED_AXES = ("tp", "cp", "pp")
MIN_SAVED_SHARE = 0.01  # of the plan's step: a smaller gain is no advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of layout: what it is, the layout, its predicted step, and the seconds of a step that it would save."""

    what: str
    layout: str
    step_time_s: float
    saves_s: float


AmountOfLayout = Callable[[Layout, Estimate], float]


def iterate_neighbours(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """Yield layouts with one choice of a plan changed.

    They are those of `single_changes`, degrees halved for more replicas, more ZeRO, smaller micro-batches, and more virtual
    stages."""
    layout = plan.layout
    yield from single_changes(plan)
    replica_axis = "fsdp" if layout.zero_stage else "dp"
    for axis in REPLACED_AXES:
        degree = getattr(layout, axis)
        if degree > 2 and degree % 2 == 0:
            yield (
                f"{axis} = {degree // 2}, and more replicas",
                replace(layout, **{axis: degree // 2, replica_axis: 2 * getattr(layout, replica_axis)}),
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


def find_remedy(plan: Plan, measured_s: float, amount: AmountOfLayout) -> Remedy | None:
    """Return the neighbour of a plan's layout that would save most of a step, or None if none would.

    A step lost `measured_s` to something of which a layout has an `amount`, in any unit. The loss is assumed proportional to
    it; all else changes as predicted, with the plan's own prediction of what was lost left out on both sides."""
    plan_amount = amount(plan.layout, plan.estimate)
    remedies = [
        remedy
        for change, layout in iterate_neighbours(plan)
        if (remedy := _judge_neighbour(plan, change, layout, measured_s, plan_amount, amount))
    ]
    best = max(remedies, key=lambda remedy: remedy.saves_s, default=None)
    return best if best and best.saves_s >= MIN_SAVED_SHARE * plan.estimate.step_time_s else None


def _judge_neighbour(
    plan: Plan, change: str, layout: Layout, measured_s: float, plan_amount: float, amount: AmountOfLayout
) -> Remedy | None:
    """Return a neighbour that is legal, runs, fits, and has less of what was lost; else None."""
    # With more replicas, each may have fewer sequences than a micro-batch.
    micro_batch_seqs = min(layout.micro_batch_seqs, max(plan.job.num_seqs // layout.num_replicas, 1))
    layout = replace(layout, placement=None, micro_batch_seqs=micro_batch_seqs)
    if violations(plan.model, plan.job, plan.cluster.num_devices, layout) or not _is_runnable(plan, layout):
        return None
    placed, priced = place_fastest(plan, layout)
    neighbour_amount = amount(placed, priced)
    if not priced.fits or neighbour_amount >= plan_amount:
        return None
    saved_s = measured_s * (1.0 - neighbour_amount / plan_amount) + plan.estimate.step_time_s - priced.step_time_s
    return Remedy(what=change, layout=str(layout), step_time_s=priced.step_time_s, saves_s=saved_s)


def _is_runnable(plan: Plan, layout: Layout) -> bool:
    try:
        require_runnable(plan.model, layout, get_precision(plan.job.precision), plan.job.optimizer)
    except InputError:
        return False
    return True


def seconds_of_terms(terms: Sequence[str]) -> AmountOfLayout:
    """Return the amount "seconds of some time terms", including the traffic that is predicted to be hidden."""
    return lambda _, priced: sum(priced.time.get(term, 0.0) + priced.hidden.get(term, 0.0) for term in terms)


def num_layer_passes(plan: Plan) -> AmountOfLayout:
    """Return the amount "passes through layers of a rank in a step", to which its kernel launches are proportional."""
    model, num_seqs = plan.model, plan.job.num_seqs
    return lambda layout, _: (
        -(-num_seqs // (layout.num_replicas * layout.micro_batch_seqs)) * (model.num_layers + 1) / layout.pp
    )


def plan_recompute_policies(plan: Plan) -> tuple[str, ...]:
    """Return the recompute policies of the plan's stack, from the one that saves the most tensors."""
    return stack_recompute_policies(stack_of(plan.cluster), plan.model, plan.job)


def single_changes(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """Yield the plan's layout with one choice changed.

    A lower ZeRO stage, other recomputation and micro-batches, no sequence parallelism, an axis turned into replicas."""
    layout = plan.layout
    for stage in range(layout.zero_stage - 1, -1, -1):
        lower_stage = _with_zero_stage(layout, stage)
        ep_change = f", with ep = {lower_stage.ep} in place of {layout.ep}" if lower_stage.ep != layout.ep else ""
        yield f"ZeRO stage {stage} in place of {layout.zero_stage}{ep_change}", lower_stage
    for policy in plan_recompute_policies(plan):
        recomputed = replace(layout, recompute=policy, recompute_layers=None)
        difference = "on all layers" if policy == layout.recompute else f"in place of {layout.recompute}"
        yield f"recompute {policy} {difference}", recomputed
    yield "micro-batches twice as large", replace(layout, micro_batch_seqs=2 * layout.micro_batch_seqs)
    if layout.micro_batch_seqs > 1:
        yield "micro-batches of one sequence", replace(layout, micro_batch_seqs=1)
    if layout.sequence_parallel:
        yield "no sequence parallelism", replace(layout, sequence_parallel=False, async_tp=False)
    for axis in REPLACED_AXES:
        if getattr(layout, axis) > 1:
            yield f"replicas in place of {axis} = {getattr(layout, axis)}", _replicas_instead_of(layout, axis)


def _with_zero_stage(layout: Layout, stage: int) -> Layout:
    """Return another ZeRO stage over the same devices; without ZeRO they are replicas, from which experts borrow nothing."""
    if stage:
        return replace(layout, zero_stage=stage)
    ep = layout.tp if layout.expert_tp < layout.tp else 1
    return replace(layout, zero_stage=0, dp=layout.dp * layout.fsdp, fsdp=1, ep=ep)


def _replicas_instead_of(layout: Layout, axis: str) -> Layout:
    """Return the devices of an axis as more replicas, over which ZeRO shards if the layout uses it."""
    replica_axis = "fsdp" if layout.zero_stage else "dp"
    changes: dict[str, Any] = {axis: 1, replica_axis: getattr(layout, replica_axis) * getattr(layout, axis)}
    if axis == "tp":
        changes |= {"sequence_parallel": False, "async_tp": False, "etp": None}
    if axis == "cp":
        changes["cp_variant"] = "all_gather"
    if axis == "pp":
        changes |= {"num_virtual_stages": 1, "schedule": natural_schedule(1, 1), "layers_per_stage": None}
    return replace(layout, **changes)


def larger_memory_neighbours(plan: Plan) -> Iterator[tuple[str, Estimate]]:
    """Yield layouts one change away that would use more memory and less time, with their estimates."""
    layout = plan.layout
    policies = plan_recompute_policies(plan)  # those that keep more come first
    changes: list[dict[str, object]] = [
        {"recompute": policy, "recompute_layers": None if policy == "none" else layout.recompute_layers}
        for policy in policies[: policies.index(layout.recompute) if layout.recompute in policies else -1]
    ]
    changes += [{"micro_batch_seqs": 2 * layout.micro_batch_seqs}]
    changes += [{"zero_stage": stage} for stage in range(1, layout.zero_stage)]
    for change in changes:
        neighbour: Layout = replace(layout, **change)  # type: ignore[arg-type]
        if not violations(plan.model, plan.job, plan.cluster.num_devices, neighbour):
            name, value = next(iter(change.items()))
            yield f"{name}={value}", estimate(plan.problem, neighbour)


def place_fastest(plan: Plan, layout: Layout) -> tuple[Layout, Estimate]:
    """Return the layout on its own placement, or without one on the fastest, with its estimate."""
    options = [layout.placement] if layout.placement else _distinct_placements(plan, layout)
    placed = [replace(layout, placement=option) for option in options]
    priced = [(placed_layout, estimate(plan.problem, placed_layout)) for placed_layout in placed]
    return min(priced, key=lambda pair: pair[1].step_time_s)


def _distinct_placements(plan: Plan, layout: Layout) -> list[Placement]:
    """Return one placement of each kind: placements that give every axis the same links cost the same."""
    topology, degrees = plan.cluster.topology, atomic_degrees(plan.model, layout_degrees(layout))
    kinds: dict[tuple[object, ...], Placement] = {}
    for option in searched_placements(topology):
        cuts = cuts_by_axis(topology, option, degrees)
        kinds.setdefault(tuple((axis, cuts[axis]) for axis in sorted(cuts) if degrees[axis] > 1), option)
    return list(kinds.values())
