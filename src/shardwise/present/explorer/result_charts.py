"""Charts of the payloads of `explain`, `validate` and sweeps in HTML reports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardwise.present.charts.page_charts import (
    Plot,
    PlotAxis,
    PlotCurve,
    PlotPoint,
    PlotPoints,
    Rows,
    RowSpan,
    SpanRow,
    padded_range,
)
from shardwise.present.explorer.page_sections import term_list, term_spans
from shardwise.present.rendering.page_report import Legend, PageReport, PageSection, Paragraph
from shardwise.present.rendering.payload_text import FORMATS, Payload, format_share
from shardwise.values import format_seconds

PARTS = ("compute", "recompute", "exposed communication", "bubble", "optimizer and host")  # of a sweep's steps


def add_charts(kind: str, payload: Payload, sections: Sequence[PageSection]) -> PageReport:
    """Return the panels of a verb's report with charts of its payload, by the kind of the report."""
    if kind == "explain":
        return [*sections[:1], *_explanation_charts(payload), *sections[1:]]
    charts = {"sweep": _sweep_charts, "validate": _validation_charts}
    return [*charts[kind](payload), *sections] if kind in charts else sections


def _explanation_charts(payload: Payload) -> Sequence[PageSection]:
    """Return the terms of memory and time as bars, and the constants that move the step."""
    fit, step = payload["fit"], payload["throughput"]
    return [
        _shares_section("Memory of the fullest device", fit["memory"], "B", fit["memory_capacity_bytes"]),
        _shares_section("Time of a step", step["time"], "s", step["step_time_s"]),
        _constants_section(payload["constants"]),
    ]


def _shares_section(title: str, shares: Sequence[Payload], unit: str, end: float) -> PageSection:
    values = {share["term"]: share["value"] for share in shares}
    chart = Rows(label=title, end=max(end, sum(values.values())), rows=[SpanRow("", term_spans(values, unit))])
    return PageSection(title=title, blocks=[chart, term_list(values, values, unit)], half=True)


MAX_CONSTANTS, LEAST_CHANGE = 12, 1e-4  # constants that are drawn, and their change of a step


def _constants_section(constants: Sequence[Payload]) -> PageSection:
    """Return the constants that move the step most, each made a tenth worse."""
    moving = [constant for constant in constants if abs(constant["change"]) > LEAST_CHANGE][:MAX_CONSTANTS]
    rows = [
        SpanRow(
            constant["name"], [RowSpan(0.0, abs(constant["change"]), "forward", constant["name"])], height=18,
            note=format_share(constant["change"]),
        )
        for constant in moving
    ]  # fmt: skip
    end = max((abs(constant["change"]) for constant in moving), default=1.0)
    chart = [Rows(label="change of the step for each constant", end=end, rows=rows)] if rows else []
    return PageSection(title="Which constant moves the answer most", blocks=chart or ["none moves the step"])


def _sweep_charts(payload: Payload) -> Sequence[PageSection]:
    """Return for each point the step by its parts, and over numbers lines of the step and the MFU."""
    planned = [point for point in payload["points"] if point["problem"] is None]
    charts = [_stacks_section(planned)] if planned else []
    values = [next(iter(point["at"].values())) for point in planned]
    if len(payload["sweeps"]) == 1 and len(planned) > 1 and all(isinstance(value, int | float) for value in values):
        name = payload["sweeps"][0]["name"]
        for title, key, unit in (("Seconds of a step", "step_time_s", "s"), ("MFU", "mfu", "%")):
            points = [(value, point[key]) for value, point in zip(values, planned, strict=True)]
            charts.append(PageSection(title=title, blocks=[_line_plot(title, name, points, unit)], half=True))
    return charts


def _stacks_section(points: Sequence[Payload]) -> PageSection:
    """Return the shares of each point's step as bars of the same length."""
    rows = []
    for point in points:
        parts = {part: point["parts"][part] / point["step_time_s"] for part in PARTS if point["parts"][part] > 0}
        starts = accumulate(parts.values(), initial=0.0)
        spans = [
            RowSpan(start, start + share, part, f"{part} {format_seconds(point['parts'][part])}, {format_share(share)}")
            for (part, share), start in zip(parts.items(), starts, strict=False)
        ]
        name = " ".join(
            f"{key}={value:,}" if isinstance(value, int | float) else f"{key}={value}"
            for key, value in point["at"].items()
        )
        rows.append(SpanRow(name, spans, height=22, note=format_seconds(point["step_time_s"])))
    legend = Legend([(part, part) for part in PARTS if any(point["parts"][part] > 0 for point in points)])
    chart = Rows(label="shares of each point's step", end=1.0, rows=rows)
    return PageSection(title="Where the time goes", blocks=[legend, chart])


def _line_plot(title: str, name: str, points: Sequence[tuple[float, float]], unit: str) -> Plot:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    log = min(xs) > 0 and max(xs) / min(xs) > 8
    marks = [PlotPoint(x, y, f"{name}={x:,}: {FORMATS[unit](y)}") for x, y in points]
    return Plot(
        label=f"{title} over {name}", height=250, marks=[PlotCurve("front", points), PlotPoints("batch-dot", marks)],
        x=PlotAxis(name, padded_range(xs, log=log), log=log), y=PlotAxis(title, padded_range(ys, room=0.15), unit),
    )  # fmt: skip


def _validation_charts(payload: Payload) -> Sequence[PageSection]:
    """Return predicted against measured step times."""
    rows = [row for row in payload["rows"] if row["predicted_step_time_s"] and row["measured_step_time_s"]]
    if not rows:
        return []
    times = [row[name] for row in rows for name in ("predicted_step_time_s", "measured_step_time_s")]
    low, high = span = padded_range(times, log=True)
    points = [
        PlotPoint(
            row["measured_step_time_s"], row["predicted_step_time_s"],
            f"{row['id']}: {format_seconds(row['measured_step_time_s'])} measured, "
            f"{format_seconds(row['predicted_step_time_s'])} predicted",
        )
        for row in rows
    ]  # fmt: skip
    lines = [
        PlotCurve(style, [(low, low * factor), (high, high * factor)])
        for style, factor in (("roof", 1), ("limit", 1.25), ("limit", 0.8))
    ]
    chart = Plot(
        label="predicted against measured step times", height=460, marks=[*lines, PlotPoints("searched run", points, 3)],
        x=PlotAxis("measured step", span, "s", log=True), y=PlotAxis("predicted step", span, "s", log=True),
    )  # fmt: skip
    lead = f"{len(rows):,} published runs; the line is a prediction that is right, dashed lines are 25% off"
    return [PageSection(title="Predicted against measured", blocks=[Paragraph((lead,), "lead"), chart])]
