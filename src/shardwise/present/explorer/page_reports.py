"""Reports of the page's views, made of their payloads: every number is read at its path, so that it is the one of `--json`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from shardwise.present.charts.page_charts import (
    Curve,
    Limit,
    Plot,
    PlotAxis,
    PlotPoint,
    Points,
    Rows,
    ShardCells,
    Span,
    SpanRow,
    padded_range,
)
from shardwise.present.rendering.page_report import (
    Action,
    Bullets,
    Choices,
    DataTable,
    Facts,
    Legend,
    PageBlock,
    PageCell,
    PageReport,
    PageSection,
    Paragraph,
    Slider,
    TermList,
)
from shardwise.present.rendering.payload_text import FORMATS, Payload, PayloadText, format_share
from shardwise.present.rendering.report import Number
from shardwise.present.reports.wording import FIT_ANSWERS
from shardwise.price.memory_verdict import TIGHT_MARGIN
from shardwise.values import (
    MEMORY_TERMS,
    TIME_TERMS,
    format_bytes,
    format_quantity,
    format_seconds,
    parse_quantity,
)

FIGURE_TITLES = {"timeline": "Simulated step", "roofline": "Roofline of a block", "pareto": "Pareto front"}
# Terms whose names say too little.
TERM_WORDS = {
    "tp": "tp: tensor parallel", "cp": "cp: context parallel", "ep": "ep: expert parallel", "pp": "pp: pipeline",
    "fsdp": "fsdp: sharded data parallel", "dp": "dp: data parallel", "control": "control: loss, norm, router sums",
    "master": "master weights", "gathered": "gathered weights", "host": "host transfers",
}  # fmt: skip


def view_report(question: str, payload: Payload) -> PageReport:
    """Return the report of a view or a figure, or why it has none; empty for questions of a dialog."""
    if question not in REPORTS:
        return ()
    if payload.get("problems") and question not in ("overview", "memory"):
        if question not in FIGURE_TITLES:
            return [problems_section(payload)]
        return [_panel(FIGURE_TITLES[question], _quiet(payload["problems"][0]), half=question != "timeline")]
    return REPORTS[question](payload)


def _panel(title: str, *blocks: PageBlock, half: bool = False) -> PageSection:
    return PageSection(title=title, blocks=blocks, half=half)


def _quiet(*parts: PageCell) -> Paragraph:
    return Paragraph(parts, "quiet")


def term_words(term: str) -> str:
    """Return a term as the page writes it."""
    return TERM_WORDS.get(term, term)


def term_spans(values: Mapping[str, float], unit: str, tree: str = "") -> list[Span]:
    """Return the terms that are there as spans from zero on; `tree` explains them."""
    spans, start = [], 0.0
    for term, value in values.items():
        if value > 0:
            title, path = f"{term_words(term)}, {FORMATS[unit](value)}", tree and f"{tree}.{term}"
            spans.append(Span(start, start + value, term, title, term, path))
            start += value
    return spans


def term_list(values: Mapping[str, float], terms: Iterable[str], unit: str, tree: str = "") -> TermList:
    """Return terms with their colour, value and share; `tree` explains them."""
    total, form = sum(values.values()), FORMATS[unit]
    numbers = {term: Number(form(values[term]), values[term], path=tree and f"{tree}.{term}") for term in terms}
    return TermList([(term, term_words(term), numbers[term], format_share(values[term] / total)) for term in numbers])


# Overview and memory


def overview_report(payload: Payload) -> PageReport:
    """Return the verdict; below it the whole run, memory and time, and notes."""
    if payload["problems"]:
        return [problems_section(payload)]
    notes = PageSection(title="What to know", blocks=[Bullets(payload["notes"])], style="panel notes")
    memory = memory_section(payload["memory"], half=True)
    return [_verdict_section(payload), _run_section(payload), memory, _time_section(payload), notes]


def is_searching(payload: Payload) -> bool:
    """Return True while a fallback stands in for the best layout."""
    search = payload["search"]
    return bool(payload["layout_source"] == "fallback" and search and not search["best"] and not search["problems"])


def problems_section(payload: Payload) -> PageSection:
    """Return why a layout cannot run, or that its search goes on."""
    if is_searching(payload):
        return PageSection(title="Searching for the best layout", blocks=[_progress(payload)], style="verdict")
    blocks = [Bullets(payload["problems"]), *_best(payload)]
    if not payload.get("is_known", True):  # a value without a source: nothing is said of the layout
        return PageSection(
            title="Whether this layout runs is not known", blocks=blocks, style="verdict cannot", mark="bad"
        )
    return PageSection(title="This layout cannot run", blocks=blocks, style="verdict cannot", mark="bad")


def _progress(payload: Payload) -> Paragraph:
    return PayloadText(payload)(
        "Searching all layouts of {model_name} on {cluster_name} for the best that fits. Until then this page shows parameters "
        "sharded over all devices (ZeRO-3).",
        "progress",
    )


def _verdict_section(payload: Payload) -> PageSection:
    text = PayloadText(payload)
    layout = text("this layout: {layout_text}", "quiet layout")
    below = [_progress(payload), layout] if is_searching(payload) else [layout, *_best(payload)]
    return _fit_section(
        payload["verdict"], [_compared(payload), text.cells("bound by {verdict.bound}")], [*below, _facts(payload)]
    )


def _fit_section(fit: Payload, claims: Sequence[Sequence[PageCell]], blocks: Sequence[PageBlock]) -> PageSection:
    """Return a verdict: whether a layout fits, with how much of a device is free or missing, and other claims."""
    share = Number(format_share(abs(fit["margin"]), 0), fit["margin"], path="margin")
    room: list[PageCell] = ["Fits with ", share, " headroom"]
    if not fit["fits"]:
        room = ["Does not fit: ", share, " over a device's memory"]
    if fit["verdict"] == "tight":
        room = ["Tight: ", share, f" headroom of the {TIGHT_MARGIN:.0%} that predictions of memory need"]
    style = "verdict" if fit["fits"] else "verdict cannot"
    return PageSection(blocks=blocks, style=style, claims=[room, *claims], mark=FIT_ANSWERS[fit["verdict"]][1])


# By how the search ended. A search that was stopped, and one that the job's problems keep from a result, say nothing about fit.
NO_BEST: Mapping[str, str] = {
    "searching": "searching for the best", "nothing fits": "no layout of this job fits",
    "refused": "the best layout is not known", "stopped": "the best layout is not known: the search was stopped",
}  # fmt: skip


def _compared(payload: Payload) -> Sequence[PageCell]:
    """Return how the layout compares with the best."""
    verdict, search = payload["verdict"], payload["search"]
    times = verdict["times_the_best"]
    if not search:
        return ["a bound" if verdict["kind"] == "bound" else "a prediction"]
    if times is None:
        return [NO_BEST[search["outcome"]]]
    if verdict["is_best"] or 0.995 < times < 1.005:
        return ["the best layout" if verdict["is_best"] else "as fast as the best"]
    text = format_share(abs(times - 1)) if times < 1.1 else f"{times:.2g}×"
    number = Number(text, times, path="verdict.times_the_best")
    return [number, " slower than the best" if times > 1 else " faster than the best that leaves a tenth free"]


def _best(payload: Payload) -> list[PageBlock]:
    """Return what the search found, as a layout to take; nothing while it is the answer to a task."""
    search, task = payload["search"], payload.get("task")
    if not search or (task and not task["done"]):
        return []
    if not search["best"]:
        return [_quiet(search["problems"][0] if search["problems"] else "searching all layouts")]
    if (payload.get("verdict") or {}).get("is_best"):
        return [_quiet("of all layouts searched, by the rule of shardwise plan")]
    best = PayloadText(payload, "search.best.").cells("best: {text}, {step_time_s:s}, {memory_bytes:B} ")
    return [Paragraph([*best, Action("take it", {"layout": search["best"]["layout"]})], "quiet best")]


def _facts(payload: Payload) -> Facts:
    text, priced = PayloadText(payload), "estimate.estimate."
    kind = "a bound" if payload["verdict"]["kind"] == "bound" else "predicted"
    interval = text.interval(f"{priced}interval90", "s")
    seqs = payload["estimate"]["layout"]["micro_batch_seqs"]
    rows: dict[str, tuple[str, Sequence[PageCell]]] = {
        "step": (f"{priced}step_time_s:s@step_time_s", [f"{kind}, 90%: ", *interval] if interval else [kind]),
        "lower bound": ("estimate.bound_s:s@bound_s", ["at the best rates measured"]),
        "tokens/s per device": (f"{priced}tokens_per_s_per_device:n@tokens_per_s_per_device", [kind]),
        "MFU": (f"{priced}mfu:%@mfu", text.cells(f"HFU {{{priced}hfu:%@hfu}}")),
        "memory": (f"{priced}memory_bytes:B@memory_bytes", text.cells(f"of {{{priced}memory_capacity_bytes:B}}")),
        "bubble": ("verdict.bubble:%@bubble", ["idle over ideal time"]),
        "micro-batches": (
            "estimate.layout.num_micro_batches:n@num_micro_batches", [f"of {seqs} sequence{'s' if seqs > 1 else ''}"],
        ),
    }  # fmt: skip
    facts = [(name, text.cells(f"{{{path}}}")[0], note) for name, (path, note) in rows.items()]
    return Facts([fact for fact in facts if fact[1]])


def _run_section(payload: Payload) -> PageSection:
    """Return tokens, days, dollars and energy of the whole run; "-" with the reason where a price or a power has no source."""
    text, run = PayloadText(payload, "training_run."), payload["training_run"]

    def row(title: str, name: str, unit: str, note: str = "") -> tuple[str, PageCell, Sequence[PageCell]]:
        if run[name] is None:
            return title, Number("-", None), [run["missing"][name]]
        interval = text.interval(f"interval90.{name}", unit)
        kind = ["90%: ", *interval] if interval else ["a lower bound"]
        return title, text.cells(f"{{{name}:{unit}}}")[0], [*kind, f", {note}"] if note else kind

    assumed = "20 per parameter: the job names none" if run["assumes_optimal_tokens"] else "of the job"
    facts = [
        ("tokens", text.cells("{tokens:count}")[0], [assumed]), ("steps", text.cells("{num_steps:n}")[0], ["optimizer steps"]),
        row("days", "days", "days"), row("dollars", "usd", "$", run["price_date"] and f"prices of {run['price_date']}"),
        row("energy", "energy_mwh", "MWh", "chips alone"),
    ]  # fmt: skip
    goodput = text("goodput {goodput:%}: interruptions and checkpoints are in the days", "quiet")
    return PageSection(title="Whole run", blocks=[Facts(facts), goodput], style="panel run")


def memory_section(memory: Payload, *, half: bool = False) -> PageSection:
    """Return the memory of a device of each stage, by term, beside what it has; equal neighbours are one bar."""
    (layout,) = memory["layouts"]
    stages, capacity, fullest = layout["stages"], memory["memory_capacity_bytes"], layout["fullest_stage"]
    total = layout["memory_bytes"]
    groups = [[index for index, _ in group] for _, group in groupby(enumerate(stages), key=lambda pair: dict(pair[1]))]
    shown = {_stages_name(group, len(stages)): stages[group[0]] for group in groups}
    terms = [term for term in MEMORY_TERMS if any(stage[term] > 0 for stage in stages)]
    table: list[Sequence[PageCell]] = [("stage", *terms, "sum")]
    table += [
        (name, *map(format_bytes, (*(stage[term] for term in terms), sum(stage.values()))))
        for name, stage in shown.items()
    ]
    chart = Rows(
        label=f"memory of a device by stage, of {format_bytes(capacity)}", end=max(capacity, total) * 1.02,
        limit=(capacity, f"{format_bytes(capacity)} of a device"),
        rows=[SpanRow(name, term_spans({term: stage[term] for term in terms}, "B", "memory")) for name, stage in shown.items()],
    )  # fmt: skip
    where = "" if len(stages) == 1 else f" on stage {fullest}, the fullest"
    lead = (Number(format_bytes(total), total, path="memory_bytes"), f" of {format_bytes(capacity)}{where}")
    numbers = DataTable("bytes of a device of each stage", table, folded=True)
    bars = term_list(stages[fullest], terms, "B", "memory")
    return _panel("Memory", Paragraph(lead, "lead"), chart, bars, numbers, half=half)


def _stages_name(stages: Sequence[int], num_stages: int) -> str:
    if num_stages == 1:
        return "every device"
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}–{stages[-1]}"


def _time_section(payload: Payload) -> PageSection:
    """Return the seconds of a step by term, and what of the traffic is hidden; with a run what it measured, beside it."""
    text, priced, run = (
        PayloadText(payload, "estimate.estimate."),
        payload["estimate"]["estimate"],
        payload.get("reconcile"),
    )
    interval, end = text.interval("interval90", "s"), priced["step_time_s"]
    kind = "90% prediction interval " if interval else "a bound"
    lead = [*text.cells("{step_time_s:s@step_time_s}, " + kind), *interval]
    rows = [SpanRow("predicted" if run else "", term_spans(priced["time"], "s", "time"), style="predicted-bar")]
    terms = [term for term in TIME_TERMS if priced["time"][term] > 0]
    blocks: list[PageBlock] = [term_list(priced["time"], terms, "s", "time")]
    if run:
        measured = {term["name"]: term["measured_s"] for term in run["time"]["terms"]}
        measured = {name: measured[name] for name in (*TIME_TERMS, *measured) if name in measured}
        within = {None: "", True: ", inside it", False: ", outside it"}[run["time"]["within"]]
        lead += PayloadText(payload).cells("; {reconcile.time.measured_s:s} measured" + within)
        rows.append(SpanRow("measured", term_spans(measured, "s"), style="measured-bar"))
        blocks.append(_measured_terms(payload, run))
        end = max(end, run["time"]["measured_s"])
    hidden = text.join("* {hidden.*:s}", "hidden")
    blocks.append(
        _quiet("hidden behind compute: ", *hidden) if hidden else _quiet("no traffic is hidden behind compute")
    )
    chart = Rows(label=f"a step of {format_seconds(priced['step_time_s'])} by term", end=end, rows=rows)
    return _panel("Time of a step", Paragraph(lead, "lead"), chart, *blocks, half=True)


def _measured_terms(payload: Payload, run: Payload) -> TermList:
    """Return each measured term, with how many times as long it took as predicted, or by which part longer."""
    text, rows = PayloadText(payload, "reconcile.time.terms."), []
    for index, term in enumerate(run["time"]["terms"]):
        if term["measured_s"] > 0:
            times = term["measured_s"] / term["predicted_s"] if term["predicted_s"] else None
            change = "" if times is None else f"{times - 1:+.0%}" if 0.5 <= times <= 2 else _times_text(times)
            (number,) = text.cells(f"{{{index}.measured_s:s}}")
            rows.append((term["name"], term_words(term["name"]), number, change.replace("-", "−")))
    return TermList(rows, f"measured on {run['machine']}")


def _times_text(times: float) -> str:
    return f"{times:.3g}×" if times < 100 else f"{times:,.0f}×"


def memory_report(payload: Payload) -> PageReport:
    """Return the memory of a device with presets of models."""
    row = _quiet("models: ", *(Action(preset["value"], preset["edit"]) for preset in payload["presets"]))
    if payload["problems"]:
        return [problems_section(payload), PageSection(blocks=[row], style="plain")]
    (layout,) = payload["memory"]["layouts"]
    head = _fit_section(layout, [[f"on {payload['cluster_name']}"]], [_quiet(payload["layout_text"]), row])
    return [head, memory_section(payload["memory"])]


# Passes of a step

PASS_KINDS = {"F": "forward", "B": "backward", "I": "backward for activations", "W": "backward for weights"}
ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # of torch.distributed.pipelining: stage, kind, micro-batch


def truncated(shown: Payload) -> list[PageBlock]:
    """Return how much of a step a picture shows, where that is not all of it."""
    words = {"micro_batches": "micro-batches", "ranks": "ranks", "passes": "passes"}
    counts = [(shown[name], shown[f"num_{name}"], word) for name, word in words.items()]
    parts = [f"{number:,} of {total:,} {word}" for number, total, word in counts if number < total]
    fewer = shown["micro_batches"] < shown["num_micro_batches"]
    note = " Its seconds and its bubble are those of the micro-batches shown." if fewer else ""
    return [Paragraph((f"Truncated: {', '.join(parts)} are shown.{note}",), "truncated")] if parts else []


def action_words(action: str) -> str:
    """Return an action of a pipeline in words.

    >>> action_words("1B0")
    'backward of micro-batch 0 through stage 1'
    """
    match = ACTION.fullmatch(action)
    return f"{PASS_KINDS[match[2]]} of micro-batch {match[3]} through stage {match[1]}" if match else action


def timeline_report(payload: Payload) -> PageReport:
    """Return the simulated step: kernels and traffic of each rank over time, and what a device holds."""
    text, ranks, alone = PayloadText(payload, "simulation."), payload["ranks"], payload["num_ranks"] == 1
    rows: list[SpanRow] = []
    for index, rank in enumerate(ranks):
        place, peak = f"ranks.{index}", max(value for _, value in rank["curve"])
        edges, name = [_pass_edge(*edge) for edge in rank["passes"]], "device" if alone else f"rank {rank['rank']}"
        rows.append(SpanRow(name, height=22, source=f"{place}.compute", edges=edges))
        rows += [SpanRow(stream, height=11, source=f"{place}.streams.{stream}") for stream in rank["streams"]]
        rows.append(SpanRow(format_bytes(peak), height=56 if alone else 28, curve=f"{place}.curve"))
    few = payload["shown"]["micro_batches"] < payload["shown"]["num_micro_batches"]
    lead = text.cells(
        "{estimate.step_time_s:s} a step predicted" + (" of the micro-batches shown" if few else "") + ", {step_time_s:s} "
        "simulated; bubble {bubble:%}; exposed communication: "
    )  # fmt: skip
    lead += text.join("* {exposed.*:s}", "exposed") or ["none"]
    why = payload["simulation"]["difference"]
    differs = [_quiet(f"{why[0].upper()}{why[1:]}. The time that this page prints is the prediction.")] if why else []
    parts = text.table(
        "what the length of the step is made of", "part | seconds | share", "critical_path",
        lambda part: ("waiting for {axis}, " if part["axis"] else "") + "{unit} {phase} | {seconds:s} | {share:%}", folded=True,
    )  # fmt: skip
    chart = Rows(
        label=f"simulated step of {format_seconds(payload['end_s'])}", end=payload["end_s"], rows=rows, ticks="s", min_width=300,
        style="timeline", curve_end=1.08 * max(value for rank in ranks for _, value in rank["curve"]),
        curve_limit=payload["memory_capacity_bytes"],
    )  # fmt: skip
    used = {span[2] for rank in ranks for spans in (rank["compute"], *rank["streams"].values()) for span in spans}
    legend = Legend([(term, term_words(term)) for term in TIME_TERMS if term in used])
    shown = truncated(payload["shown"])
    return [_panel(FIGURE_TITLES["timeline"], Paragraph(lead, "lead"), *differs, *shown, legend, chart, parts)]


def _pass_edge(start: float, end: float, name: str) -> tuple[float, float, str, str, str]:
    """Return a pass of a rank: its micro-batches, its actions in words, and the term whose colour is behind it."""
    words = " and ".join(map(action_words, name.split("&")))
    return (
        start,
        end,
        ACTION.sub(r"\3", name),
        f"{words}, {format_seconds(end - start)}",
        "forward" if "F" in name else "backward",
    )


def schedule_report(payload: Payload) -> PageReport:
    """Return the order of a pipeline's passes, rank by rank, and all schedules side by side."""
    text, line, compared = PayloadText(payload, "schedule."), payload["schedule"], payload["compared"]
    rows = [SpanRow(f"rank {rank['rank']}", [*_pass_spans(rank["slots"])]) for rank in line["ranks"]]
    used = {span.term for row in rows for span in row.spans}
    lengths = [len(rank["slots"]) for rank in line["ranks"]]
    lead = text(
        "{schedule}: {stages:n} " + ("stage" if line["stages"] == 1 else "stages") + ", {micro_batches:n} micro-batches; bubble "
        "{bubble:%} of the ideal time; ranks are idle for {idle_fraction:%} of the step and hold at most {peak_activations:g} "
        "micro-batches",
        "lead",
    )  # fmt: skip
    chart = Rows(
        label=f"{line['schedule']}: {sum(lengths)} passes on {len(rows)} ranks", end=line["makespan_s"], rows=rows, mark="pass",
        min_width=max(300, min(9 * max(lengths), 4000)),
    )  # fmt: skip
    legend = Legend([(words, f"{kind}: {words}") for kind, words in PASS_KINDS.items() if words in used])
    alike = _quiet("stages alike, with the estimate's seconds ", Action("copy the command", command=payload["command"]))
    ranks = text.table(
        "what ranks do", "rank | idle | waits | micro-batches held", "ranks",
        "{rank} | {idle_s:s} | {wait_s:s} | {peak_activations:g}", folded=True,
    )  # fmt: skip
    schedules = _compared_schedules(payload, line) if compared["rows"] else _quiet(compared["problem"])
    shown = truncated(payload["shown"])
    return [_panel("Schedule", lead, *shown, legend, chart, alike, ranks), _panel("All schedules", schedules)]


