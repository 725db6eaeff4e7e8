"""Other layouts of a plan's job: a given one compared term by term, options that were not taken, other pipeline schedules.

Options are the plan's layout with one choice changed, and the recipes that the Ultra-Scale Playbook starts from, each with the
step of the decision procedure at which it drops out. Source of the recipes: Tazi et al., The Ultra-Scale Playbook, 2025,
"Finding the best training configuration", step 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.layout import Layout, violations
from shardwise.pipeline import get_schedule, natural_schedule
from shardwise.pipeline.registry import pipeline_schedule_names
from shardwise.price import Estimate
from shardwise.price.estimate import estimate
from shardwise.search.explain.neighbour_layouts import place_fastest, plan_recompute_policies, single_changes
from shardwise.search.nearest_fitting_layout import find_nearest_fitting
from shardwise.search.plan import Plan
from shardwise.search.verdicts import (
    FIT_ADVICE,
    changed_fields,
    compare_steps,
    explain_slowdown,
    fitting_loss_flag,
    price_leaner_losses,
)
from shardwise.values import Progress, format_bytes, ignore_progress

FindNearest = Callable[[Layout], Layout | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermDifference:
    """A term of both layouts: `other - plan` is `change`."""

    plan: float
    other: float
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutComparison:
    """Another layout, priced; differences are the other's less the plan's. `filled`: those of its choices that a search made."""

    layout: str
    filled: str
    placement: str
    changed: Mapping[str, tuple[object, object]]
    estimate: Estimate
    lead: float
    verdict: str
    reason: str
    time: Mapping[str, TermDifference]
    memory: Mapping[str, TermDifference]
    smallest_change: str | None


def compare_layout(plan: Plan, layout: Layout, find_nearest: FindNearest, filled: str = "") -> LayoutComparison:
    """Compare the plan with another layout, of which a search filled the fields in `filled`.

    Without a placement, the fastest one is taken. `find_nearest` returns a layout that fits. `lead` of the result is the
    other's step time over the plan's, minus one. Raises `InputError` with every rule that the layout breaks."""
    placed, priced = place_fastest(plan, layout)
    return LayoutComparison(
        layout=str(placed), filled=filled, placement=str(placed.placement), changed=changed_fields(plan.layout, placed),
        estimate=priced, lead=priced.step_time_s / plan.estimate.step_time_s - 1, verdict=compare_steps(priced, plan.estimate),
        reason=explain_slowdown(priced, plan.estimate) if priced.step_time_s >= plan.estimate.step_time_s else "",
        time=term_differences(plan.estimate.time, priced.time), memory=term_differences(plan.estimate.memory, priced.memory),
        smallest_change=None if priced.fits else describe_smallest_change(plan, placed, find_nearest),
    )  # fmt: skip


def term_differences(plan_terms: Mapping[str, float], other_terms: Mapping[str, float]) -> dict[str, TermDifference]:
    """Compare the terms of two layouts; terms that are zero in both are skipped."""
    return {
        term: TermDifference(plan=value, other=other_terms[term], change=other_terms[term] - value)
        for term, value in plan_terms.items()
        if value or other_terms[term]
    }


def describe_smallest_change(plan: Plan, layout: Layout, find_nearest: FindNearest) -> str:
    """Describe the smallest change with which a layout of a plan's job fits: fields of the layout, or the loss kernel."""
    loss_flag = fitting_loss_flag(price_leaner_losses(plan.problem, layout))
    fitting = find_nearest(layout)
    if fitting is None:
        return loss_flag or f"nothing fits of what was searched, {_searched_text(plan)}: {FIT_ADVICE}"
    changes = changed_fields(layout, fitting).items()
    changed = (
        ", ".join(f"{name} {_value_text(before)} → {_value_text(after)}" for name, (before, after) in changes)
        or "another placement"
    )
    return f"{changed}; or {loss_flag}" if loss_flag else changed


def _searched_text(plan: Plan) -> str:
    """Return what `find_nearest_fitting` searches, and what it leaves out."""
    if plan.cluster.chip.pcie_bytes_per_s is None:
        return f"every degree without offload (not priced: no sourced pcie_bytes_per_s of {plan.cluster.chip.name})"
    return "every degree without offload, and offload at the layout's degrees"


