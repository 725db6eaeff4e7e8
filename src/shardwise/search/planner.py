"""Plan a job: search all layouts, choose the simplest that predictions cannot tell from the fastest, and keep the reasons.

Entry points: `make_plan`, and `plan_inputs`, where a batch that the user left out is the usual one of the model or a multiple
that fills a large cluster; `plan.plan_layout` makes the plan of a given layout. The stages of the chosen pipeline are
balanced (`balance_stages`), and each runner-up comes with the reason why it lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.hardware import Cluster, Switched
from shardwise.layout import (
    DEGREE_AXES,
    OFFLOADS,
    Choices,
    Layout,
    job_for_engine,
    layout_as_run,
    layout_degrees,
    stack_of,
    unsupported_choices,
)
from shardwise.layout.rules.model_and_cluster_rules import has_even_batch
from shardwise.model import POLICIES, Job, is_byte_budget
from shardwise.pipeline import NATURAL, SCHEDULES
from shardwise.price import Estimate, Problem, ProblemInputs, Reliability
from shardwise.price.estimate import estimate
from shardwise.search.balance_stages import StageBalancer
from shardwise.search.nearest_to_pins import naming_nearest
from shardwise.search.plan import Alternative, Plan, SearchSummary, assemble_plan
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
from shardwise.values import InputError, NothingFitsError, Progress, ceil_div, format_bytes, ignore_progress

NUM_ALTERNATIVES = 6


def make_plan(
    problem: Problem, *, choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = ignore_progress, elsewhere: bool = True,
) -> Plan:  # fmt: skip
    """Search for the best layout and return its plan: the runners-up with reasons, the books' rules, and the whole run.

    The best is the simplest of the fastest that fit (`choose_simplest`), predicted for a typical stack unless the cluster or
    the job says otherwise (`price.problem.with_problem_defaults`). Layouts that fit are searched; where there is none, those
    whose memory is tight (`price.device_memory`). Raises `NothingFitsError` with the smallest excess. `reliability` sets failure
    rate, restarts and power of the run. `elsewhere`: search also what another stack could run (`add_other_stack_gain`), which
    takes about half of the time; of many plans only the chosen one needs it."""
    problem.architecture.require_positions(problem.job.seq_len)
    problem, requested_job = problem.with_defaults(), problem.job
    # The stack limits the job as requested, since a default is not a choice that it could lack. The choices as requested are
    # kept for the search of another stack.
    requested = choices
    choices = (choices or Choices()).limit_to_stack(
        stack_of(problem.cluster), problem.architecture, requested_job, problem.cluster.scale_up_size
    )
    budget = next((policy for policy in choices.recompute if is_byte_budget(policy)), None)
    if budget:
        choices = replace(choices, recompute=tuple(POLICIES))
    reserve = MEMORY_RESERVE
    result = search_layouts(problem, choices=choices, reserve=reserve, progress=progress)
    if not result.best:
        reserve = 0.0
        result = search_layouts(problem, choices=choices, progress=progress)
    if not result.best:
        least_memory = result.least_memory.layout
        priced = estimate(problem, least_memory)
        remedies = describe_leaner_loss(priced, price_leaner_losses(problem, least_memory))
        remedies += describe_offload(_price_offloads(problem, least_memory)) or _unpriced_offload(problem, least_memory)
        raise NothingFitsError(describe_excess(least_memory, priced, narrowed=requested is not None, remedies=remedies))
    balancer = StageBalancer(
        problem.architecture,
        problem.cluster,
        problem.job,
        problem.cluster.chip.capacity_bytes * (1 - reserve),
        choices.stages[0],
    )
    progress("layers of each stage")
    result = balancer.balance_result(result)
    progress("runners-up")
    layout = choose_simplest(problem, result, choices, reserve)
    layout = layout_as_run(stack_of(problem.cluster), balancer.balance_layout(layout))
    if budget:
        progress("tensors to keep")
        layout = _fit_activation_budget(problem, budget, [layout, *(row.layout for row in result.best)], reserve)
    chosen = estimate(problem, layout)
    plan = replace(
        assemble_plan(problem, layout, chosen, reliability),
        alternatives=tuple(_pick_alternatives(problem, result, layout, chosen)),
        search=SearchSummary(
            space=result.space, num_layouts=result.num_layouts, num_fitting=result.num_fitting,
            num_illegal_by_rule=result.num_illegal_by_rule, cpu_seconds=result.cpu_seconds,
        ),
    )  # fmt: skip
    return add_other_stack_gain(plan, requested, progress) if elsewhere else plan


def add_other_stack_gain(plan: Plan, choices: Choices | None = None, progress: Progress = ignore_progress) -> Plan:
    """Return the plan with the gain of another stack, under the requested choices, in its search summary."""
    if plan.search is None:
        return plan
    return replace(plan, search=replace(plan.search, elsewhere=_other_stack_gain(plan, choices or Choices(), progress)))


def _fit_activation_budget(problem: Problem, budget: str, layouts: Iterable[Layout], reserve: float) -> Layout:
    """Return the fastest layout that fits with the tensors its activation budget keeps.

    Layouts that differ only in what they recompute count once. Raises `NothingFitsError` if none fits."""
    capacity, problems = problem.cluster.chip.capacity_bytes * (1 - reserve), list[str]()
    fitting: list[tuple[float, Layout]] = []
    tried = dict.fromkeys(replace(candidate, recompute=budget, recompute_layers=None) for candidate in layouts)
    for layout in tried:
        try:
            fitted = fit_recompute_budget(problem, layout)
        except InputError as error:
            problems += error.problems
            continue
        priced = estimate(problem, fitted)
        if priced.memory_bytes <= capacity:
            fitting.append((priced.step_time_s, fitted))
        else:
            problems.append(f"{fitted}: needs {format_bytes(priced.memory_bytes)} of {format_bytes(capacity)}")
    if not fitting:
        raise NothingFitsError(
            f"recompute: {budget}: none of the {len(tried)} fastest layouts fits with it, others were not tried: {problems[0]}"
        )
    return min(fitting, key=lambda pair: pair[0])[1]


def _unpriced_offload(problem: Problem, layout: Layout) -> str:
    """Return that it is not known whether offload helps; "" where the chip's PCIe has a rate, or the layout offloads already."""
    chip = problem.cluster.chip
    if layout.offload != "none" or chip.pcie_bytes_per_s is not None:
        return ""
    return f"whether offload to the host helps is not known (no sourced pcie_bytes_per_s of {chip.name}); "


