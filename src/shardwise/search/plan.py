"""Search, choose, and record the reasons: the function behind `shardwise plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from shardwise.books.rules import book_rules
from shardwise.cluster.cluster import Cluster
from shardwise.cost.budget import within_budget
from shardwise.cost.estimate import Estimate, estimate
from shardwise.cost.rates import policy_of
from shardwise.cost.reliability import Reliability
from shardwise.cost.run import training_run
from shardwise.errors import InputError, NothingFitsError
from shardwise.job import Job
from shardwise.layout.layout import OFFLOADS, Layout
from shardwise.model.architecture import Architecture
from shardwise.model.kept_sets import is_budget
from shardwise.model.recompute import POLICIES
from shardwise.planning.abilities import as_run, lacking, stack_of
from shardwise.planning.compare import Contender
from shardwise.planning.explain import (
    MEMORY_RESERVE,
    RESOLUTION,
    leaner_losses,
    loss_would,
    num_changes,
    offload_would,
    smallest_miss,
    why_slower,
)
from shardwise.planning.plan import Alternative, Plan, SearchSummary, as_planned, bound_seconds, versions
from shardwise.progress import Progress, silent
from shardwise.schedule.schedule import NATURAL, SCHEDULES, natural_schedule
from shardwise.search.choices import AXES, BALANCED, QUARTERS, Choices
from shardwise.search.choose import NUM_NEAR, simplest
from shardwise.search.result import Found, SearchResult
from shardwise.search.search import search
from shardwise.search.stages import Balancing
from shardwise.search.to_loss.loss_points import LossPoint
from shardwise.units import format_bytes

NUM_ALTERNATIVES = 6
Planned = TypeVar("Planned", Contender, LossPoint)  # what may have a plan, one of many


def plan(
    architecture: Architecture, cluster: Cluster, job: Job, *, choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = silent, elsewhere: bool = True,
) -> Plan:  # fmt: skip
    """The best layout, the runners-up with the reason each lost, and the books' rules.

    The best is the simplest of the fastest that fit (`search.choose`), by the prediction for a typical stack unless the
    cluster or the job says otherwise (`planning.plan.as_planned`). Layouts that leave a tenth of the memory free are
    preferred; without one, any that fits will do. Raises `NothingFitsError` with the smallest excess. `reliability` has the
    failure rate, restarts and power for the whole run. `elsewhere`: whether what another stack could run is searched too
    (`with_elsewhere`), which takes about half of the time; of many plans only the chosen one needs it.
    """
    architecture.require_positions(job.seq_len)
    (cluster, job), own_job = as_planned(cluster, job), job
    asked, choices = choices, (choices or Choices()).of_stack(stack_of(cluster), architecture, own_job, cluster.domain)
    budget = next((policy for policy in choices.recompute if is_budget(policy)), None)
    if budget:
        choices = replace(choices, recompute=tuple(POLICIES))
    reserve = MEMORY_RESERVE
    found = search(architecture, cluster, job, choices=choices, reserve=reserve, progress=progress)
    if not found.best:
        reserve = 0.0
        found = search(architecture, cluster, job, choices=choices, progress=progress)
    if not found.best:
        leanest = found.leanest.layout
        priced = estimate(architecture, cluster, job, leanest)
        remedies = loss_would(priced, leaner_losses(architecture, cluster, job, leanest))
        remedies += offload_would(_offloaded(architecture, cluster, job, leanest))
        raise NothingFitsError(smallest_miss(leanest, priced, narrowed=asked is not None, remedies=remedies))
    stages = Balancing(architecture, cluster, job, cluster.chip.memory_bytes * (1 - reserve))
    balances = BALANCED in choices.stages
    if balances:
        progress("layers of each stage")
        found = stages.of_search(found)
    progress("runners-up")
    layout = simplest(architecture, cluster, job, found, choices, reserve)
    layout = as_run(stack_of(cluster), stages.of_layout(layout) if balances else layout)
    if budget:
        progress("tensors to keep")
        layout = _under_budget(
            architecture, cluster, job, budget, [layout, *(one.layout for one in found.best)], reserve
        )
    chosen = estimate(architecture, cluster, job, layout)
    found_plan = Plan(
        model=architecture, cluster=cluster, job=job, layout=layout, estimate=chosen,
        alternatives=tuple(_alternatives(architecture, cluster, job, found, layout, chosen)),
        rules=book_rules(architecture, cluster, job), search=_summary(found), versions=versions(),
        run=training_run(architecture, cluster, job, chosen, reliability),
        bound_s=bound_seconds(architecture, cluster, job, layout), policy=policy_of(cluster),
    )  # fmt: skip
    return with_elsewhere(found_plan, asked, progress) if elsewhere else found_plan


def with_elsewhere(found: Plan, asked: Choices | None = None, progress: Progress = silent) -> Plan:
    """A plan whose search also says what another stack could run with the choices that were asked for."""
    if found.search is None:
        return found
    return replace(found, search=replace(found.search, elsewhere=_elsewhere(found, asked or Choices(), progress)))


def chosen_with_elsewhere(
    many: Sequence[Planned], chosen: int | None, asked: Choices | None, progress: Progress
) -> tuple[Planned, ...]:
    """The same, but that the chosen one's plan also says what another stack could run."""
    found = list(many)
    if chosen is not None and (own := found[chosen].plan) is not None:
        found[chosen] = replace(found[chosen], plan=with_elsewhere(own, asked, progress))
    return tuple(found)