def find_smallest_change(plan: Plan, progress: Progress = ignore_progress) -> str | None:
    """Describe the smallest change with which a plan's layout fits, which is searched for; None if it fits."""
    if plan.estimate.fits:
        return None
    return describe_smallest_change(
        plan, plan.layout, lambda layout: find_nearest_fitting(plan.problem, layout, progress)
    )


def _value_text(value: object) -> str:
    if value is None:  # layers that recompute
        return "all"
    return str(value).lower() if isinstance(value, bool) else str(value)


NODE_DEVICES = 8  # devices that the playbook's recipes put tensor parallelism over: its nodes have 8 GPUs
LEGAL_STEP, FIT_STEP, BATCH_STEP, THROUGHPUT_STEP = 0, 1, 2, 3  # the steps; rules of layouts come before the first
BATCH_RULE_PREFIXES = ("micro_batch:", "schedule_batch:")  # rules of legality that are about the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedLayout:
    """Rejected layout, with the step at which it drops out; at step 3 it is compared with the plan.

    `step` 0: not legal; 1: does not fit; 2: does not reach the batch; 3: judged by its time.
    """

    what: str
    layout: str
    step: int
    verdict: str
    memory_bytes: float | None = None
    step_time_s: float | None = None


def judge_options(plan: Plan) -> tuple[RejectedLayout, ...]:
    """Judge every option but the plan itself, each layout once."""
    judged = {_without_placement(plan.layout)}
    options = []
    for change, layout in (*single_changes(plan), *_playbook_recipes(plan)):
        if _without_placement(layout) not in judged:
            judged.add(_without_placement(layout))
            options.append(judge_option(plan, change, layout))
    return tuple(options)


def _without_placement(layout: Layout) -> Layout:
    return replace(layout, placement=None)


def judge_option(plan: Plan, change: str, layout: Layout) -> RejectedLayout:
    """Take a layout through the steps of the decision procedure, as far as it gets."""
    broken = violations(plan.model, plan.job, plan.cluster.num_devices, layout)
    if broken:
        step = BATCH_STEP if broken[0].startswith(BATCH_RULE_PREFIXES) else LEGAL_STEP
        return RejectedLayout(what=change, layout=str(layout), step=step, verdict=broken[0])
    priced = _estimate(plan, _without_placement(layout))
    memory = priced.memory_bytes
    if not priced.fits:
        return RejectedLayout(
            what=change, layout=str(layout), step=FIT_STEP, memory_bytes=memory,
            verdict=f"needs {format_bytes(memory)} of {format_bytes(priced.memory_capacity_bytes)}",
        )  # fmt: skip
    idle = layout.num_replicas - plan.job.num_seqs
    if idle > 0 and layout.num_replicas > plan.layout.num_replicas:  # a plan may leave some idle too, but fewer of them
        text = f"{idle:,} of {layout.num_replicas:,} replicas have no sequence"
        return RejectedLayout(what=change, layout=str(layout), step=BATCH_STEP, verdict=text, memory_bytes=memory)
    _, priced = place_fastest(plan, _without_placement(layout))
    return RejectedLayout(
        what=change, layout=str(layout), step=THROUGHPUT_STEP, verdict=compare_steps(priced, plan.estimate), memory_bytes=memory,
        step_time_s=priced.step_time_s,
    )  # fmt: skip


