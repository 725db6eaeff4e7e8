"""Reports of what a search and other batches give: the Pareto front, and the critical batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from urllib.parse import urlencode

from shardwise.present.charts.axis_ticks import padded_range
from shardwise.present.charts.chart import Axis, Chart, Curve, Mark, Points, RuleLine, Shape
from shardwise.present.charts.common_charts import curve_chart
from shardwise.present.explorer.page_sections import FIGURE_TITLES, PLOT_HEIGHT, panel, quiet
from shardwise.present.rendering.page_report import PageBlock, PageReport, Slider
from shardwise.present.rendering.payload_text import Payload, PayloadText
from shardwise.values import format_bytes, format_quantity, format_seconds, parse_quantity

SLOWEST = 30  # times the fastest step: slower layouts are not drawn


def pareto_report(payload: Payload) -> PageReport:
    """Return time against memory of the layouts that were searched; a point is a layout to take."""
    search, current, title = payload["search"], payload["own"], FIGURE_TITLES["pareto"]
    if not search.get("front"):
        problems = search.get("problems") or ["searching all layouts of this job"]
        return [panel(title, quiet(problems[0]), half=True)]
    best, capacity, front = search["best"], payload["memory_capacity_bytes"], search["front"]
    fastest = min(layout["step_time_s"] for layout in (best, current) if layout)
    searched = [layout for layout in search["points"] if layout["step_time_s"] < SLOWEST * fastest]
    layouts = [*searched, *front, *([current] if current else [])]
    low, high = padded_range([*(layout["memory_bytes"] for layout in layouts), capacity])
    times = padded_range([layout["step_time_s"] for layout in layouts], log=True)
    marks: list[Mark] = [
        RuleLine(at=capacity, label=f"{format_bytes(capacity)} of a device", limit=True),
        *(_layout_point(layout, "fastest of its degrees", "faint", "dot", takes=True) for layout in searched),
        Curve(points=tuple((layout["memory_bytes"], layout["step_time_s"]) for layout in front), colour="ink"),
        *(_layout_point(layout, "on the front", "term:forward", takes=True) for layout in front),
        _layout_point(best, "the plan", "term:backward", "ring"),
        *([_layout_point(current, "this layout", "ink", "cross")] if current else []),
    ]  # fmt: skip
    chart = curve_chart(
        "time against memory of every layout searched", "",
        Axis(title="memory of a device", unit="B", ends=(max(0.0, low), high)),
        Axis(title="seconds of a step", unit="s", log=True, ends=times), marks, PLOT_HEIGHT + 20.0,
    )  # fmt: skip
    text = PayloadText(payload, "search.")
    lead = text("{num_layouts:n} layouts searched, {num_fitting:n} fit; " + f"{len(front)} are on the front", "lead")
    hint = "Hover to read a layout, click to take it; the table has the front for the keyboard."
    columns = "{text} | {step_time_s:s} | {memory_bytes:B} | [take it]"
    table = text.table("layouts on the front", "layout | step | memory | ", "front", columns, folded=True)
    return [panel(title, lead, chart, quiet(hint), table, half=True)]


def _layout_point(
    layout: Payload, label: str, colour: str, shape: Shape = "circle", *, takes: bool = False
) -> Points:  # fmt: skip
    """Return a layout as a point; with `takes` a click selects it."""
    step, memory = layout["step_time_s"], layout["memory_bytes"]
    name = layout["text"] if takes else f"{label}: {layout['text']}"
    return Points(
        points=((memory, step),), label=label, colour=colour, shape=shape,
        hover=f"{name}\n{format_seconds(step)}, {format_bytes(memory)}",
        query=urlencode({"layout": layout["layout"]}) if takes else "",
    )  # fmt: skip


def batch_report(payload: Payload) -> PageReport:
    """Return steps against tokens to the same loss, and the days that each batch takes on this layout."""
    text, fields, options = PayloadText(payload), payload["fields"], payload["noise_options"]
    critical = format_quantity(payload["critical_batch_tokens"])
    title = f"the critical batch: {critical} tokens, twice the fewest steps and the fewest tokens"
    knee = Points(
        points=((2 * payload["min_steps"], 2 * payload["min_tokens"]),),
        hover=title,
        colour="term:backward",
        shape="ring",
    )
    trade = _batch_plot(payload, "steps", "steps, S(B)", "tokens", "tokens, E(B)", [knee])
    days: list[PageBlock] = [quiet("no batch has a price on this layout; the table below says why")]
    if any(row["days"] is not None for row in payload["rows"]):
        plot = _batch_plot(payload, "batch_tokens", "batch, tokens", "days", "days on this layout")
        days = [plot, quiet(fields["rows.*.days"]["formula"])]
    lead = text(
        "{critical_batch_tokens:k} tokens; this batch of {batch_tokens:k} takes {times_min_steps:x} the fewest steps and "
        "{times_min_tokens:x} the fewest tokens",
        "lead",
    )
    formulas = "; ".join(fields[name]["formula"] for name in ("rows.*.steps", "rows.*.tokens", "critical_batch_tokens"))
    notes = [quiet(f"{formulas}. Closed forms: {fields['critical_batch_tokens']['source']}.")]
    if not payload["noise_given"]:
        noise = fields["noise_tokens"]
        notes.append(
            quiet(f"No noise scale was given: this is {noise['words']} ({noise['source']}). Measure your own.")
        )
    tokens = [parse_quantity(option["value"], label="noise_tokens", unit="") for option in options]
    distances = [abs(math.log(number / payload["noise_tokens"])) for number in tokens]
    nearest = options[distances.index(min(distances))]["value"]
    slider = Slider("noise scale of the gradient, tokens", nearest, text.cells("{noise_tokens:k}")[0], options)
    table = text.table(
        "batches to the same loss", "batch, tokens | steps | tokens | step | days | 90%, days | ", "rows",
        lambda row: "{batch_tokens:n} | {steps:n} | {tokens:k} | {step_time_s:s} | {days:g} | "
        + "{days_interval90.0:g} to {days_interval90.1:g}" * bool(row["days_interval90"]) + " | {problem}",
    )  # fmt: skip
    ring = quiet("the ring is the critical batch: twice the least of both")
    return [
        panel("Critical batch size", lead, slider, *notes), panel("Steps and tokens", trade, ring, half=True),
        panel("Days", *days, half=True), panel("Batches", table),
    ]  # fmt: skip


def _batch_plot(
    payload: Payload, x: str, x_title: str, y: str, y_title: str, marks: Iterable[Points] = ()
) -> Chart:  # fmt: skip
    """Return a value of each batch over another; the job's batch is the large point."""
    rows = [row for row in payload["rows"] if row[y] is not None]
    places = [(row[x], row[y]) for row in rows]
    is_job = [row["batch_tokens"] == payload["batch_tokens"] for row in rows]
    points = [
        Points(points=(place,), hover=_batch_title(row), colour="term:backward", shape="disc")
        if large else Points(points=(place,), hover=_batch_title(row), colour="term:forward")
        for row, place, large in zip(rows, places, is_job, strict=True)
    ]  # fmt: skip
    x_ends, y_ends = (padded_range(values, log=True) for values in zip(*places, strict=True))
    return curve_chart(
        f"{y_title} over {x_title} to the same loss", "", Axis(title=x_title, log=True, ends=x_ends),
        Axis(title=y_title, log=True, ends=y_ends),
        [Curve(points=tuple(places), colour="ink"), *sorted(points, key=lambda point: point.shape == "disc"), *marks],
        PLOT_HEIGHT,
    )  # fmt: skip


def _batch_title(row: Payload) -> str:
    batch, tokens = format_quantity(row["batch_tokens"]), format_quantity(row["tokens"])
    days = "" if row["days"] is None else f", {row['days']:.3g} days"
    return f"{batch} tokens: {row['steps']:,.0f} steps, {tokens} tokens{days}"
