"""What else could have been done, and the step of the decision procedure at which it drops out.

Two kinds: the plan's layout with one choice undone or taken further, and the recipes that the Ultra-Scale Playbook starts from.
Source of the recipes: Tazi et al., The Ultra-Scale Playbook, 2025, "Finding the best training configuration", step 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cost.estimate import Estimate, estimate
from shardwise.layout.layout import Layout
from shardwise.layout.legality import violations
from shardwise.planning.abilities import recompute_policies, stack_of
from shardwise.planning.explain.against import best_placed
from shardwise.planning.explain.reasons import verdict
from shardwise.planning.plan import Plan
from shardwise.schedule.schedule import natural_schedule
from shardwise.units import format_bytes

NODE = 8  # devices that the playbook's recipes put tensor parallelism over: its nodes have 8 GPUs
LEGAL, FIT, BATCH, THROUGHPUT = 0, 1, 2, 3  # the steps; rules of layouts come before the first
BATCH_RULES = ("micro_batch:", "schedule_batch:")  # rules of legality that are about the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A layout that was not taken, and the step at which it drops out; at step 3 it is compared with the plan.

    `step` 0: not legal; 1: does not fit; 2: does not reach the batch; 3: judged by its time.
    """

    what: str
    layout: str
    step: int
    verdict: str
    memory_bytes: float | None = None
    step_time_s: float | None = None


def options(plan: Plan) -> tuple[Option, ...]:
    """Every option but the plan itself, each layout once."""
    seen = {_bare(plan.layout)}
    found = []
    for what, layout in (*one_change(plan), *_recipes(plan)):
        if _bare(layout) not in seen:
            seen.add(_bare(layout))
            found.append(judged(plan, what, layout))
    return tuple(found)


def _bare(layout: Layout) -> Layout:
    return replace(layout, placement=None)


def judged(plan: Plan, what: str, layout: Layout) -> Option:
    """Take a layout through the steps, as far as it gets."""
    broken = violations(plan.model, plan.job, plan.cluster.num_devices, layout)
    if broken:
        step = BATCH if broken[0].startswith(BATCH_RULES) else LEGAL
        return Option(what=what, layout=str(layout), step=step, verdict=broken[0])
    priced = estimate(plan.model, plan.cluster, plan.job, _bare(layout))
    memory = priced.memory_bytes
    if not priced.fits:
        return Option(what=what, layout=str(layout), step=FIT, verdict=_over(priced), memory_bytes=memory)
    idle = layout.num_replicas - plan.job.num_seqs
    if idle > 0 and layout.num_replicas > plan.layout.num_replicas:  # a plan may leave some idle too, but fewer of them
        text = f"{idle:,} of {layout.num_replicas:,} replicas have no sequence"
        return Option(what=what, layout=str(layout), step=BATCH, verdict=text, memory_bytes=memory)
    _, priced = best_placed(plan, _bare(layout))
    return Option(
        what=what, layout=str(layout), step=THROUGHPUT, verdict=verdict(priced, plan.estimate), memory_bytes=memory,
        step_time_s=priced.step_time_s,
    )  # fmt: skip


def _over(priced: Estimate) -> str:
    return f"needs {format_bytes(priced.memory_bytes)} of {format_bytes(priced.memory_capacity_bytes)}"


def policies_of(plan: Plan) -> tuple[str, ...]:
    """The recompute policies of the plan's stack, from the one that saves the most."""
    return recompute_policies(stack_of(plan.cluster), plan.model, plan.job)