def _pass_spans(slots: Iterable[Payload]) -> Iterator[Span]:
    for slot in slots:
        start, end, actions = slot["start_s"], slot["end_s"], slot["actions"]
        for lane, action in enumerate(actions):
            match = ACTION.fullmatch(action)
            kind, label = (PASS_KINDS[match[2]], match[3]) if match else ("forward", action)
            title = f"{action_words(action)}, {format_seconds(end - start)}"
            yield Span(start, end, kind, title, label, lane=lane, lanes=len(actions))


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
        PlotPoint(
            kernel["intensity"], kernel["flops"] / kernel["time_s"],
            f"{kernel['phase']} {kernel['name']}: {kernel['intensity']:.3g} FLOPs/byte, {format_seconds(kernel['time_s'])}, "
            f"bound by {kernel['bound']}",
            path=f"roofline.operations.{index}.time_s", term=kernel["phase"],
            shape="circle" if kernel["phase"] == "forward" else "triangle",
        )
        for index, kernel in enumerate(roofline["operations"]) if kernel["flops"] > 0
    ]  # fmt: skip
    x = padded_range([*(point.x for point in points), knee], log=True, room=0.6)
    y = padded_range([*(point.y for point in points), peak, x[0] * rate], log=True, room=0.2)
    marks: list[Curve | Points | Limit] = [
        Curve("roof", [(x[0], x[0] * rate), (knee, peak), (x[1], peak)]),
        Limit(x[1], f"{format_quantity(peak, 'FLOP/s')} {roofline['dtype']}", peak), Points("kernel", points, 5),
    ]  # fmt: skip
    chart = Plot(
        label=f"roofline of a block's kernels on {roofline['chip']}", marks=marks,
        x=PlotAxis("intensity, FLOPs per byte moved", x, log=True), y=PlotAxis("FLOP/s of a device", y, log=True),
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
    legend = Legend([("forward", "forward"), ("backward", "backward")])
    return [_panel(FIGURE_TITLES["roofline"], lead, legend, chart, _quiet(note), table, half=True)]


SLOWEST = 30  # times the fastest step: slower layouts are not drawn
PARETO_KEYS = {
    ".front-key": "on the front", ".searched-key": "fastest of its degrees", ".ring-key": "the plan", ".cross-key": "this layout",
}  # fmt: skip


def pareto_report(payload: Payload) -> PageReport:
    """Return time against memory of the layouts that were searched; a point is a layout to take."""
    search, current, title = payload["search"], payload["own"], FIGURE_TITLES["pareto"]
    if not search.get("front"):
        problems = search.get("problems") or ["searching all layouts of this job"]
        return [_panel(title, _quiet(problems[0]), half=True)]
    best, capacity, front = search["best"], payload["memory_capacity_bytes"], search["front"]
    fastest = min(layout["step_time_s"] for layout in (best, current) if layout)
    searched = [layout for layout in search["points"] if layout["step_time_s"] < SLOWEST * fastest]
    shown = [*searched, *front, *([current] if current else [])]
    low, high = padded_range([*(layout["memory_bytes"] for layout in shown), capacity])
    times = padded_range([layout["step_time_s"] for layout in shown], log=True)
    marks: list[Curve | Points | Limit] = [
        Limit(capacity, f"{format_bytes(capacity)} of a device"), Points("searched", [*map(_layout_point, searched)], 2.6),
        Curve("front", [(layout["memory_bytes"], layout["step_time_s"]) for layout in front]),
        Points("on-front", [*map(_layout_point, front)]), Points("best-ring", [_layout_point(best, "the plan: ")], 9),
        *([Points("own", [_layout_point(current, "this layout: ", "cross")], 8)] if current else []),
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
    return [_panel(title, lead, Legend([*PARETO_KEYS.items()]), chart, _quiet(hint), table, half=True)]


def _layout_point(layout: Payload, name: str = "", shape: str = "circle") -> PlotPoint:
    step, memory = layout["step_time_s"], layout["memory_bytes"]
    title = f"{name}{layout['text']}\n{format_seconds(step)}, {format_bytes(memory)}"
    return PlotPoint(memory, step, title, {} if name else {"layout": layout["layout"]}, shape=shape)


def batch_report(payload: Payload) -> PageReport:
    """Return steps against tokens to the same loss, and the days that each batch takes on this layout."""
    text, fields, options = PayloadText(payload), payload["fields"], payload["noise_options"]
    critical = format_quantity(payload["critical_batch_tokens"])
    title = f"the critical batch: {critical} tokens, twice the fewest steps and the fewest tokens"
    knee = Points("best-ring", [PlotPoint(2 * payload["min_steps"], 2 * payload["min_tokens"], title)], 9)
    trade = _batch_plot(payload, "steps", "steps, S(B)", "tokens", "tokens, E(B)", knee)
    days: list[PageBlock] = [_quiet("no batch has a price on this layout; the table below says why")]
    if any(row["days"] is not None for row in payload["rows"]):
        plot = _batch_plot(payload, "batch_tokens", "batch, tokens", "days", "days on this layout")
        days = [plot, _quiet(fields["rows.*.days"]["formula"])]
    lead = text(
        "{critical_batch_tokens:k} tokens; this batch of {batch_tokens:k} takes {times_min_steps:x} the fewest steps and "
        "{times_min_tokens:x} the fewest tokens",
        "lead",
    )
    formulas = "; ".join(fields[name]["formula"] for name in ("rows.*.steps", "rows.*.tokens", "critical_batch_tokens"))
    notes = [_quiet(f"{formulas}. Closed forms: {fields['critical_batch_tokens']['source']}.")]
    if not payload["noise_given"]:
        noise = fields["noise_tokens"]
        notes.append(
            _quiet(f"No noise scale was given: this is {noise['words']} ({noise['source']}). Measure your own.")
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
    ring = _quiet("the ring is the critical batch: twice the least of both")
    return [
        _panel("Critical batch size", lead, slider, *notes), _panel("Steps and tokens", trade, ring, half=True),
        _panel("Days", *days, half=True), _panel("Batches", table),
    ]  # fmt: skip


def _batch_plot(payload: Payload, x: str, x_title: str, y: str, y_title: str, *marks: Points) -> Plot:
    """Return a value of each batch over another; the job's batch is the large point."""
    rows = [row for row in payload["rows"] if row[y] is not None]
    points = {row["batch_tokens"]: PlotPoint(row[x], row[y], _batch_title(row)) for row in rows}
    job = points.get(payload["batch_tokens"])
    others = [point for point in points.values() if point is not job]
    xs, ys = [row[x] for row in rows], [row[y] for row in rows]
    dots = [Points("batch-dot", others, 4), Points("own-dot", [job] if job else [], 7)]
    return Plot(
        label=f"{y_title} over {x_title} to the same loss", marks=[Curve("front", [*zip(xs, ys, strict=True)]), *dots, *marks],
        x=PlotAxis(x_title, padded_range(xs, log=True), log=True), y=PlotAxis(y_title, padded_range(ys, log=True), log=True),
    )  # fmt: skip


def _batch_title(row: Payload) -> str:
    batch, tokens = format_quantity(row["batch_tokens"]), format_quantity(row["tokens"])
    days = "" if row["days"] is None else f", {row['days']:.3g} days"
    return f"{batch} tokens: {row['steps']:,.0f} steps, {tokens} tokens{days}"


STATES = {"rest": "at rest", "use": "in use", "gradient": "gradient", "optimizer": "optimizer"}
NOTATION_WORDS = (
    "Axes of degree 1 are left out. Ranks are numbered with the last axis the fastest to vary. tp is tp_kv · tp_rep: key-value "
    "heads are split over tp_kv, and each has copies over tp_rep. The hidden state rests as X{hidden}. W[D_fsdp, F_tp] is split "
    "over fsdp along D and over tp along F; {{U_tp}} is a partial sum over tp."
)


def notation_report(payload: Payload) -> PageReport:
    """Return the mesh, who holds which part of a weight, and every weight in the named-axis notation."""
    text = PayloadText(payload)
    weights = [
        (f"{unit}.{weight['name']}", weight, f"units.{unit}.weights.{index}.")
        for unit, kind in payload["units"].items() for index, weight in enumerate(kind["weights"])
    ]  # fmt: skip
    sizes = ", ".join(
        f"{axis['axis']}: {{mesh.{index}.size:n}}" for index, axis in enumerate(payload["mesh"]) if axis["size"] > 1
    )
    first = max(weights, key=lambda named: math.prod(named[1]["shards"]["rest"]["parts"]))[0]
    options = [
        ((name, words), _part_blocks(PayloadText(payload, f"{place}shards.{state}."), weight, state))
        for name, weight, place in weights for state, words in STATES.items()
    ]  # fmt: skip
    choices = Choices((("notation-weight", "weight"), ("notation-state", "state")), (first, STATES["rest"]), options)
    table: list[Sequence[PageCell]] = [("weight", "shape", *STATES.values(), "part at rest", "copies")]
    for name, weight, place in weights:
        rest = weight["shards"]["rest"]
        part = Number(_sizes_text(rest["shape"]), rest["elements"], path=f"{place}shards.rest.elements")
        (copies,) = text.cells(f"{{{place}shards.rest.copies:n}}")
        shape = " ".join(f"{dim}={size:,}" for dim, size in weight["shape"].items())
        table.append((name, shape, *(weight["specs"][state] for state in STATES), part, copies))
    mesh = text("{{" + (sizes or "one device") + "}}", "lead")
    every = DataTable("where each weight of a unit lies", table)
    mesh_panel = _panel("The mesh", mesh, text(NOTATION_WORDS, "quiet"))
    return [mesh_panel, _panel("Who holds which part", choices), _panel("Every weight", every)]


def _sizes_text(sizes: Iterable[int]) -> str:
    return " × ".join(f"{size:,}" for size in sizes)


def _part_blocks(text: PayloadText, weight: Payload, state: str) -> list[PageBlock]:
    """Return the size of a device's part of a weight, and the parts as a grid with the ranks that hold them."""
    shard, dims = weight["shards"][state], weight["shape"]
    shape = " × ".join(f"{dim}={size:,}" for dim, size in dims.items())
    head = f"{weight['name']}{weight['specs'][state]}: {_sizes_text(shard['shape'])} of {shape}, "
    counts = text.cells(
        "{elements:k} elements on a device, each part on {copies:n} device" + "s" * (shard["copies"] != 1)
    )
    lead = Paragraph([head, *counts], "lead")
    if not shard["holders"]:
        return [lead, _quiet("too many parts to draw")]
    parts = zip(dims, shard["parts"], strict=True)
    down, across, *_ = [
        *((index, f"{dim} in {number}") for index, (dim, number) in enumerate(parts) if number > 1),
        None,
        None,
    ]
    label = f"parts of {weight['name']} and the ranks that hold them"
    chart = ShardCells(label=label, source=text.prefix.rstrip("."), down=down, across=across)
    return [lead, chart, _quiet("ranks of the first pipeline stage")]


REPORTS: Mapping[str, Callable[[Payload], PageReport]] = {
    "overview": overview_report, "timeline": timeline_report, "roofline": roofline_report, "pareto": pareto_report,
    "notation": notation_report, "memory": memory_report, "schedule": schedule_report, "batch": batch_report,
}  # fmt: skip
