"""Reports of what a search and other batches give: the Pareto front, and the critical batch."""

from __future__ import annotations

import math

from shardwise.present.charts.page_charts import (
    Plot,
    PlotAxis,
    PlotCurve,
    PlotLimit,
    PlotPoint,
    PlotPoints,
    padded_range,
)
from shardwise.present.explorer.page_sections import FIGURE_TITLES, panel, quiet
from shardwise.present.rendering.page_report import Legend, PageBlock, PageReport, Slider
from shardwise.present.rendering.payload_text import Payload, PayloadText
from shardwise.values import format_bytes, format_quantity, format_seconds, parse_quantity

SLOWEST = 30  # times the fastest step: slower layouts are not drawn
PARETO_KEYS = {
    ".front-key": "on the front", ".searched-key": "fastest of its degrees", ".ring-key": "the plan", ".cross-key": "this layout",
}  # fmt: skip


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
    marks: list[PlotCurve | PlotPoints | PlotLimit] = [
        PlotLimit(capacity, f"{format_bytes(capacity)} of a device"),
        PlotPoints("searched", [*map(_layout_point, searched)], 2.6),
        PlotCurve("front", [(layout["memory_bytes"], layout["step_time_s"]) for layout in front]),
        PlotPoints("on-front", [*map(_layout_point, front)]), PlotPoints("best-ring", [_layout_point(best, "the plan: ")], 9),
        *([PlotPoints("own", [_layout_point(current, "this layout: ", "cross")], 8)] if current else []),
    ]  # fmt: skip
    chart = Plot(
        label="time against memory of every layout searched", height=300, marks=marks,
        x=PlotAxis("memory of a device", (max(0.0, low), high), "B"), y=PlotAxis("seconds of a step", times, "s", log=True),
    )  # fmt: skip
    text = PayloadText(payload, "search.")
    lead = text("{num_layouts:n} layouts searched, {num_fitting:n} fit; " + f"{len(front)} are on the front", "lead")
    hint = "Hover to read a layout, click to take it; the table has the front for the keyboard."
    columns = "{text} | {step_time_s:s} | {memory_bytes:B} | [take it]"
    table = text.table("layouts on the front", "layout | step | memory | ", "front", columns, folded=True)
    return [panel(title, lead, Legend([*PARETO_KEYS.items()]), chart, quiet(hint), table, half=True)]


def _layout_point(layout: Payload, name: str = "", shape: str = "circle") -> PlotPoint:
    step, memory = layout["step_time_s"], layout["memory_bytes"]
    title = f"{name}{layout['text']}\n{format_seconds(step)}, {format_bytes(memory)}"
    return PlotPoint(memory, step, title, {} if name else {"layout": layout["layout"]}, shape=shape)


def batch_report(payload: Payload) -> PageReport:
    """Return steps against tokens to the same loss, and the days that each batch takes on this layout."""
    text, fields, options = PayloadText(payload), payload["fields"], payload["noise_options"]
    critical = format_quantity(payload["critical_batch_tokens"])
    title = f"the critical batch: {critical} tokens, twice the fewest steps and the fewest tokens"
    knee = PlotPoints("best-ring", [PlotPoint(2 * payload["min_steps"], 2 * payload["min_tokens"], title)], 9)
    trade = _batch_plot(payload, "steps", "steps, S(B)", "tokens", "tokens, E(B)", knee)
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


def _batch_plot(payload: Payload, x: str, x_title: str, y: str, y_title: str, *marks: PlotPoints) -> Plot:
    """Return a value of each batch over another; the job's batch is the large point."""
    rows = [row for row in payload["rows"] if row[y] is not None]
    points = {row["batch_tokens"]: PlotPoint(row[x], row[y], _batch_title(row)) for row in rows}
    job = points.get(payload["batch_tokens"])
    smaller = [point for point in points.values() if point is not job]
    xs, ys = [row[x] for row in rows], [row[y] for row in rows]
    dots = [PlotPoints("batch-dot", smaller, 4), PlotPoints("own-dot", [job] if job else [], 7)]
    return Plot(
        label=f"{y_title} over {x_title} to the same loss",
        marks=[PlotCurve("front", [*zip(xs, ys, strict=True)]), *dots, *marks],
        x=PlotAxis(x_title, padded_range(xs, log=True), log=True), y=PlotAxis(y_title, padded_range(ys, log=True), log=True),
    )  # fmt: skip


def _batch_title(row: Payload) -> str:
    batch, tokens = format_quantity(row["batch_tokens"]), format_quantity(row["tokens"])
    days = "" if row["days"] is None else f", {row['days']:.3g} days"
    return f"{batch} tokens: {row['steps']:,.0f} steps, {tokens} tokens{days}"
