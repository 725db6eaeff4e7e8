"""Displays of each type of value in notebooks: its tables and charts."""

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
from shardwise.price.device_memory import describe_margin
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
    """Return the headline figures of an estimate, by name."""
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
    """Return the display of an estimate."""
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
    """Return the display of a plan: the layout with its estimate, and the layouts that lost."""
    job = plan.job
    title = f"Plan of {plan.model.name} on {plan.cluster.name}"
    batch = f"{job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}, {job.precision}"
    facts = {"layout": str(plan.layout), "job": batch, **estimate_facts(plan.estimate)}
    if plan.run:
        facts["run"] = ", ".join(filter(None, (_run_days(plan.run), _run_usd(plan.run))))
    lost = tuple(
        (str(alternative.layout), format_seconds(alternative.estimate.step_time_s), alternative.reason)
        for alternative in plan.alternatives
    )
    tables = (
        NotebookTable.of(facts),
        *([NotebookTable(head=("other layouts", "step", "why not"), rows=lost)] if lost else []),
    )
    estimates = {f"chosen: {plan.layout}": plan.estimate}
    estimates |= {str(alternative.layout): alternative.estimate for alternative in plan.alternatives[: MOST_BARS - 1]}
    return NotebookDisplay(title=title, tables=tables, charts=lambda: estimate_charts(f"{title}, {batch}", estimates))


def shown_comparison(comparison: Comparison) -> NotebookDisplay:
    """Return the display of plans on several clusters."""
    rows = tuple(map(_contender_row, comparison.contenders))
    table = NotebookTable(head=("cluster", "step", "MFU", "run", "cost", "layout"), rows=rows)
    planned = {contender.cluster: contender.plan.estimate for contender in comparison.contenders if contender.plan}
    chosen = "none" if comparison.chosen is None else comparison.contenders[comparison.chosen].cluster
    return NotebookDisplay(
        title=f"Chosen: {chosen}, {comparison.reason}", tables=(table,),
        charts=lambda: estimate_charts(f"chosen: {chosen}", planned)[:1],
    )  # fmt: skip


def _contender_row(contender: Contender) -> tuple[str, ...]:
    if contender.plan is None:
        return contender.cluster, contender.problem or "", "", "", "", ""
    estimate, run = contender.plan.estimate, contender.run
    days, usd = (_run_days(run), _run_usd(run)) if run else ("", "")
    step, mfu = format_seconds(estimate.step_time_s), f"{estimate.mfu:.1%}"
    return contender.cluster, step, mfu, days, usd, str(contender.plan.layout)


def shown_explanation(explanation: Explanation) -> NotebookDisplay:
    """Return the display of an explanation: the deciding numbers, and the layout that it was compared with, if any."""
    fit, throughput = explanation.fit, explanation.throughput
    facts = {
        "layout": explanation.layout, "placement": explanation.placement, "fits": fit.because, "batch": explanation.batch.because,
        "step": format_seconds(throughput.step_time_s), "MFU": f"{throughput.mfu:.1%}", "bound by": throughput.bound,
        "against": f"{explanation.against.layout}: {explanation.against.verdict}" if explanation.against else "",
    }  # fmt: skip
    runners_up = tuple(
        (runner_up.layout, format_seconds(runner_up.step_time_s), runner_up.reason)
        for runner_up in explanation.runners_up
    )
    tables = (
        NotebookTable.of(facts),
        *([NotebookTable(head=("runners-up", "step", "why not"), rows=runners_up)] if runners_up else []),
    )
    time = {explanation.layout: {share.term: share.value for share in throughput.time}}
    memory = {explanation.layout: {share.term: share.value for share in fit.memory}}
    if explanation.against:
        time[explanation.against.layout] = dict(explanation.against.estimate.time)
        memory[explanation.against.layout] = dict(explanation.against.estimate.memory)
    about = f"{explanation.model} on {explanation.cluster}"
    return NotebookDisplay(
        title=f"Explanation: {about}", tables=tables,
        charts=lambda: time_and_memory_charts(about, time, memory, fit.memory_capacity_bytes),
    )  # fmt: skip


