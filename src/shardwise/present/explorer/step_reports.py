"""Reports of the passes and kernels of a step: its simulation, its schedule, and the rooflines of a block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from shardwise.present.charts.axis_ticks import padded_range
from shardwise.present.charts.chart import (
    Axis,
    Category,
    Curve,
    Mark,
    PayloadMark,
    Points,
    RuleLine,
    Span,
    SpanEdges,
    Spans,
)
from shardwise.present.charts.common_charts import ROW_HEIGHT, categories, curve_chart, length_axis, row_chart
from shardwise.present.charts.step_charts import PASS_TERMS
from shardwise.present.explorer.page_sections import FIGURE_TITLES, PLOT_HEIGHT, panel, quiet, term_legend, term_words
from shardwise.present.rendering.page_report import PageAction, PageBlock, PageReport, Paragraph
from shardwise.present.rendering.payload_text import Payload, PayloadText
from shardwise.values import TIME_TERMS, format_bytes, format_quantity, format_seconds

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # of torch.distributed.pipelining: stage, kind, micro-batch


def truncated(extent: Payload) -> list[PageBlock]:
    """Return how much of a step a picture shows, where that is not all of it."""
    nouns = {"micro_batches": "micro-batches", "ranks": "ranks", "passes": "passes"}
    counts = [(extent[name], extent[f"num_{name}"], word) for name, word in nouns.items()]
    parts = [f"{number:,} of {total:,} {word}" for number, total, word in counts if number < total]
    fewer = extent["micro_batches"] < extent["num_micro_batches"]
    note = " Its seconds and its bubble are those of the micro-batches shown." if fewer else ""
    return [Paragraph((f"Truncated: {', '.join(parts)} are shown.{note}",), "truncated")] if parts else []


def action_words(action: str) -> str:
    """Return an action of a pipeline in words.

    >>> action_words("1B0")
    'backward of micro-batch 0 through stage 1'
    """
    match = ACTION.fullmatch(action)
    return f"{PASS_TERMS[match[2]]} of micro-batch {match[3]} through stage {match[1]}" if match else action


def timeline_report(payload: Payload) -> PageReport:
    """Return the simulated step: kernels and traffic of each rank over time, and what a device holds."""
    text, ranks, alone = PayloadText(payload, "simulation."), payload["ranks"], payload["num_ranks"] == 1
    rows, edges = list[Category](), list[Span]()
    marks: list[Mark] = [RuleLine(at=payload["memory_capacity_bytes"], axis="y", limit=True)]
    for index, rank in enumerate(ranks):
        place, peak = f"ranks.{index}.", format_bytes(max(value for _, value in rank["curve"]))
        edges += (_pass_edge(len(rows), *edge) for edge in rank["passes"])
        sources = ["compute", *(f"streams.{stream}" for stream in rank["streams"])]
        marks += (
            PayloadMark(source=place + source, form="spans", row=row) for row, source in enumerate(sources, len(rows))
        )
        rows.append(Category(label="device" if alone else f"rank {rank['rank']}"))
        rows += (Category(label=label, thin=True) for label in (*rank["streams"], peak))
        hover = f"memory of a device over time, at most {peak}"
        marks.append(PayloadMark(source=f"{place}curve", form="curve", row=len(rows) - 1, hover=hover))
    few = payload["shown"]["micro_batches"] < payload["shown"]["num_micro_batches"]
    lead = text.cells(
        "{estimate.step_time_s:s} a step predicted" + (" of the micro-batches shown" if few else "") + ", {step_time_s:s} "
        "simulated; bubble {bubble:%}; exposed communication: "
    )  # fmt: skip
    lead += text.join("* {exposed.*:s}", "exposed") or ["none"]
    why = payload["simulation"]["difference"]
    differs = [quiet(f"{why[0].upper()}{why[1:]}. The time that this page prints is the prediction.")] if why else []
    parts = text.table(
        "what the length of the step is made of", "part | seconds | share", "critical_path",
        lambda part: ("waiting for {axis}, " if part["axis"] else "") + "{unit} {phase} | {seconds:s} | {share:%}", folded=True,
    )  # fmt: skip
    used = {span[2] for rank in ranks for spans in (rank["compute"], *rank["streams"].values()) for span in spans}
    chart = row_chart(
        f"simulated step of {format_seconds(payload['end_s'])}", length_axis(payload["end_s"], unit="s", ticks=True), rows,
        [*marks, SpanEdges(spans=tuple(edges))], size=(300.0, 22.0), gap=10.0,
        legend=term_legend({term: term_words(term) for term in TIME_TERMS if term in used}),
    )  # fmt: skip
    return [
        panel(FIGURE_TITLES["timeline"], Paragraph(lead, "lead"), *differs, *truncated(payload["shown"]), chart, parts)
    ]


def _pass_edge(row: int, start: float, end: float, name: str) -> Span:
    """Return a pass of a rank: its micro-batches, its actions in words, and the term whose colour is behind it."""
    description = " and ".join(map(action_words, name.split("&")))
    return Span(
        row=row, start=start, end=end, text=ACTION.sub(r"\3", name),
        hover=f"{description}, {format_seconds(end - start)}", colour=f"term:{'forward' if 'F' in name else 'backward'}",
    )  # fmt: skip


def schedule_report(payload: Payload) -> PageReport:
    """Return the order of a pipeline's passes, rank by rank, and all schedules side by side."""
    text, line, compared = PayloadText(payload, "schedule."), payload["schedule"], payload["compared"]
    spans = [span for row, rank in enumerate(line["ranks"]) for span in _pass_spans(row, rank["slots"])]
    used = {span.colour for span in spans}
    lengths = [len(rank["slots"]) for rank in line["ranks"]]
    lead = text(
        "{schedule}: {stages:n} " + ("stage" if line["stages"] == 1 else "stages") + ", {micro_batches:n} micro-batches; bubble "
        "{bubble:%} of the ideal time; ranks are idle for {idle_fraction:%} of the step and hold at most {peak_activations:g} "
        "micro-batches",
        "lead",
    )  # fmt: skip
    chart = row_chart(
        f"{line['schedule']}: {sum(lengths)} passes on {len(lengths)} ranks", length_axis(line["makespan_s"]),
        categories(f"rank {rank['rank']}" for rank in line["ranks"]), [Spans(spans=tuple(spans))],
        size=(max(300.0, min(9.0 * max(lengths), 4000.0)), ROW_HEIGHT),
        legend=term_legend({term: f"{kind}: {term}" for kind, term in PASS_TERMS.items() if f"term:{term}" in used}),
    )  # fmt: skip
    note = quiet(
        "stages alike, with the estimate's seconds ", PageAction("copy the command", command=payload["command"])
    )
    ranks = text.table(
        "what ranks do", "rank | idle | waits | micro-batches held", "ranks",
        "{rank} | {idle_s:s} | {wait_s:s} | {peak_activations:g}", folded=True,
    )  # fmt: skip
    schedules = _compared_schedules(payload, line) if compared["rows"] else quiet(compared["problem"])
    truncation = truncated(payload["shown"])
    return [panel("Schedule", lead, *truncation, chart, note, ranks), panel("All schedules", schedules)]


