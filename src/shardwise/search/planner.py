"""Plan a job: search all layouts, choose the simplest that predictions cannot tell from the fastest, and keep the reasons.

Entry point: `make_plan`; `plan_layout` of `search/layout_plan.py` makes the plan of a given layout. The stages of the chosen
pipeline are balanced (`search/balance_stages.py`), and each of the runners-up comes with the reason why it lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.book_formulas.rules import book_rules
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.network.switches import Switched
from shardwise.layout.choices import BALANCED, DEGREE_AXES, Choices
from shardwise.layout.degrees import layout_degrees
from shardwise.layout.layout import OFFLOADS, Layout
from shardwise.layout.rules.legality import EVEN_BATCH
from shardwise.layout.rules.stack_abilities import layout_as_run, stack_of, unsupported_choices
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.recompute_policies import POLICIES, is_byte_budget
from shardwise.pipeline.registry import NATURAL, SCHEDULES
from shardwise.price.estimate import Estimate, estimate
from shardwise.price.problem import with_problem_defaults
from shardwise.price.reliability import Reliability
from shardwise.price.roofline import issue_policy
from shardwise.price.training_run import training_run
from shardwise.search.balance_stages import StageBalancer
from shardwise.search.layout_plan import bound_seconds
from shardwise.search.plan import Alternative, Plan, SearchSummary, software_versions
from shardwise.search.recompute_budget import fit_recompute_budget
from shardwise.search.vectorised.search_layouts import PricedLayout, SearchResult, search_layouts
from shardwise.search.verdicts import (
    MEMORY_RESERVE,
    RESOLUTION,
    describe_excess,
    describe_leaner_loss,
    describe_offload,
    explain_slowdown,
    price_leaner_losses,
)
from shardwise.values.errors import InputError, NothingFitsError
from shardwise.values.progress import Progress, ignore_progress
from shardwise.values.units import format_bytes

NUM_ALTERNATIVES = 6


def make_plan(
    architecture: Architecture, cluster: Cluster, job: Job, *, choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = ignore_progress, elsewhere: bool = True,
) -> Plan:  # fmt: skip
    """The best layout, the runners-up with the reason each lost, and the books' rules.

    The best is the simplest of the fastest that fit (`search.planner`), by the prediction for a typical stack unless the
    cluster or the job says otherwise (`price.problem.with_problem_defaults`). Layouts that leave a tenth of the memory free are
    preferred; without one, any that fits will do. Raises `NothingFitsError` with the smallest excess. `reliability` has the
    failure rate, restarts and power for the whole run. `elsewhere`: whether what another stack could run is searched too
    (`add_other_stack_gain`), which takes about half of the time; of many plans only the chosen one needs it.
    """
    architecture.require_positions(job.seq_len)
    (cluster, job), own_job = with_problem_defaults(cluster, job), job
    asked, choices = (
        choices,
        (choices or Choices()).limit_to_stack(stack_of(cluster), architecture, own_job, cluster.scale_up_size),
    )
    budget = next((policy for policy in choices.recompute if is_byte_budget(policy)), None)
    if budget:
        choices = replace(choices, recompute=tuple(POLICIES))
    reserve = MEMORY_RESERVE
    found = search_layouts(architecture, cluster, job, choices=choices, reserve=reserve, progress=progress)
    if not found.best:
        reserve = 0.0
        found = search_layouts(architecture, cluster, job, choices=choices, progress=progress)
    if not found.best:
        leanest = found.least_memory.layout
        priced = estimate(architecture, cluster, job, leanest)
        remedies = describe_leaner_loss(priced, price_leaner_losses(architecture, cluster, job, leanest))
        remedies += describe_offload(_price_offloads(architecture, cluster, job, leanest))
        raise NothingFitsError(describe_excess(leanest, priced, narrowed=asked is not None, remedies=remedies))
    stages = StageBalancer(architecture, cluster, job, cluster.chip.memory_bytes * (1 - reserve))
    balances = BALANCED in choices.stages
    if balances:
        progress("layers of each stage")
        found = stages.balance_result(found)
    progress("runners-up")
    layout = choose_simplest(architecture, cluster, job, found, choices, reserve)
    layout = layout_as_run(stack_of(cluster), stages.balance_layout(layout) if balances else layout)
    if budget:
        progress("tensors to keep")
        layout = _fit_activation_budget(
            architecture, cluster, job, budget, [layout, *(one.layout for one in found.best)], reserve
        )
    chosen = estimate(architecture, cluster, job, layout)
    found_plan = Plan(
        model=architecture, cluster=cluster, job=job, layout=layout, estimate=chosen,
        alternatives=tuple(_pick_alternatives(architecture, cluster, job, found, layout, chosen)),
        rules=book_rules(architecture, cluster, job), search=_summarize_search(found), versions=software_versions(),
        run=training_run(architecture, cluster, job, chosen, reliability),
        bound_s=bound_seconds(architecture, cluster, job, layout), policy=issue_policy(cluster),
    )  # fmt: skip
    return add_other_stack_gain(found_plan, asked, progress) if elsewhere else found_plan


def add_other_stack_gain(found: Plan, asked: Choices | None = None, progress: Progress = ignore_progress) -> Plan:
    """A plan whose search also says what another stack could run with the choices that were asked for."""
    if found.search is None:
        return found
    return replace(
        found, search=replace(found.search, elsewhere=_other_stack_gain(found, asked or Choices(), progress))
    )


def _fit_activation_budget(
    architecture: Architecture, cluster: Cluster, job: Job, budget: str, layouts: Iterable[Layout], reserve: float
) -> Layout:
    """Of some layouts, each with the set of tensors that it keeps under a budget, the fastest that fits. Layouts that differ in
    what they recompute alone are one. Raises `NothingFitsError` where none fits."""
    capacity, problems = cluster.chip.memory_bytes * (1 - reserve), list[str]()
    fitting: list[tuple[float, Layout]] = []
    for layout in dict.fromkeys(replace(one, recompute=budget, recompute_layers=None) for one in layouts):
        try:
            own = fit_recompute_budget(architecture, cluster, job, layout)
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


def _price_offloads(architecture: Architecture, cluster: Cluster, job: Job, layout: Layout) -> dict[str, Estimate]:
    """A layout with each kind of offload; none where it already has one, or where PCIe has no sourced rate."""
    if layout.offload != "none" or cluster.chip.pcie_bytes_per_s is None:
        return {}
    return {
        offload: estimate(architecture, cluster, job, replace(layout, offload=offload))
        for offload in OFFLOADS
        if offload != "none"
    }


def _other_stack_gain(plan: Plan, asked: Choices, progress: Progress) -> str | None:
    """The gain of the best layout that the stack does not support at the same rates; None where it is within `RESOLUTION`, and
    for a stack that is known only by its kind."""
    stack = stack_of(plan.cluster)
    if stack is None or not stack.known or asked.runnable:
        return None
    progress("what another stack could run")
    if asked.schedule == Choices().schedule and "schedule" not in asked.asked:
        asked = replace(asked, schedule=(NATURAL, *(name for name, one in SCHEDULES.items() if one.splits_backward)))
    found = search_layouts(
        plan.model, plan.cluster, plan.job, choices=asked, top=1, reserve=MEMORY_RESERVE, progress=progress
    ).best
    own_s = plan.estimate.step_time_s
    if not found or own_s <= found[0].step_time_s * (1.0 + RESOLUTION):
        return None
    lacks = "; ".join(unsupported_choices(stack, plan.model, replace(plan.job, loss=None), found[0].layout))
    gain = own_s / found[0].step_time_s - 1
    return f"another stack could run {found[0].layout}: {gain:.0%} faster at the rates of {stack.name} ({lacks})"


def _summarize_search(found: SearchResult) -> SearchSummary:
    return SearchSummary(
        space=found.space, num_layouts=found.num_layouts, num_fitting=found.num_fitting,
        num_illegal_by_rule=found.num_illegal_by_rule, cpu_seconds=found.cpu_seconds,
    )  # fmt: skip


def _pick_alternatives(
    architecture: Architecture, cluster: Cluster, job: Job, found: SearchResult, layout: Layout, best: Estimate
) -> Iterable[Alternative]:
    """The best of every other shape (tp, cp, pp), fastest first, then the layout that takes the least memory."""
    seen = {_model_axes(layout)}
    picked: list[PricedLayout] = []
    for other in sorted(found.by_factorisation, key=lambda row: row.step_time_s):
        if _model_axes(other.layout) not in seen and len(picked) < NUM_ALTERNATIVES - 1:
            seen.add(_model_axes(other.layout))
            picked.append(other)
    if found.pareto and found.pareto[0].layout not in (layout, *(row.layout for row in picked)):
        picked.append(found.pareto[0])
    for other in picked:
        run = layout_as_run(stack_of(cluster), other.layout)
        priced = estimate(architecture, cluster, job, run)
        leanest = "the least memory; " if other.layout == found.pareto[0].layout else ""
        yield Alternative(layout=run, estimate=priced, reason=leanest + explain_slowdown(priced, best))


def _model_axes(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.cp, layout.pp


EQUAL_BOUNDS = 1e-5  # relative; bounds that differ by less differ only in the rounding up of shards
KEEP_ALL_LAYOUTS = 10_000  # more than the layouts of one factorisation, all its placements included


def choose_simplest(
    architecture: Architecture, cluster: Cluster, job: Job, found: SearchResult, choices: Choices | None, reserve: float
) -> Layout:
    """The simplest fitting layout whose predicted step is within `RESOLUTION` of the fastest; of bounds, which hold exactly under
    what they assume, the simplest of those that are equal.

    First degrees: batches that come out even, then tp within a node, then replicas of fewer devices (pp=128 with cp=8 is two
    axes, and is not used in practice), then fewer axes that split the model or the sequence, then stages as they come out even,
    then smaller cp, tp and pp, then one data-parallel axis rather than two; of equals the faster. Then, of the layouts of these
    degrees, an even batch and the fewest virtual stages.
    """
    within = found.best[0].step_time_s * (1.0 + (RESOLUTION if cluster.calibration else EQUAL_BOUNDS))

    def near(rows: Iterable[PricedLayout]) -> Iterator[PricedLayout]:
        return (row for row in rows if row.step_time_s <= within)

    rows = list(near((*found.best, *found.even, *found.by_factorisation)))
    degrees = min(rows, key=lambda row: (*_complexity(cluster, job, row.layout), row.step_time_s)).layout
    same = [row for row in rows if _all_degrees(row.layout) == _all_degrees(degrees)]
    same += near(_search_same_degrees(architecture, cluster, job, degrees, choices, reserve))
    return min(
        same, key=lambda row: (not splits_batch_evenly(job, row.layout), row.layout.num_virtual_stages, row.step_time_s)
    ).layout


def _search_same_degrees(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, choices: Choices | None, reserve: float
) -> Iterator[PricedLayout]:
    """The fitting layouts of the same degrees."""
    pins = {axis: getattr(layout, axis) for axis in DEGREE_AXES}
    if layout.expert_tp != layout.tp:  # whole experts are a mode of the search, by the degree of ep without them
        pins.pop("ep")
    narrowed = replace(choices or Choices(), pins={}).with_pins(pins, {})
    yield from search_layouts(architecture, cluster, job, choices=narrowed, top=KEEP_ALL_LAYOUTS, reserve=reserve).best


def splits_batch_evenly(job: Job, layout: Layout) -> bool:
    """Whether no replica is idle and every micro-batch is full."""
    return bool(EVEN_BATCH.legal(None, job, 0, layout_degrees(layout)))  # type: ignore[arg-type]


def _complexity(cluster: Cluster, job: Job, layout: Layout) -> tuple[int, ...]:
    """What makes degrees simpler, the most important first; less is simpler."""
    replica = layout.tp * layout.cp * layout.pp
    splitting = sum(getattr(layout, axis) > 1 for axis in ("tp", "cp", "pp", "ep"))
    twice = layout.dp > 1 and layout.fsdp > 1
    given = layout.layers_per_stage is not None
    return (
        not splits_batch_evenly(job, layout),
        _tp_exceeds_node(cluster, layout),
        replica,
        splitting,
        given,
        layout.cp,
        layout.tp,
        layout.pp,
        twice,
    )


def _tp_exceeds_node(cluster: Cluster, layout: Layout) -> bool:
    """Whether tensor parallelism goes beyond the innermost switch. No published run does that; Narayanan et al. 2021 (arXiv
    2104.04473), takeaway 1: tensor parallelism up to the devices of a node, then a pipeline."""
    topology = cluster.topology
    return isinstance(topology, Switched) and layout.tp > (topology.tiers[0].size or layout.tp)


def _all_degrees(layout: Layout) -> tuple[int, ...]:
    return (*(getattr(layout, axis) for axis in DEGREE_AXES), layout.expert_tp)