def one_change(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """The plan's layout with one choice changed: a lower ZeRO stage, other recomputation and micro-batches, an axis turned into
    replicas."""
    layout = plan.layout
    for stage in range(layout.zero_stage - 1, -1, -1):
        less = _with_zero(layout, stage)
        also = f", with ep = {less.ep} in place of {layout.ep}" if less.ep != layout.ep else ""
        yield f"ZeRO stage {stage} in place of {layout.zero_stage}{also}", less
    for policy in policies_of(plan):
        every = replace(layout, recompute=policy, recompute_layers=None)
        other = "on all layers" if policy == layout.recompute else f"in place of {layout.recompute}"
        yield f"recompute {policy} {other}", every
    yield "micro-batches twice as large", replace(layout, micro_batch_seqs=2 * layout.micro_batch_seqs)
    if layout.micro_batch_seqs > 1:
        yield "micro-batches of one sequence", replace(layout, micro_batch_seqs=1)
    if layout.sequence_parallel:
        yield "no sequence parallelism", replace(layout, sequence_parallel=False, async_tp=False)
    for axis in ("tp", "cp", "pp"):
        if getattr(layout, axis) > 1:
            yield f"replicas in place of {axis} = {getattr(layout, axis)}", _without(layout, axis)


def _with_zero(layout: Layout, stage: int) -> Layout:
    """Another ZeRO stage over the same devices; without ZeRO they are replicas, from which experts borrow nothing."""
    if stage:
        return replace(layout, zero_stage=stage)
    ep = layout.tp if layout.expert_tp < layout.tp else 1
    return replace(layout, zero_stage=0, dp=layout.dp * layout.fsdp, fsdp=1, ep=ep)


def _without(layout: Layout, axis: str) -> Layout:
    """The devices of an axis as more replicas, over which ZeRO shards if the layout uses it."""
    grown = "fsdp" if layout.zero_stage else "dp"
    values: dict[str, Any] = {axis: 1, grown: getattr(layout, grown) * getattr(layout, axis)}
    if axis == "tp":
        values |= {"sequence_parallel": False, "async_tp": False, "etp": None}
    if axis == "cp":
        values["cp_variant"] = "all_gather"
    if axis == "pp":
        values |= {"num_virtual_stages": 1, "schedule": natural_schedule(1, 1), "layers_per_stage": None}
    return replace(layout, **values)


def _recipes(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """The playbook's starting points on these devices; for each the least recomputation with which it fits.

    Pipelines of every depth are tried, and the fastest that fits is taken.
    """
    devices = plan.cluster.num_devices
    tp = max(n for n in range(1, NODE + 1) if devices % n == 0 and _tp_is_legal(plan, n))
    rest = devices // tp
    if devices > 1:
        yield "playbook: ZeRO-3 alone", _least_recompute(plan, Layout(fsdp=devices, zero_stage=3))
    if tp > 1:
        beside = Layout(tp=tp, sequence_parallel=True, dp=rest)
        if rest == 1:
            yield f"playbook: tp = {tp} alone", _least_recompute(plan, beside)
            return
        sharded = replace(beside, dp=1, fsdp=rest, zero_stage=3)
        yield f"playbook: tp = {tp} with ZeRO-3", _least_recompute(plan, sharded)
        pipelined = list(_pipelines(plan, beside, rest))
        if pipelined:
            fitting = [one for one in pipelined if _fits(plan, one[1])]
            yield min(fitting, key=lambda one: _step_s(plan, one[1])) if fitting else pipelined[-1]


def _tp_is_legal(plan: Plan, tp: int) -> bool:
    alone = Layout(tp=tp, sequence_parallel=tp > 1)
    return not violations(plan.model, plan.job, tp, alone)


def _pipelines(plan: Plan, beside: Layout, rest: int) -> Iterator[tuple[str, Layout]]:
    """Tensor parallelism with ever more stages; ZeRO-2 over the replicas from 1,024 devices on, none below."""
    for pp in (n for n in range(2, plan.model.num_layers + 1) if rest % n == 0):
        replicas = rest // pp
        sharded = replicas > 1 and plan.cluster.num_devices >= 1024
        layout = replace(
            beside, pp=pp, schedule=natural_schedule(pp, 1), dp=1 if sharded else replicas, fsdp=replicas if sharded else 1,
            zero_stage=2 if sharded else 0,
        )  # fmt: skip
        also = " and ZeRO-2" if sharded else ""
        yield f"playbook: tp = {layout.tp} with a pipeline{also}", _least_recompute(plan, layout)


def _least_recompute(plan: Plan, layout: Layout) -> Layout:
    """The layout with the first of the policies under which it fits; the last where none does."""
    tried = [replace(layout, recompute=policy) for policy in policies_of(plan)]
    return next((one for one in tried if _fits(plan, one)), tried[-1])


def _step_s(plan: Plan, layout: Layout) -> float:
    return estimate(plan.model, plan.cluster, plan.job, layout).step_time_s


def _fits(plan: Plan, layout: Layout) -> bool:
    if violations(plan.model, plan.job, plan.cluster.num_devices, layout):
        return False
    return estimate(plan.model, plan.cluster, plan.job, layout).fits