def _under_budget(
    architecture: Architecture, cluster: Cluster, job: Job, budget: str, layouts: Iterable[Layout], reserve: float
) -> Layout:
    """Of some layouts, each with the set of tensors that it keeps under a budget, the fastest that fits. Layouts that differ in
    what they recompute alone are one. Raises `NothingFitsError` where none fits."""
    capacity, problems = cluster.chip.memory_bytes * (1 - reserve), list[str]()
    fitting: list[tuple[float, Layout]] = []
    for layout in dict.fromkeys(replace(one, recompute=budget, recompute_layers=None) for one in layouts):
        try:
            own = within_budget(architecture, cluster, job, layout)
        except InputError as error:
            problems += error.problems
            continue
        priced = estimate(architecture, cluster, job, own)
        if priced.memory_bytes <= capacity:
            fitting.append((priced.step_time_s, own))
        else:
            problems.append(f"{own}: needs {format_bytes(priced.memory_bytes)} of {format_bytes(capacity)}")
    if not fitting:
        raise NothingFitsError(f"recompute: {budget}: none of the fastest layouts fits with it: {problems[0]}")
    return min(fitting, key=lambda one: one[0])[1]


def _offloaded(architecture: Architecture, cluster: Cluster, job: Job, layout: Layout) -> dict[str, Estimate]:
    """A layout with each kind of offload; none where it already has one, or where PCIe has no sourced rate."""
    if layout.offload != "none" or cluster.chip.pcie_bytes_per_s is None:
        return {}
    return {
        offload: estimate(architecture, cluster, job, replace(layout, offload=offload))
        for offload in OFFLOADS
        if offload != "none"
    }


def _elsewhere(plan: Plan, asked: Choices, progress: Progress) -> str | None:
    """The gain of the best layout that the stack does not support at the same rates; None where it is within `RESOLUTION`, and
    for a stack that is known only by its kind."""
    stack = stack_of(plan.cluster)
    if stack is None or not stack.known or asked.runnable:
        return None
    progress("what another stack could run")
    if asked.schedule == Choices().schedule and "schedule" not in asked.asked:
        asked = replace(asked, schedule=(NATURAL, *(name for name, one in SCHEDULES.items() if one.splits_backward)))
    found = search(
        plan.model, plan.cluster, plan.job, choices=asked, top=1, reserve=MEMORY_RESERVE, progress=progress
    ).best
    own_s = plan.estimate.step_time_s
    if not found or own_s <= found[0].step_time_s * (1.0 + RESOLUTION):
        return None
    lacks = "; ".join(lacking(stack, plan.model, replace(plan.job, loss=None), found[0].layout))
    gain = own_s / found[0].step_time_s - 1
    return f"another stack could run {found[0].layout}: {gain:.0%} faster at the rates of {stack.name} ({lacks})"


