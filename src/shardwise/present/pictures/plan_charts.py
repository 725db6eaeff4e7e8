"""Plans, memory, comparisons and explanations as tables and bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.present.draw.bars import Bar, BarChart
from shardwise.present.draw.notebook import Shown, Table
from shardwise.present.pictures.estimate_charts import estimate_charts, estimate_facts
from shardwise.values import format_bytes, format_days, format_seconds, format_usd

if TYPE_CHECKING:
    from shardwise.search import Comparison, Explanation, LayoutMemory, Plan
    from shardwise.search.compare_clusters import Contender

MOST_BARS = 6  # the chosen one, and the nearest of the others


def shown_plan(plan: Plan) -> Shown:
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
    tables = (Table.of(facts), *([Table(head=("other layouts", "step", "why not"), rows=lost)] if lost else []))
    estimates = {f"chosen: {plan.layout}": plan.estimate}
    estimates |= {str(other.layout): other.estimate for other in plan.alternatives[: MOST_BARS - 1]}
    return Shown(title=title, tables=tables, charts=lambda: estimate_charts(f"{title}, {batch}", estimates))


def shown_comparison(comparison: Comparison) -> Shown:
    """Plans on several clusters in a notebook."""
    rows = tuple(map(_contender, comparison.contenders))
    table = Table(head=("cluster", "step", "MFU", "run", "cost", "layout"), rows=rows)
    planned = {one.cluster: one.plan.estimate for one in comparison.contenders if one.plan}
    chosen = "none" if comparison.chosen is None else comparison.contenders[comparison.chosen].cluster
    return Shown(
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


def shown_explanation(found: Explanation) -> Shown:
    """An explanation in a notebook: what decides, and the layout that it was compared with, if any."""
    fit, throughput = found.fit, found.throughput
    facts = {
        "layout": found.layout, "placement": found.placement, "fits": fit.because, "batch": found.batch.because,
        "step": format_seconds(throughput.step_time_s), "MFU": f"{throughput.mfu:.1%}", "bound by": throughput.bound,
        "against": f"{found.against.layout}: {found.against.verdict}" if found.against else "",
    }  # fmt: skip
    others = tuple((one.layout, format_seconds(one.step_time_s), one.reason) for one in found.runners_up)
    tables = (Table.of(facts), *([Table(head=("runners-up", "step", "why not"), rows=others)] if others else []))
    time = {found.layout: {share.term: share.value for share in throughput.time}}
    memory = {found.layout: {share.term: share.value for share in fit.memory}}
    if found.against:
        time[found.against.layout] = dict(found.against.estimate.time)
        memory[found.against.layout] = dict(found.against.estimate.memory)
    about = f"{found.model} on {found.cluster}"
    bars = [tuple(Bar(label=label, parts=parts) for label, parts in each.items()) for each in (time, memory)]
    capacity = fit.memory_capacity_bytes
    charts = (
        BarChart(title="Time of a step", subtitle=about, bars=bars[0], unit="s"),
        BarChart(
            title="Memory of the fullest device", subtitle=about, bars=bars[1],
            limit=capacity, limit_label=f"capacity: {format_bytes(capacity)}",
        ),
    )  # fmt: skip
    return Shown(title=f"Explanation: {about}", tables=tables, charts=lambda: charts)


def shown_memory(found: LayoutMemory) -> Shown:
    """Memory of the devices, in a notebook: a bar for each stage of the pipeline."""
    capacity = found.memory_capacity_bytes
    fits = f"fits, {found.margin:.0%} free" if found.fits else f"DOES NOT FIT, {-found.margin:.0%} too much"
    facts = {
        "layout": str(found.layout), "micro-batches": f"{found.num_micro_batches:,}",
        "fullest device": f"{format_bytes(found.memory_bytes)} of {format_bytes(capacity)} ({fits})",
    }  # fmt: skip
    names = [f"stage {stage}" for stage in range(len(found.stages))] if len(found.stages) > 1 else ["every device"]
    chart = BarChart(
        title="Memory of a device", subtitle=str(found.layout), limit=capacity, limit_label=f"capacity: {format_bytes(capacity)}",
        bars=tuple(Bar(label=name, parts=stage) for name, stage in zip(names, found.stages, strict=True)),
    )  # fmt: skip
    return Shown(title=f"Memory under {found.layout}", tables=(Table.of(facts),), charts=lambda: (chart,))
