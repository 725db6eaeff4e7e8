"""Other layouts of a plan's job: a given one compared term by term, options that were not taken, other pipeline schedules.

Options are the plan's layout with one choice undone or taken further, and the recipes that the Ultra-Scale Playbook starts from,
each with the step of the decision procedure at which it drops out. Source of the recipes: Tazi et al., The Ultra-Scale Playbook,
2025, "Finding the best training configuration", step 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.pipeline.registry import natural_schedule, pipeline_names, schedule_of
from shardwise.price.estimate import Estimate, estimate
from shardwise.search.explain.neighbour_layouts import best_placed, one_change, policies_of
from shardwise.search.plan import Plan
from shardwise.search.verdicts import ADVICE, changed_fields, fitting_loss, leaner_losses, verdict, why_slower
from shardwise.values.units import format_bytes

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