def shown_memory(memory: LayoutMemory) -> NotebookDisplay:
    """Return the display of the devices' memory: a bar for each stage of the pipeline."""
    capacity = memory.memory_capacity_bytes
    fits = describe_margin(memory.margin, memory.verdict)
    facts = {
        "layout": str(memory.layout), "micro-batches": f"{memory.num_micro_batches:,}",
        "fullest device": f"{format_bytes(memory.memory_bytes)} of {format_bytes(capacity)} ({fits})",
    }  # fmt: skip
    return NotebookDisplay(
        title=f"Memory under {memory.layout}", tables=(NotebookTable.of(facts),),
        charts=lambda: (memory_chart("Memory of a device", str(memory.layout), stage_bars(memory), capacity),),
    )  # fmt: skip


def shown_simulation(simulation: Simulation) -> NotebookDisplay:
    """Return the display of a simulated step."""
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
    """Return the display of a played list."""
    facts = {
        "length": f"{line.makespan:.6g} s", "idle": format_percent(line.idle_fraction),
        "bubble, idle over ideal time": format_percent(line.bubble),
        "activations at most, in micro-batches of a stage": f"{max(line.peak_activations, default=0.0):.4g}",
    }  # fmt: skip
    return NotebookDisplay(
        title=title_of(line.actions), tables=(NotebookTable.of(facts),), charts=lambda: (timeline_chart(line),)
    )


def shown_sweep(swept: Swept) -> NotebookDisplay:
    """Return the display of a sweep: a row for each point, and its chart where any point has a plan."""
    names = [sweep.name for sweep in swept.sweeps]
    rows = tuple((*(format_value(point.at[name]) for name in names), *_sweep_row(point)) for point in swept.points)
    table = NotebookTable(head=(*names, "step", "MFU", "memory", "bound by", "layout"), rows=rows)
    title, job = what_is_planned(swept)
    return NotebookDisplay(title=f"{title}, {job}", tables=(table,), charts=lambda: (sweep_chart(swept),))


def _sweep_row(point: SweepPoint) -> tuple[str, ...]:
    if point.plan is None:
        return absent(point), "", "", "", ""
    estimate = point.plan.estimate
    layout = str(point.plan.layout)
    return (
        format_seconds(estimate.step_time_s),
        f"{estimate.mfu:.1%}",
        format_bytes(estimate.memory_bytes),
        estimate.bound,
        layout,
    )


def shown_search(search: LossSearch) -> NotebookDisplay:
    """Return the display of a search for a loss: a row for the best batch of each cluster, and the chart."""
    head = ("cluster", "batch", "of B_crit", "step", "token time", "loss time", "cost", "layout")
    rows = tuple(map(_loss_row, search.best))
    chosen = None if search.chosen is None else search.points[search.chosen]
    name = "none" if chosen is None else f"{chosen.cluster}, batches of {format_binary(chosen.batch_tokens)}"
    return NotebookDisplay(
        title=f"Chosen: {name}, {search.reason}",
        tables=(NotebookTable(head=head, rows=rows),),
        charts=lambda: (search_chart(search),),
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


def shown_reconciliation(reconciliation: Reconciliation) -> NotebookDisplay:
    """Return the display of a reconciliation: the step, and the term that its error is attributed to, then every term."""
    time, memory = reconciliation.time, reconciliation.memory
    facts = {
        "ran on": reconciliation.machine, "step predicted": format_seconds(time.predicted_s),
        "step measured": f"{format_seconds(time.measured_s)}, mean of the middle half of {time.num_steps} steps",
        "attributed to": reconciliation.attribution.term.name if reconciliation.attribution else "",
        "unexplained": f"{time.rest_share:.1%}",
    } | {f"remark {number}": remark for number, remark in enumerate(reconciliation.remarks, 1)}  # fmt: skip
    time_rows = [(term.name, _seconds(term.predicted_s), _seconds(term.measured_s)) for term in time.terms]
    memory_rows = [(term.name, _bytes(term.predicted), _bytes(term.measured)) for term in (*memory.terms, memory.total)]
    tables = (
        NotebookTable.of(facts),
        NotebookTable(
            head=("time of a step", "predicted", "measured"), rows=tuple(row for row in time_rows if any(row[1:]))
        ),
        NotebookTable(
            head=("memory of a device", "predicted", "measured"), rows=tuple(row for row in memory_rows if any(row[1:]))
        ),
    )
    return NotebookDisplay(
        title=f"A run on {reconciliation.machine} against its plan",
        tables=tables,
        charts=lambda: reconciliation_charts(reconciliation),
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
    """Return the display of a value, by its type."""
    return DISPLAYS[type(value)](value)
