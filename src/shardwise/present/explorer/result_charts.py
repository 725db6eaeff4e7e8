"""Charts of the payloads of `explain`, `validate` and sweeps in HTML reports."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.present.charts.axis_ticks import padded_range
from shardwise.present.charts.chart import Axis, BarPart, Category, Chart, Curve, Points, StackedBars
from shardwise.present.charts.common_charts import LEAST_WIDTH, curve_chart, length_axis, row_chart
from shardwise.present.explorer.page_sections import PLOT_HEIGHT, term_bar, term_legend, term_list
from shardwise.present.rendering.page_report import PageReport, PageSection, Paragraph
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
    bars = StackedBars(bars=(term_bar(values, unit),), totals=False)
    chart = row_chart(title, length_axis(max(end, *bars.sums)), [Category(label="")], [bars])
    return PageSection(title=title, blocks=[chart, term_list(values, values, unit)], half=True)


MAX_CONSTANTS, LEAST_CHANGE = 12, 1e-4  # constants that are drawn, and their change of a step


def _constants_section(constants: Sequence[Payload]) -> PageSection:
    """Return the constants that move the step most, each made a tenth worse."""
    moving = [constant for constant in constants if abs(constant["change"]) > LEAST_CHANGE][:MAX_CONSTANTS]
    title = "Which constant moves the answer most"
    if not moving:
        return PageSection(title=title, blocks=["none moves the step"])
    rows = [Category(label=constant["name"], lines=(format_share(constant["change"]),)) for constant in moving]
    bars = StackedBars(
        bars=tuple(
            (BarPart(name="", value=abs(constant["change"]), colour="term:forward", hover=constant["name"]),)
            for constant in moving
        ),
        totals=False,
    )
    chart = row_chart(
        "change of the step for each constant", length_axis(max(bars.sums)), rows, [bars], size=(LEAST_WIDTH, 18.0)
    )
    return PageSection(title=title, blocks=[chart])


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
    rows, bars = [], []
    for point in points:
        shares = {part: point["parts"][part] / point["step_time_s"] for part in PARTS if point["parts"][part] > 0}
        bars.append(
            tuple(
                BarPart(
                    name=part, value=share, colour=f"term:{part}",
                    hover=f"{part} {format_seconds(point['parts'][part])}, {format_share(share)}",
                )
                for part, share in shares.items()
            )
        )  # fmt: skip
        name = " ".join(
            f"{key}={value:,}" if isinstance(value, int | float) else f"{key}={value}"
            for key, value in point["at"].items()
        )
        rows.append(Category(label=name, lines=(format_seconds(point["step_time_s"]),)))
    chart = row_chart(
        "shares of each point's step", length_axis(1.0), rows, [StackedBars(bars=tuple(bars), totals=False)],
        size=(LEAST_WIDTH, 22.0),
        legend=term_legend({part: part for part in PARTS if any(point["parts"][part] > 0 for point in points)}),
    )  # fmt: skip
    return PageSection(title="Where the time goes", blocks=[chart])


def _line_plot(title: str, name: str, points: Sequence[tuple[float, float]], unit: str) -> Chart:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    log = min(xs) > 0 and max(xs) / min(xs) > 8
    dots = (
        Points(points=((x, y),), colour="term:forward", hover=f"{name}={x:,}: {FORMATS[unit](y)}") for x, y in points
    )
    return curve_chart(
        f"{title} over {name}", "", Axis(title=name, ends=padded_range(xs, log=log), log=log),
        Axis(title=title, unit=unit, ends=padded_range(ys, room=0.15)),
        [Curve(points=tuple(points), colour="ink"), *dots], PLOT_HEIGHT - 30.0,
    )  # fmt: skip


def _validation_charts(payload: Payload) -> Sequence[PageSection]:
    """Return predicted against measured step times."""
    rows = [row for row in payload["rows"] if row["predicted_step_time_s"] and row["measured_step_time_s"]]
    if not rows:
        return []
    times = [row[name] for row in rows for name in ("predicted_step_time_s", "measured_step_time_s")]
    low, high = ends = padded_range(times, log=True)
    points = (
        Points(
            points=((row["measured_step_time_s"], row["predicted_step_time_s"]),), colour="faint", shape="dot",
            hover=f"{row['id']}: {format_seconds(row['measured_step_time_s'])} measured, "
            f"{format_seconds(row['predicted_step_time_s'])} predicted",
        )
        for row in rows
    )  # fmt: skip
    lines = (
        Curve(points=((low, low * factor), (high, high * factor)), colour="ink", reference=factor != 1)
        for factor in (1, 1.25, 0.8)
    )
    x, y = (Axis(title=f"{kind} step", unit="s", log=True, ends=ends) for kind in ("measured", "predicted"))
    chart = curve_chart("predicted against measured step times", "", x, y, [*lines, *points], 408.0)
    lead = f"{len(rows):,} published runs; the line is a prediction that is right, dashed lines are 25% off"
    return [PageSection(title="Predicted against measured", blocks=[Paragraph((lead,), "lead"), chart])]
