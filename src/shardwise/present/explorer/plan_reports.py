"""Reports of the overview and of memory: the verdict, the whole run, memory and time by term."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardwise.present.charts.chart import RuleLine, StackedBars
from shardwise.present.charts.common_charts import categories, length_axis, row_chart
from shardwise.present.explorer.page_sections import panel, quiet, term_bar, term_list, term_words
from shardwise.present.rendering.page_report import (
    Bullets,
    DataTable,
    Facts,
    PageAction,
    PageBlock,
    PageCell,
    PageReport,
    PageSection,
    Paragraph,
    TermList,
)
from shardwise.present.rendering.payload_text import Payload, PayloadText, format_share
from shardwise.present.rendering.report import Number
from shardwise.present.reports.wording import FIT_ANSWERS
from shardwise.price.device_memory import TIGHT_MARGIN
from shardwise.values import MEMORY_TERMS, TIME_TERMS, format_bytes, format_seconds


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
        title = "Whether this layout runs is not known"
        return PageSection(title=title, blocks=blocks, style="verdict cannot", mark="bad")
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


# Words for a search that found no layout. A search that was stopped, or whose job was refused, says nothing about fit.
SEARCH_OUTCOMES = {
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
        return [SEARCH_OUTCOMES[search["outcome"]]]
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
        return [quiet(search["problems"][0] if search["problems"] else "searching all layouts")]
    if (payload.get("verdict") or {}).get("is_best"):
        return [quiet("of all layouts searched, by the rule of shardwise plan")]
    best = PayloadText(payload, "search.best.").cells("best: {text}, {step_time_s:s}, {memory_bytes:B} ")
    return [Paragraph([*best, PageAction("take it", {"layout": search["best"]["layout"]})], "quiet best")]


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
    stage_bars = {_stages_name(group, len(stages)): stages[group[0]] for group in groups}
    terms = [term for term in MEMORY_TERMS if any(stage[term] > 0 for stage in stages)]
    table: list[Sequence[PageCell]] = [("stage", *terms, "sum")]
    table += [
        (name, *map(format_bytes, (*(stage[term] for term in terms), sum(stage.values()))))
        for name, stage in stage_bars.items()
    ]
    bars = (term_bar({term: stage[term] for term in terms}, "B", "memory") for stage in stage_bars.values())
    limit = RuleLine(at=capacity, label=f"{format_bytes(capacity)} of a device", limit=True)
    chart = row_chart(
        f"memory of a device by stage, of {format_bytes(capacity)}", length_axis(max(capacity, total) * 1.02),
        categories(stage_bars), [StackedBars(bars=tuple(bars), totals=False), limit],
    )  # fmt: skip
    where = "" if len(stages) == 1 else f" on stage {fullest}, the fullest"
    lead = (Number(format_bytes(total), total, path="memory_bytes"), f" of {format_bytes(capacity)}{where}")
    numbers = DataTable("bytes of a device of each stage", table, folded=True)
    colours = term_list(stages[fullest], terms, "B", "memory")
    return panel("Memory", Paragraph(lead, "lead"), chart, colours, numbers, half=half)


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
    bars = {"predicted" if run else "": term_bar(priced["time"], "s", "time")}
    terms = [term for term in TIME_TERMS if priced["time"][term] > 0]
    blocks: list[PageBlock] = [term_list(priced["time"], terms, "s", "time")]
    if run:
        measured = {term["name"]: term["measured_s"] for term in run["time"]["terms"]}
        measured = {name: measured[name] for name in (*TIME_TERMS, *measured) if name in measured}
        within = {None: "", True: ", inside it", False: ", outside it"}[run["time"]["within"]]
        lead += PayloadText(payload).cells("; {reconcile.time.measured_s:s} measured" + within)
        bars["measured"] = term_bar(measured, "s")
        blocks.append(_measured_terms(payload, run))
        end = max(end, run["time"]["measured_s"])
    hidden = text.join("* {hidden.*:s}", "hidden")
    blocks.append(quiet("hidden behind compute: ", *hidden) if hidden else quiet("no traffic is hidden behind compute"))
    title = f"a step of {format_seconds(priced['step_time_s'])} by term"
    chart = row_chart(title, length_axis(end), categories(bars), [StackedBars(bars=tuple(bars.values()), totals=False)])
    return panel("Time of a step", Paragraph(lead, "lead"), chart, *blocks, half=True)


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
    row = quiet("models: ", *(PageAction(preset["value"], preset["edit"]) for preset in payload["presets"]))
    if payload["problems"]:
        return [problems_section(payload), PageSection(blocks=[row], style="plain")]
    (layout,) = payload["memory"]["layouts"]
    head = _fit_section(layout, [[f"on {payload['cluster_name']}"]], [quiet(payload["layout_text"]), row])
    return [head, memory_section(payload["memory"])]