def _summary(found: SearchResult) -> SearchSummary:
    return SearchSummary(
        space=found.space, num_layouts=found.num_layouts, num_fitting=found.num_fitting,
        num_illegal_by_rule=found.num_illegal_by_rule, cpu_seconds=found.cpu_seconds,
    )  # fmt: skip


def _alternatives(
    architecture: Architecture, cluster: Cluster, job: Job, found: SearchResult, layout: Layout, best: Estimate
) -> Iterable[Alternative]:
    """The best of every other shape (tp, cp, pp), fastest first, then the layout that takes the least memory."""
    seen = {_shape(layout)}
    picked: list[Found] = []
    for other in sorted(found.by_factorisation, key=lambda row: row.step_time_s):
        if _shape(other.layout) not in seen and len(picked) < NUM_ALTERNATIVES - 1:
            seen.add(_shape(other.layout))
            picked.append(other)
    if found.pareto and found.pareto[0].layout not in (layout, *(row.layout for row in picked)):
        picked.append(found.pareto[0])
    for other in picked:
        run = as_run(stack_of(cluster), other.layout)
        priced = estimate(architecture, cluster, job, run)
        leanest = "the least memory; " if other.layout == found.pareto[0].layout else ""
        yield Alternative(layout=run, estimate=priced, reason=leanest + why_slower(priced, best))


def _shape(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.cp, layout.pp


def nearest_fitting(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, progress: Progress = silent
) -> Layout | None:
    """The fitting layout that changes the fewest fields of one that does not fit, the fastest of these; None if none fits.

    First its degrees stay, and recomputation (also of a part of the layers), micro-batch, ZeRO stage and sequence parallelism
    are free: what then fits is the smallest change of all. Otherwise the nearest among: other degrees with the same choices,
    the fastest of every factorisation, and the Pareto front of time and memory. Last, the same degrees with offload.
    """
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    chosen = ("zero_stage", "sequence_parallel", "micro_batch_seqs", "recompute")
    own = () if layout.schedule == natural_schedule(layout.pp, layout.num_virtual_stages) else (layout.schedule,)
    every = Choices(
        micro_batch_seqs=tuple(sorted({*Choices().micro_batch_seqs, layout.micro_batch_seqs})),
        offload=(layout.offload,),
        schedule=(NATURAL, *own),
    )
    stack = stack_of(cluster)
    if stack and not lacking(stack, architecture, job, layout):
        every = every.of_stack(stack, architecture, job, cluster.domain)
    parts = replace(every, recompute_layers=(None, *QUARTERS))
    same_degrees = parts.narrowed({**degrees, "num_virtual_stages": layout.num_virtual_stages}, {})
    same_choices = every.narrowed({name: getattr(layout, name) for name in chosen}, {})
    known = cluster.chip.pcie_bytes_per_s is not None
    offloaded = (replace(same_degrees, offload=OFFLOADS),) if known else ()
    for tries in ((same_degrees,), (same_choices, every), offloaded):
        fitting = [row for choices in tries for row in _fitting(architecture, cluster, job, choices, progress)]
        if fitting:
            return min(fitting, key=lambda row: (num_changes(layout, row.layout), row.step_time_s)).layout
    return None


def _fitting(
    architecture: Architecture, cluster: Cluster, job: Job, choices: Choices, progress: Progress
) -> Iterator[Found]:
    """Fitting layouts within the choices: the fastest, those of every factorisation, and the Pareto front."""
    try:
        found = search(architecture, cluster, job, choices=choices, top=NUM_NEAR, progress=progress)
    except NothingFitsError:
        return
    yield from (*found.best, *found.by_factorisation, *found.pareto)