def _price_offloads(problem: Problem, layout: Layout) -> dict[str, Estimate]:
    """Price a layout with each kind of offload; empty if it already has one, or if PCIe has no sourced rate."""
    if layout.offload != "none" or problem.cluster.chip.pcie_bytes_per_s is None:
        return {}
    return {offload: estimate(problem, replace(layout, offload=offload)) for offload in OFFLOADS if offload != "none"}


def _other_stack_gain(plan: Plan, choices: Choices, progress: Progress) -> str | None:
    """Describe the gain of the best layout that the stack does not support, at the same rates.

    None if the gain is within `RESOLUTION`, and for a stack that is known only by its kind."""
    stack = stack_of(plan.cluster)
    if stack is None or not stack.is_known or choices.runnable:
        return None
    progress("what another stack could run")
    if choices.schedule == Choices().schedule and "schedule" not in choices.asked:
        choices = replace(
            choices, schedule=(NATURAL, *(name for name, schedule in SCHEDULES.items() if schedule.splits_backward))
        )
    fastest = search_layouts(plan.problem, choices=choices, top=1, reserve=MEMORY_RESERVE, progress=progress).best
    plan_s = plan.estimate.step_time_s
    if not fastest or plan_s <= fastest[0].step_time_s * (1.0 + RESOLUTION):
        return None
    lacking = "; ".join(unsupported_choices(stack, plan.model, replace(plan.job, loss=None), fastest[0].layout))
    gain = plan_s / fastest[0].step_time_s - 1
    return f"another stack could run {fastest[0].layout}: {gain:.0%} faster at the rates of {stack.name} ({lacking})"


