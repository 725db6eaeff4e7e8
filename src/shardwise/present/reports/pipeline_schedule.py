"""Reports of pipeline schedules: a played one with a timeline of characters, and all of them side by side."""

from __future__ import annotations

from shardwise.pipeline import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    ScheduleComparison,
    Slot,
    Timeline,
)
from shardwise.pipeline.messages import count_messages
from shardwise.present.charts.step_charts import bubble_line, title_of
from shardwise.present.rendering.numbers import count, percent, significant
from shardwise.present.rendering.report import Line, Number, Preformatted, Report, Row, Section, Table

MAX_WIDTH = 116  # columns, where there is no terminal
IDLE, PAIR = ".", "&"
DEFAULT_TIMES = "  F, I and W take 1 s each, and B is I and W; --times sets others"
FILL = {FORWARD: ">", FULL_BACKWARD: "<", BACKWARD_INPUT: "<", BACKWARD_WEIGHT: "="}
LEGEND = {
    FORWARD: "F> forward",
    FULL_BACKWARD: "B< backward",
    BACKWARD_INPUT: "I< backward for activations",
    BACKWARD_WEIGHT: "W= backward for weights",
}


def timeline_report(timeline: Timeline) -> Report:
    """Report a schedule: its bubble, the timeline, what ranks hold."""
    kinds = {action.kind for _, _, action in timeline.actions.actions()}
    legend = [text for kind, text in LEGEND.items() if kind in kinds]
    if any(len(slot) > 1 for slots in timeline.actions.order for slot in slots):
        legend.append("F1&B0 together")
    messages = sum(count_messages(timeline.actions).values())
    bars = Preformatted(lambda width: draw_bars(timeline, width or MAX_WIDTH))
    return [
        Section(
            [
                Line(("  ", *bubble_line(timeline).parts)),
                *([DEFAULT_TIMES] if timeline.has_default_times else []),
                Line(("  ", count(messages, "messages"), " messages between ranks")),
            ],
            title=title_of(timeline.actions),
        ),
        Section([bars, f"  {', '.join(legend)}, {IDLE} idle"]),
        Section([_rank_table(timeline)]),
    ]


def draw_bars(timeline: Timeline, width: int) -> list[str]:
    """Return a line for each rank. A slot is written with its number where there is room, else as its letter."""
    names = [f"rank {rank}" for rank in range(timeline.actions.num_ranks)]
    room = width - max(map(len, names)) - 3
    scale = _columns_per_second(timeline, room)
    columns = round(timeline.makespan * scale)
    lines = []
    for rank, name in enumerate(names):
        row = [IDLE] * columns
        slots = zip(timeline.actions.order[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        for slot, start, end in slots:
            first, last = round(start * scale), round(end * scale)
            row[first:last] = _slot_characters(slot, last - first)
        lines.append(f"{name.ljust(max(map(len, names)))} |{''.join(row)}|")
    return lines


def _columns_per_second(timeline: Timeline, room: int) -> float:
    """Return the columns of a second with which every slot has room for its label and one column more, or all fit in the room.

    The shortest slot has a whole number of columns where there is room, so that slots that take alike look alike.
    """
    durations = [(slot, end - start) for _, slot, start, end in timeline.slots() if end > start]
    if not durations:
        return 0.0
    shortest_s = min(seconds for _, seconds in durations)
    readable = max((len(_slot_label(slot)) + (len(slot) == 1)) / seconds for slot, seconds in durations)
    scale = min(readable, room / timeline.makespan)
    return max(int(scale * shortest_s + 1e-9), 1) / shortest_s if scale * shortest_s >= 1 else scale


def _slot_label(slot: Slot) -> str:
    return PAIR.join(f"{action.kind}{action.micro_batch}" for action in slot)


def _slot_characters(slot: Slot, columns: int) -> str:
    """Return a slot in so many columns: kind and micro-batch, filled up; the kind alone where there is no room."""
    label = _slot_label(slot)
    label = label if len(label) <= columns else slot[0].kind
    return (label + FILL[slot[-1].kind] * columns)[:columns]


def _rank_table(timeline: Timeline) -> Table:
    idle, waits, makespan = timeline.idle(), timeline.waits(), timeline.makespan
    rows: list[Row] = [("rank", "idle", "idle between its passes", "micro-batches held", "for W only")]
    rows += [
        (
            str(rank), percent(idle[rank] / makespan if makespan else 0.0),
            Number(f"{waits[rank]:.6g} s", waits[rank], "s", f"ranks.{rank}.wait_s"),
            significant(timeline.peak_activations[rank], f"ranks.{rank}.peak_activations"),
            significant(timeline.peak_waiting[rank], f"ranks.{rank}.peak_waiting"),
        )
        for rank in range(timeline.actions.num_ranks)
    ]  # fmt: skip
    return Table(rows=tuple(rows), right=range(5))


def comparison_report(comparison: ScheduleComparison) -> Report:
    """Report all schedules: a table for each number of micro-batches."""
    head: Row = ("schedule", "virtual stages", "bubble", "holds at most", "messages")
    sections = []
    for number in dict.fromkeys(row.micro_batches for row in comparison.rows):
        rows = [(index, row) for index, row in enumerate(comparison.rows) if row.micro_batches == number]
        cells: list[Row] = [
            (
                row.schedule, significant(row.virtual_stages, f"schedules.{index}.virtual_stages", digits=6),
                percent(row.bubble, f"schedules.{index}.bubble"),
                significant(row.peak_activations, f"schedules.{index}.peak_activations"),
                count(row.messages, f"schedules.{index}.messages"),
            )
            for index, row in rows
        ]  # fmt: skip
        sections.append(Section([], title=f"{rows[0][1].stages} stages, {number} micro-batches"))
        sections.append(Section([Table(rows=(head, *cells), right=range(1, 5))]))
    notes = "holds: activations in micro-batches of a stage; bubble: idle over ideal time"
    return [*sections, Section([notes])]
