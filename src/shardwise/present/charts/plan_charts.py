"""Charts of plans and estimates: time and memory by term, comparisons, explanations, recompute policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.layout import Layout
from shardwise.model import POLICIES
from shardwise.present.charts.chart import LETTERS, Axis, Chart, Curve, Points, bar_chart, curve_chart
from shardwise.present.rendering.notebook import NotebookDisplay, NotebookTable
from shardwise.price import Pricing, Problem
from shardwise.search.recompute_budget import list_layer_recompute, recompute_layers
from shardwise.values import InputError, format_bytes, format_days, format_seconds, format_usd

if TYPE_CHECKING:
    from shardwise.price import Estimate
    from shardwise.search import Comparison, Explanation, LayoutMemory, MemoryComparison, Plan
    from shardwise.search.compare_clusters import Contender


Bars = Mapping[str, Mapping[str, float]]


def estimate_facts(estimate: Estimate) -> dict[str, str]:
    """The headline figures of an estimate, by name."""
    between = (
        " to ".join(map(format_seconds, estimate.interval90)) if estimate.interval90 else "none: the step is a bound"
    )
    fits = f"fits, {estimate.margin:.0%} free" if estimate.fits else f"DOES NOT FIT, {-estimate.margin:.0%} too much"
    return {
        "step": format_seconds(estimate.step_time_s), "90% prediction interval": between,
        "tokens/s per device": f"{estimate.tokens_per_s_per_device:,.0f}", "MFU": f"{estimate.mfu:.1%}",
        "bound by": estimate.bound,
        "memory": f"{format_bytes(estimate.memory_bytes)} of {format_bytes(estimate.memory_capacity_bytes)} ({fits})",
    }  # fmt: skip


def estimate_charts(about: str, estimates: Mapping[str, Estimate]) -> tuple[Chart, Chart]:
    """Seconds of a step and bytes of a device, by term, a bar for each labelled estimate. Raises `InputError` for none."""
    if not estimates:
        raise InputError("picture: found no estimate; one at least is required")
    time = {label: estimate.time for label, estimate in estimates.items()}
    memory = {label: estimate.memory for label, estimate in estimates.items()}
    return _time_and_memory(about, time, memory, max(one.memory_capacity_bytes for one in estimates.values()))


def _time_and_memory(about: str, time: Bars, memory: Bars, capacity: float) -> tuple[Chart, Chart]:
    return bar_chart("Time of a step", about, time, unit="s"), _memory_chart(
        "Memory of the fullest device", about, memory, capacity
    )


def _memory_chart(title: str, about: str, memory: Bars, capacity: float) -> Chart:
    return bar_chart(title, about, memory, limit=capacity, limit_label=f"capacity: {format_bytes(capacity)}")


def shown_estimate(estimate: Estimate) -> NotebookDisplay:
    """An estimate in a notebook."""
    kind = "a prediction" if estimate.interval90 else "a bound"
    return NotebookDisplay(
        title=f"Estimate, {kind}", tables=(NotebookTable.of(estimate_facts(estimate)),),
        charts=lambda: estimate_charts(kind, {"this layout": estimate}),
    )  # fmt: skip


MOST_BARS = 6  # the chosen one, and the nearest of the others


def shown_plan(plan: Plan) -> NotebookDisplay:
    """A plan in a notebook: the layout with its estimate, and the layouts that lost."""
    job = plan.job
    title = f"Plan of {plan.model.name} on {plan.cluster.name}"
    batch = f"{job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}, {job.precision}"
    facts = {"layout": str(plan.layout), "job": batch, **estimate_facts(plan.estimate)}
    if plan.run:
        facts["run"] = format_days(plan.run.days) + (
            f", {format_usd(plan.run.usd)}" if plan.run.usd is not None else ""
        )
    lost = tuple(
        (str(other.layout), format_seconds(other.estimate.step_time_s), other.reason) for other in plan.alternatives
    )
    tables = (
        NotebookTable.of(facts),
        *([NotebookTable(head=("other layouts", "step", "why not"), rows=lost)] if lost else []),
    )
    estimates = {f"chosen: {plan.layout}": plan.estimate}
    estimates |= {str(other.layout): other.estimate for other in plan.alternatives[: MOST_BARS - 1]}
    return NotebookDisplay(title=title, tables=tables, charts=lambda: estimate_charts(f"{title}, {batch}", estimates))


def shown_comparison(comparison: Comparison) -> NotebookDisplay:
    """Plans on several clusters in a notebook."""
    rows = tuple(map(_contender, comparison.contenders))
    table = NotebookTable(head=("cluster", "step", "MFU", "run", "cost", "layout"), rows=rows)
    planned = {one.cluster: one.plan.estimate for one in comparison.contenders if one.plan}
    chosen = "none" if comparison.chosen is None else comparison.contenders[comparison.chosen].cluster
    return NotebookDisplay(
        title=f"Chosen: {chosen}, {comparison.reason}", tables=(table,),
        charts=lambda: estimate_charts(f"chosen: {chosen}", planned)[:1],
    )  # fmt: skip


def _contender(one: Contender) -> tuple[str, ...]:
    if one.plan is None:
        return one.cluster, one.problem or "", "", "", "", ""
    estimate, run = one.plan.estimate, one.run
    days = format_days(run.days) if run else ""
    usd = format_usd(run.usd) if run and run.usd is not None else ""
    return one.cluster, format_seconds(estimate.step_time_s), f"{estimate.mfu:.1%}", days, usd, str(one.plan.layout)


def shown_explanation(found: Explanation) -> NotebookDisplay:
    """An explanation in a notebook: what decides, and the layout that it was compared with, if any."""
    fit, throughput = found.fit, found.throughput
    facts = {
        "layout": found.layout, "placement": found.placement, "fits": fit.because, "batch": found.batch.because,
        "step": format_seconds(throughput.step_time_s), "MFU": f"{throughput.mfu:.1%}", "bound by": throughput.bound,
        "against": f"{found.against.layout}: {found.against.verdict}" if found.against else "",
    }  # fmt: skip
    others = tuple((one.layout, format_seconds(one.step_time_s), one.reason) for one in found.runners_up)
    tables = (
        NotebookTable.of(facts),
        *([NotebookTable(head=("runners-up", "step", "why not"), rows=others)] if others else []),
    )
    time = {found.layout: {share.term: share.value for share in throughput.time}}
    memory = {found.layout: {share.term: share.value for share in fit.memory}}
    if found.against:
        time[found.against.layout] = dict(found.against.estimate.time)
        memory[found.against.layout] = dict(found.against.estimate.memory)
    about = f"{found.model} on {found.cluster}"
    return NotebookDisplay(
        title=f"Explanation: {about}", tables=tables,
        charts=lambda: _time_and_memory(about, time, memory, fit.memory_capacity_bytes),
    )  # fmt: skip


def shown_memory(found: LayoutMemory) -> NotebookDisplay:
    """Memory of the devices, in a notebook: a bar for each stage of the pipeline."""
    capacity = found.memory_capacity_bytes
    fits = f"fits, {found.margin:.0%} free" if found.fits else f"DOES NOT FIT, {-found.margin:.0%} too much"
    facts = {
        "layout": str(found.layout), "micro-batches": f"{found.num_micro_batches:,}",
        "fullest device": f"{format_bytes(found.memory_bytes)} of {format_bytes(capacity)} ({fits})",
    }  # fmt: skip
    return NotebookDisplay(
        title=f"Memory under {found.layout}", tables=(NotebookTable.of(facts),),
        charts=lambda: (_memory_chart("Memory of a device", str(found.layout), _stage_bars(found), capacity),),
    )  # fmt: skip


def _stage_bars(memory: LayoutMemory) -> Bars:
    """The bytes of a device of each stage, by term."""
    stages = memory.stages
    return (
        {f"stage {stage}": terms for stage, terms in enumerate(stages)}
        if len(stages) > 1
        else {"every device": stages[0]}
    )


def kept_chart(problem: Problem, layout: Layout) -> Chart:
    """Seconds of what a layer of each kind computes again over the bytes that it keeps, in one micro-batch on one device.

    Lines are the sets of which no other has fewer bytes and fewer seconds, each kernel by itself; points are policies and the
    layout's own, with kernels fused as they run.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**19, seq_len=4096)
    >>> layout = sw.Layout.parse("fsdp=8 recompute=keep:q,k,v,attended,lse")
    >>> chart = kept_chart(Problem(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job), layout)
    >>> [mark.label for mark in chart.panels[0].marks]
    ['block', 'the layout', 'none', 'selective', 'full']
    """
    problem = problem.with_defaults()

    def priced(policy: str) -> Pricing:
        return Pricing(problem, replace(layout, recompute=policy, recompute_layers=None))

    always = {one.layer: one.kept_bytes for one in list_layer_recompute(priced("full"))}
    lines = tuple(
        Curve(label=kind, points=tuple((always[kind] + one.num_bytes, one.seconds) for one in layer.savings))
        for kind, layer in recompute_layers(priced("full")).items()
    )
    most = max(list_layer_recompute(priced("full")), key=lambda one: one.num_layers).layer
    policies = {"the layout": layout.recompute, **{name: name for name in POLICIES if name != layout.recompute}}
    points = (
        Points(label=label, letter=letter, points=((one.kept_bytes, one.seconds),))
        for letter, (label, policy) in zip(LETTERS, policies.items(), strict=False)
        for one in list_layer_recompute(priced(policy))
        if one.layer == most
    )
    return curve_chart(
        title=f"What a layer of {problem.architecture.name} keeps and computes again",
        subtitle="Lines: the sets that no other beats, each kernel by itself; points: policies, with kernels fused as they run.",
        x=Axis(title="bytes that a layer keeps in one micro-batch", unit="B"),
        y=Axis(title="seconds that it computes again", unit="s"),
        marks=(*lines, *points),
    )  # fmt: skip


def memory_comparison_chart(comparison: MemoryComparison) -> Chart:
    """Return bars of the memory of several layouts, or of the stages of one, against the capacity of the chip."""
    layouts, chip = comparison.layouts, comparison.cluster.chip
    if len(layouts) == 1:
        (memory,) = layouts
        subtitle = f"Bytes of one device of each stage: {memory.layout}"
        bars = _stage_bars(memory)
    else:
        subtitle = "Bytes of one device, of the fullest stage where there are several."
        bars = {
            f"[{number}] {memory.layout}": memory.stages[memory.fullest_stage]
            for number, memory in enumerate(layouts, start=1)
        }
    title, limit = f"Memory of {comparison.model.name} on {comparison.cluster.name}", chip.memory_bytes
    return bar_chart(title, subtitle, bars, limit=limit, limit_label=f"{chip.name}: {format_bytes(limit)}")