def _pick_alternatives(problem: Problem, result: SearchResult, layout: Layout, best: Estimate) -> Iterable[Alternative]:
    """Yield the best of every other shape (tp, cp, pp), fastest first, then the layout with the least memory."""
    picked_axes = {_model_axes(layout)}
    picked: list[PricedLayout] = []
    for candidate in sorted(result.by_factorisation, key=lambda row: row.step_time_s):
        if _model_axes(candidate.layout) not in picked_axes and len(picked) < NUM_ALTERNATIVES - 1:
            picked_axes.add(_model_axes(candidate.layout))
            picked.append(candidate)
    if result.pareto and result.pareto[0].layout not in (layout, *(row.layout for row in picked)):
        picked.append(result.pareto[0])
    for candidate in picked:
        layout_run = layout_as_run(stack_of(problem.cluster), candidate.layout)
        priced = estimate(problem, layout_run)
        prefix = "the least memory; " if candidate.layout == result.pareto[0].layout else ""
        yield Alternative(layout=layout_run, estimate=priced, reason=prefix + explain_slowdown(priced, best))


def _model_axes(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.cp, layout.pp


EQUAL_BOUNDS = 1e-5  # relative; bounds that differ by less differ only in the rounding up of shards
KEEP_ALL_LAYOUTS = 10_000  # more than the layouts of one factorisation, all its placements included


def choose_simplest(
    problem: Problem, result: SearchResult, choices: Choices | None, reserve: float
) -> Layout:  # fmt: skip
    """Return the simplest fitting layout within `RESOLUTION` of the fastest; of bounds, which are exact, the simplest of
    equals.

    First degrees (`_complexity`), of equally simple ones the faster. Then, of the layouts with these degrees, a batch that
    splits evenly and the fewest virtual stages."""
    limit_s = result.best[0].step_time_s * (1.0 + (RESOLUTION if problem.cluster.calibration else EQUAL_BOUNDS))

    def near_fastest(rows: Iterable[PricedLayout]) -> Iterator[PricedLayout]:
        return (row for row in rows if row.step_time_s <= limit_s)

    rows = list(near_fastest((*result.best, *result.even, *result.by_factorisation)))
    degrees = min(
        rows, key=lambda row: (*_complexity(problem.cluster, problem.job, row.layout), row.step_time_s)
    ).layout
    same_degrees = [row for row in rows if _all_degrees(row.layout) == _all_degrees(degrees)]
    same_degrees += near_fastest(_search_same_degrees(problem, degrees, choices, reserve))
    return min(
        same_degrees,
        key=lambda row: (
            not splits_batch_evenly(problem.job, row.layout),
            row.layout.num_virtual_stages,
            row.step_time_s,
        ),
    ).layout


def _search_same_degrees(
    problem: Problem, layout: Layout, choices: Choices | None, reserve: float
) -> Iterator[PricedLayout]:
    """Yield the fitting layouts of the same degrees."""
    pins = {axis: getattr(layout, axis) for axis in DEGREE_AXES}
    if layout.expert_tp != layout.tp:  # whole experts are a mode of the search, by the degree of ep without them
        pins.pop("ep")
    narrowed = replace(choices or Choices(), pins={}).with_pins(pins, {})
    yield from search_layouts(problem, choices=narrowed, top=KEEP_ALL_LAYOUTS, reserve=reserve).best


def splits_batch_evenly(job: Job, layout: Layout) -> bool:
    """Return True if no replica is idle and every micro-batch is full."""
    return bool(has_even_batch(job, layout_degrees(layout)))


def _complexity(cluster: Cluster, job: Job, layout: Layout) -> tuple[int, ...]:
    """Sort key of a layout's degrees, simplest first.

    In order: batches that split evenly, tp within a node, replicas of fewer devices (pp=128 with cp=8 is two axes, and is not
    used in practice), fewer axes that split the model or the sequence, natural layers per stage, smaller cp, tp and pp, one
    data-parallel axis rather than two."""
    devices_per_replica = layout.tp * layout.cp * layout.pp
    num_splitting_axes = sum(getattr(layout, axis) > 1 for axis in ("tp", "cp", "pp", "ep"))
    two_data_axes = layout.dp > 1 and layout.fsdp > 1
    explicit_stages = layout.layers_per_stage is not None
    return (
        not splits_batch_evenly(job, layout), _tp_exceeds_node(cluster, layout), devices_per_replica, num_splitting_axes,
        explicit_stages, layout.cp, layout.tp, layout.pp, two_data_axes,
    )  # fmt: skip


def _tp_exceeds_node(cluster: Cluster, layout: Layout) -> bool:
    """True if tensor parallelism goes beyond the innermost switch, which no published run does.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), takeaway 1: tensor parallelism up to the devices of a node, then a
    pipeline."""
    topology = cluster.topology
    return isinstance(topology, Switched) and layout.tp > (topology.tiers[0].size or layout.tp)


def _all_degrees(layout: Layout) -> tuple[int, ...]:
    return (*(getattr(layout, axis) for axis in DEGREE_AXES), layout.expert_tp)


def plan_inputs(
    inputs: ProblemInputs, *, choices: Choices | None = None, runnable: bool = False, reliability: Reliability | None = None,
    progress: Progress = ignore_progress,
) -> Plan:  # fmt: skip
    """Search for the best layout on the first cluster (`make_plan`); `defaults` of the plan names what was left out.

    A batch that was left out is the usual one of the model, or a multiple with a sequence for every replica of the layout.
    `runnable`: with the loss of the engine of `train`. Raises `NothingFitsError` if no layout fits.
    """
    problem = replace(inputs.problem, job=job_for_engine(inputs.job)) if runnable else inputs.problem
    reliability = reliability or inputs.reliability
    with naming_nearest(problem, choices):
        if "global_batch_tokens" in inputs.defaults:
            plan = _plan_usual_batch(problem, choices, reliability, progress)
            plan = add_other_stack_gain(plan, choices, progress)
        else:
            plan = make_plan(problem, choices=choices, reliability=reliability, progress=progress)
    return replace(plan, defaults=inputs.default_names)


def job_for_clusters(
    inputs: ProblemInputs,
    *,
    choices: Choices | None = None,
    runnable: bool = False,
    progress: Progress = ignore_progress,
) -> Job:
    """Return the job of plans on several clusters: a batch that was left out has a sequence for every replica on the largest."""
    job = job_for_engine(inputs.job) if runnable else inputs.job
    if "global_batch_tokens" not in inputs.defaults:
        return job
    largest = max(inputs.clusters, key=lambda cluster: cluster.num_devices)
    try:
        plan = _plan_usual_batch(Problem(inputs.architecture, largest, job), choices, None, progress)
    except NothingFitsError:
        return job
    return replace(job, global_batch_tokens=plan.job.global_batch_tokens)


def _plan_usual_batch(
    problem: Problem, choices: Choices | None, reliability: Reliability | None, progress: Progress
) -> Plan:
    """Plan with the smallest multiple of the job's batch that has a sequence for every replica of the chosen layout.

    If nothing fits, the batch is doubled up to a sequence for every device: more of them make no other layout legal.
    """
    usual, job, first_error = problem.job, problem.job, None
    while True:
        try:
            plan = make_plan(
                replace(problem, job=job), choices=choices, reliability=reliability, progress=progress, elsewhere=False
            )
        except NothingFitsError as error:
            first_error = first_error or error
            if job.num_seqs >= problem.cluster.num_devices:
                raise first_error from None
            multiple = 2 * job.num_seqs // usual.num_seqs
        else:
            multiple = ceil_div(plan.layout.num_replicas, usual.num_seqs)
            if multiple * usual.num_seqs <= job.num_seqs:
                return plan
        job = replace(usual, global_batch_tokens=multiple * usual.global_batch_tokens)
