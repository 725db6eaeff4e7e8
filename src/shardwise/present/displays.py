"""What notebooks show of each type of value: its tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.measure import Reconciliation
from shardwise.pipeline import Timeline
from shardwise.present.charts.measurement_charts import reconciliation_charts
from shardwise.present.charts.plan_charts import estimate_charts, memory_chart, stage_bars, time_and_memory_charts
from shardwise.present.charts.step_charts import step_chart, timeline_chart, title_of
from shardwise.present.charts.sweep_charts import absent, search_chart, sweep_chart, what_is_planned
from shardwise.present.rendering.notebook import NotebookDisplay, NotebookTable
from shardwise.present.reports.wording import interval_remark
from shardwise.price import Estimate, Run, Simulation
from shardwise.price.memory_verdict import describe_margin
from shardwise.search import Comparison, Explanation, LayoutMemory, LossSearch, Plan, SweepPoint, Swept
from shardwise.search.compare_clusters import Contender
from shardwise.search.loss_time import LossPoint
from shardwise.search.sweep_values import format_value
from shardwise.values import (
    Displayable,
    format_binary,
    format_bytes,
    format_days,
    format_percent,
    format_seconds,
    format_usd,
)


def estimate_facts(estimate: Estimate) -> dict[str, str]:
    """The headline figures of an estimate, by name."""
    between = (
        " to ".join(map(format_seconds, estimate.interval90)) if estimate.interval90 else "none: the step is a bound"
    )
    fits = describe_margin(estimate.margin, estimate.verdict)
    return {
        "step": format_seconds(estimate.step_time_s), "90% prediction interval": between,
        "tokens/s per device": f"{estimate.tokens_per_s_per_device:,.0f}", "MFU": f"{estimate.mfu:.1%}",
        "bound by": estimate.bound,
        "memory": f"{format_bytes(estimate.memory_bytes)} of {format_bytes(estimate.memory_capacity_bytes)} ({fits})",
    }  # fmt: skip


def shown_estimate(estimate: Estimate) -> NotebookDisplay:
    """An estimate in a notebook."""
    kind = "a prediction" if estimate.interval90 else "a bound"
    return NotebookDisplay(
        title=f"Estimate, {kind}", tables=(NotebookTable.of(estimate_facts(estimate)),),
        charts=lambda: estimate_charts(kind, {"this layout": estimate}),
    )  # fmt: skip


def _run_days(run: Run) -> str:
    return format_days(run.days) + interval_remark(run.days_interval90, format_days)


def _run_usd(run: Run) -> str:
    return "" if run.usd is None else format_usd(run.usd) + interval_remark(run.usd_interval90, format_usd)


MOST_BARS = 6  # the chosen one, and the nearest of the others


def shown_plan(plan: Plan) -> NotebookDisplay:
    """A plan in a notebook: the layout with its estimate, and the layouts that lost."""
    job = plan.job
    title = f"Plan of {plan.model.name} on {plan.cluster.name}"
    batch = f"{job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}, {job.precision}"
    facts = {"layout": str(plan.layout), "job": batch, **estimate_facts(plan.estimate)}
    if plan.run:
        facts["run"] = ", ".join(filter(None, (_run_days(plan.run), _run_usd(plan.run))))
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
    rows = tuple(map(_contender_row, comparison.contenders))
    table = NotebookTable(head=("cluster", "step", "MFU", "run", "cost", "layout"), rows=rows)
    planned = {one.cluster: one.plan.estimate for one in comparison.contenders if one.plan}
    chosen = "none" if comparison.chosen is None else comparison.contenders[comparison.chosen].cluster
    return NotebookDisplay(
        title=f"Chosen: {chosen}, {comparison.reason}", tables=(table,),
        charts=lambda: estimate_charts(f"chosen: {chosen}", planned)[:1],
    )  # fmt: skip


def _contender_row(one: Contender) -> tuple[str, ...]:
    if one.plan is None:
        return one.cluster, one.problem or "", "", "", "", ""
    estimate, run = one.plan.estimate, one.run
    days, usd = (_run_days(run), _run_usd(run)) if run else ("", "")
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
        charts=lambda: time_and_memory_charts(about, time, memory, fit.memory_capacity_bytes),
    )  # fmt: skip


def shown_memory(found: LayoutMemory) -> NotebookDisplay:
    """Memory of the devices, in a notebook: a bar for each stage of the pipeline."""
    capacity = found.memory_capacity_bytes
    fits = describe_margin(found.margin, found.verdict)
    facts = {
        "layout": str(found.layout), "micro-batches": f"{found.num_micro_batches:,}",
        "fullest device": f"{format_bytes(found.memory_bytes)} of {format_bytes(capacity)} ({fits})",
    }  # fmt: skip
    return NotebookDisplay(
        title=f"Memory under {found.layout}", tables=(NotebookTable.of(facts),),
        charts=lambda: (memory_chart("Memory of a device", str(found.layout), stage_bars(found), capacity),),
    )  # fmt: skip


def shown_simulation(simulation: Simulation) -> NotebookDisplay:
    """A simulated step in a notebook."""
    facts = {
        "step, simulated": format_seconds(simulation.step_time_s),
        "step, estimated": format_seconds(simulation.estimate.step_time_s),
        "why they differ": simulation.difference or "they do not",
        "bubble": format_percent(simulation.bubble),
        "memory at most": format_bytes(simulation.peak_bytes),
    } | {f"exposed {axis}": format_seconds(seconds) for axis, seconds in simulation.exposed.items()}  # fmt: skip
    title = f"A step of {simulation.step.pricing.architecture.name}, simulated"
    return NotebookDisplay(title=title, tables=(NotebookTable.of(facts),), charts=lambda: (step_chart(simulation),))


def shown_timeline(line: Timeline) -> NotebookDisplay:
    """A played list in a notebook."""
    facts = {
        "length": f"{line.makespan:.6g} s", "idle": format_percent(line.idle_fraction),
        "bubble, idle over ideal time": format_percent(line.bubble),
        "activations at most, in micro-batches of a stage": f"{max(line.peak_activations, default=0.0):.4g}",
    }  # fmt: skip
    return NotebookDisplay(
        title=title_of(line.actions), tables=(NotebookTable.of(facts),), charts=lambda: (timeline_chart(line),)
    )


def shown_sweep(swept: Swept) -> NotebookDisplay:
    """A sweep in a notebook: a row for each point, and its chart where any point has a plan."""
    names = [sweep.name for sweep in swept.sweeps]
    rows = tuple((*(format_value(point.at[name]) for name in names), *_sweep_row(point)) for point in swept.points)
    table = NotebookTable(head=(*names, "step", "MFU", "memory", "bound by", "layout"), rows=rows)
    title, job = what_is_planned(swept)
    return NotebookDisplay(title=f"{title}, {job}", tables=(table,), charts=lambda: (sweep_chart(swept),))


def _sweep_row(point: SweepPoint) -> tuple[str, ...]:
    if point.plan is None:
        return absent(point), "", "", "", ""
    found = point.plan.estimate
    layout = str(point.plan.layout)
    return format_seconds(found.step_time_s), f"{found.mfu:.1%}", format_bytes(found.memory_bytes), found.bound, layout


def shown_search(found: LossSearch) -> NotebookDisplay:
    """The points in a notebook: a row for the best batch of each cluster, and the chart."""
    head = ("cluster", "batch", "of B_crit", "step", "token time", "loss time", "cost", "layout")
    rows = tuple(map(_loss_row, found.best))
    chosen = None if found.chosen is None else found.points[found.chosen]
    name = "none" if chosen is None else f"{chosen.cluster}, batches of {format_binary(chosen.batch_tokens)}"
    return NotebookDisplay(
        title=f"Chosen: {name}, {found.reason}",
        tables=(NotebookTable(head=head, rows=rows),),
        charts=lambda: (search_chart(found),),
    )


def _loss_row(point: LossPoint) -> tuple[str, ...]:
    if point.plan is None or point.time is None:
        return point.cluster, format_binary(point.batch_tokens), point.problem or "", "", "", "", "", ""
    time = point.time
    return (
        point.cluster, format_binary(point.batch_tokens), f"{time.batch_over_noise:.2g}", format_seconds(time.step_time_s),
        format_seconds(time.token_s) + interval_remark(time.token_s_interval90, format_seconds),
        format_seconds(time.loss_s) + interval_remark(time.loss_s_interval90, format_seconds),
        "" if time.usd is None else format_usd(time.usd) + interval_remark(time.usd_interval90, format_usd),
        str(point.plan.layout),
    )  # fmt: skip


def shown_reconciliation(found: Reconciliation) -> NotebookDisplay:
    """A reconciliation in a notebook: the step and what it is attributed to, then every term."""
    time, memory = found.time, found.memory
    facts = {
        "ran on": found.machine, "step predicted": format_seconds(time.predicted_s),
        "step measured": f"{format_seconds(time.measured_s)}, mean of the middle half of {time.num_steps} steps",
        "attributed to": found.attribution.term.name if found.attribution else "", "unexplained": f"{time.rest_share:.1%}",
    } | {f"remark {number}": remark for number, remark in enumerate(found.remarks, 1)}  # fmt: skip
    seconds = [(one.name, _seconds(one.predicted_s), _seconds(one.measured_s)) for one in time.terms]
    held = [(one.name, _bytes(one.predicted), _bytes(one.measured)) for one in (*memory.terms, memory.total)]
    tables = (
        NotebookTable.of(facts),
        NotebookTable(
            head=("time of a step", "predicted", "measured"), rows=tuple(row for row in seconds if any(row[1:]))
        ),
        NotebookTable(
            head=("memory of a device", "predicted", "measured"), rows=tuple(row for row in held if any(row[1:]))
        ),
    )
    return NotebookDisplay(
        title=f"A run on {found.machine} against its plan", tables=tables, charts=lambda: reconciliation_charts(found)
    )


def _seconds(value: float | None) -> str:
    return format_seconds(value) if value else ""


def _bytes(value: float | None) -> str:
    return format_bytes(value) if value and value > 0 else ""


DISPLAYS: Mapping[type[Displayable], Callable[[Any], NotebookDisplay]] = {
    Estimate: shown_estimate,
    Simulation: shown_simulation,
    Timeline: shown_timeline,
    Comparison: shown_comparison,
    LayoutMemory: shown_memory,
    Explanation: shown_explanation,
    LossSearch: shown_search,
    Plan: shown_plan,
    Swept: shown_sweep,
    Reconciliation: shown_reconciliation,
}


def display_of(value: Displayable) -> NotebookDisplay:
    """Return what a notebook shows of a value."""
    return DISPLAYS[type(value)](value)