def _playbook_recipes(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """Yield the playbook's starting points on these devices, each with the least recomputation with which it fits.

    Pipelines of every depth are tried, and the fastest that fits is taken."""
    devices = plan.cluster.num_devices
    tp = max(
        n
        for n in range(1, NODE_DEVICES + 1)
        if devices % n == 0 and not violations(plan.model, plan.job, n, Layout(tp=n, sequence_parallel=n > 1))
    )
    num_tp_groups = devices // tp
    if devices > 1:
        yield "playbook: ZeRO-3 alone", _least_recompute(plan, Layout(fsdp=devices, zero_stage=3))
    if tp > 1:
        tp_layout = Layout(tp=tp, sequence_parallel=True, dp=num_tp_groups)
        if num_tp_groups == 1:
            yield f"playbook: tp = {tp} alone", _least_recompute(plan, tp_layout)
            return
        sharded = replace(tp_layout, dp=1, fsdp=num_tp_groups, zero_stage=3)
        yield f"playbook: tp = {tp} with ZeRO-3", _least_recompute(plan, sharded)
        pipelined = list(_pipelined_layouts(plan, tp_layout, num_tp_groups))
        if pipelined:
            fitting = [recipe for recipe in pipelined if _fits(plan, recipe[1])]
            yield min(fitting, key=lambda recipe: _estimate(plan, recipe[1]).step_time_s) if fitting else pipelined[-1]


def _pipelined_layouts(plan: Plan, tp_layout: Layout, num_tp_groups: int) -> Iterator[tuple[str, Layout]]:
    """Yield tensor parallelism with ever more stages; ZeRO-2 over the replicas from 1,024 devices on, none below."""
    for pp in (n for n in range(2, plan.model.num_layers + 1) if num_tp_groups % n == 0):
        replicas = num_tp_groups // pp
        sharded = replicas > 1 and plan.cluster.num_devices >= 1024
        layout = replace(
            tp_layout, pp=pp, schedule=natural_schedule(pp, 1), dp=1 if sharded else replicas, fsdp=replicas if sharded else 1,
            zero_stage=2 if sharded else 0,
        )  # fmt: skip
        zero_text = " and ZeRO-2" if sharded else ""
        yield f"playbook: tp = {layout.tp} with a pipeline{zero_text}", _least_recompute(plan, layout)


def _least_recompute(plan: Plan, layout: Layout) -> Layout:
    """Return the layout with the first policy under which it fits, else with the last."""
    candidates = [replace(layout, recompute=policy) for policy in plan_recompute_policies(plan)]
    return next((candidate for candidate in candidates if _fits(plan, candidate)), candidates[-1])


def _estimate(plan: Plan, layout: Layout) -> Estimate:
    return estimate(plan.problem, layout)


def _fits(plan: Plan, layout: Layout) -> bool:
    return not violations(plan.model, plan.job, plan.cluster.num_devices, layout) and _estimate(plan, layout).fits


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOption:
    """A plan's layout under another schedule: seconds, bytes and the comparison; None where it cannot run."""

    schedule: str
    num_virtual_stages: int
    step_time_s: float | None
    bubble_s: float | None
    memory_bytes: float | None
    fits: bool
    verdict: str


def compare_plan_schedules(plan: Plan) -> tuple[ScheduleOption, ...]:
    """Compare the plan's schedule with every other one, each on its fastest placement; empty without a pipeline."""
    return (
        tuple(_judge_schedule(plan, layout) for layout in _layouts_by_schedule(plan.layout))
        if plan.layout.pp > 1
        else ()
    )


def _layouts_by_schedule(layout: Layout) -> Iterator[Layout]:
    """Yield the same degrees under each schedule, with two virtual stages if the schedule needs them."""
    for schedule in pipeline_schedule_names():
        if schedule == layout.schedule:
            yield layout
        else:
            virtual = 1 if get_schedule(schedule).supports(layout.pp, 1) else 2
            layers = None if virtual > 1 else layout.layers_per_stage
            yield replace(
                layout, schedule=schedule, num_virtual_stages=virtual, layers_per_stage=layers, placement=None
            )


def _judge_schedule(plan: Plan, layout: Layout) -> ScheduleOption:
    broken = violations(plan.model, plan.job, plan.cluster.num_devices, layout)
    if broken:
        return ScheduleOption(
            schedule=layout.schedule, num_virtual_stages=layout.num_virtual_stages, step_time_s=None, bubble_s=None,
            memory_bytes=None, fits=False, verdict=broken[0],
        )  # fmt: skip
    is_plan = layout == plan.layout
    priced = plan.estimate if is_plan else place_fastest(plan, layout)[1]
    return ScheduleOption(
        schedule=layout.schedule, num_virtual_stages=layout.num_virtual_stages, step_time_s=priced.step_time_s,
        bubble_s=priced.time["bubble"], memory_bytes=priced.memory_bytes, fits=priced.fits,
        verdict="the plan" if is_plan else compare_steps(priced, plan.estimate),
    )  # fmt: skip