def _pass_spans(row: int, slots: Iterable[Payload]) -> Iterator[Span]:
    for slot in slots:
        start, end, actions = slot["start_s"], slot["end_s"], slot["actions"]
        for lane, action in enumerate(actions):
            match = ACTION.fullmatch(action)
            kind, label = (PASS_TERMS[match[2]], match[3]) if match else ("forward", action)
            title = f"{action_words(action)}, {format_seconds(end - start)}"
            yield Span(
                row=row, start=start, end=end, colour=f"term:{kind}", hover=title, text=label, lane=(lane, len(actions))
            )


def _compared_schedules(payload: Payload, line: Payload) -> PageBlock:
    current, columns = (line["schedule"], line["virtual_stages"]), "{bubble:%} | {peak_activations:g} | {messages:n}"

    def template(row: Payload) -> str:
        is_current = (row["schedule"], row["virtual_stages"]) == current
        return f"{'*{schedule} (this layout)' if is_current else '{schedule}'} | {{virtual_stages}} | {columns}"

    used, total = (payload["compared"][name] for name in ("micro_batches", "num_micro_batches"))
    return PayloadText(payload, "compared.").table(
        "the same stages under each schedule" + (f", {used:,} of {total:,} micro-batches" if used < total else ""),
        "schedule | virtual stages | bubble | micro-batches held | messages", "rows", template,
    )  # fmt: skip


# Kernels, layouts, batches, weights


def roofline_report(payload: Payload) -> PageReport:
    """Return the kernels of one block against the chip's roofline."""
    roofline = payload["roofline"]
    peak, rate, knee = roofline["peak_flops_per_s"], roofline["memory_bytes_per_s"], roofline["critical_intensity"]
    points = [
        Points(
            points=((kernel["intensity"], kernel["flops"] / kernel["time_s"]),),
            hover=f"{kernel['phase']} {kernel['name']}: {kernel['intensity']:.3g} FLOPs/byte, "
            f"{format_seconds(kernel['time_s'])}, bound by {kernel['bound']}",
            path=f"roofline.operations.{index}.time_s", label=kernel["phase"], colour=f"term:{kernel['phase']}",
            shape="circle" if kernel["phase"] == "forward" else "triangle",
        )
        for index, kernel in enumerate(roofline["operations"]) if kernel["flops"] > 0
    ]  # fmt: skip
    xs, ys = zip(*(point.points[0] for point in points), strict=True)
    low, high = padded_range([*xs, knee], log=True, room=0.6)
    roof = Curve(
        points=((low, low * rate), (knee, peak), (high, peak)), colour="ink",
        label=f"{format_quantity(peak, 'FLOP/s')} {roofline['dtype']}",
    )  # fmt: skip
    chart = curve_chart(
        f"roofline of a block's kernels on {roofline['chip']}", "",
        Axis(title="intensity, FLOPs per byte moved", log=True, ends=(low, high)),
        Axis(title="FLOP/s of a device", log=True, ends=padded_range([*ys, peak, low * rate], log=True, room=0.2)),
        [roof, *points], PLOT_HEIGHT,
    )  # fmt: skip
    text = PayloadText(payload)
    lead = text(
        "{memory_bound_share:%} of a block's time is bound by memory; compute binds from {roofline.critical_intensity:g} FLOPs "
        "per byte on",
        "lead",
    )
    note = (
        "One device's kernels at the vendor's peak and bandwidth: time = max(FLOPs / peak, bytes / bandwidth). Circles run "
        "forward, triangles backward."
    )
    table = text.table(
        "kernels of one block on one device", "kernel | phase | FLOPs | moved | intensity | time | bound by",
        "roofline.operations", "{name} | {phase} | {flops:k} | {moved_bytes:B} | {intensity:g} | {time_s:s} | {bound}",
        folded=True,
    )  # fmt: skip
    return [panel(FIGURE_TITLES["roofline"], lead, chart, quiet(note), table, half=True)]
