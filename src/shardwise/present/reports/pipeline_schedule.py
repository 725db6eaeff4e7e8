"""A played schedule, as sections: a timeline of characters, and tables."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.pipeline import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Slot, Timeline
from shardwise.pipeline.compare_schedules import ScheduleFigures
from shardwise.pipeline.messages import count_messages
from shardwise.present.charts.step_charts import bubble_text, title_of
from shardwise.present.rendering.report import Preformatted, Report, Row, Section, Table
from shardwise.values import format_percent

WIDEST = 116  # columns, where there is no terminal
IDLE, PAIR = ".", "&"
DEFAULT_TIMES = "  F, I and W take 1 s each, and B is I and W; --times sets others"
FILL = {FORWARD: ">", FULL_BACKWARD: "<", BACKWARD_INPUT: "<", BACKWARD_WEIGHT: "="}
LEGEND = {
    FORWARD: "F> forward",
    FULL_BACKWARD: "B< backward",
    BACKWARD_INPUT: "I< backward for activations",
    BACKWARD_WEIGHT: "W= backward for weights",
}


def timeline_report(line: Timeline, *, defaults: bool = False) -> Report:
    """The schedule, its bubble, the timeline, what ranks hold. `defaults`: its seconds are those of passes without `--times`."""
    kinds = {action.kind for _, _, action in line.actions.actions()}
    legend = [words for kind, words in LEGEND.items() if kind in kinds]
    if any(len(slot) > 1 for slots in line.actions.order for slot in slots):
        legend.append("F1&B0 together")
    total = sum(count_messages(line.actions).values())
    drawn = Preformatted(lambda width: bars(line, width or WIDEST))
    return [
        Section(
            [f"  {bubble_text(line)}", *([DEFAULT_TIMES] if defaults else []), f"  {total:,} messages between ranks"],
            title=title_of(line.actions),
        ),
        Section([drawn, f"  {', '.join(legend)}, {IDLE} idle"]),
        Section([_ranks(line)]),
    ]


def bars(line: Timeline, width: int) -> list[str]:
    """A line for each rank. A slot is written with its number where there is room, else as its letter."""
    names = [f"rank {rank}" for rank in range(line.actions.num_ranks)]
    room = width - max(map(len, names)) - 3
    scale = _scale(line, room)
    columns = round(line.makespan * scale)
    found = []
    for rank, name in enumerate(names):
        row = [IDLE] * columns
        for slot, start, end in zip(line.actions.order[rank], line.starts[rank], line.ends[rank], strict=True):
            first, last = round(start * scale), round(end * scale)
            row[first:last] = _written(slot, last - first)
        found.append(f"{name.ljust(max(map(len, names)))} |{''.join(row)}|")
    return found


def _scale(line: Timeline, room: int) -> float:
    """Columns of a second with which every slot has room for its label and one column more, or all of them have room.

    The shortest slot has a whole number of columns where there is room, so that slots that take alike look alike.
    """
    lasting = [(slot, end - start) for _, slot, start, end in line.slots() if end > start]
    if not lasting:
        return 0.0
    shortest = min(seconds for _, seconds in lasting)
    wanted = max((len(_label(slot)) + (len(slot) == 1)) / seconds for slot, seconds in lasting)
    scale = min(wanted, room / line.makespan)
    return max(int(scale * shortest + 1e-9), 1) / shortest if scale * shortest >= 1 else scale


def _label(slot: Slot) -> str:
    return PAIR.join(f"{action.kind}{action.micro_batch}" for action in slot)


def _written(slot: Slot, columns: int) -> str:
    """A slot in so many columns: kind and micro-batch, filled up; the kind alone where there is no room."""
    label = _label(slot)
    label = label if len(label) <= columns else slot[0].kind
    return (label + FILL[slot[-1].kind] * columns)[:columns]


def _ranks(line: Timeline) -> Table:
    idle, waits, makespan = line.idle(), line.waits(), line.makespan
    rows: list[Row] = [("rank", "idle", "idle between its passes", "micro-batches held", "for W only")]
    rows += [
        (
            str(rank), format_percent(idle[rank] / makespan if makespan else 0.0), f"{waits[rank]:.6g} s",
            f"{line.peak_activations[rank]:.4g}", f"{line.peak_waiting[rank]:.4g}",
        )
        for rank in range(line.actions.num_ranks)
    ]  # fmt: skip
    return Table(rows=tuple(rows), right=range(5))


def comparison_report(rows: Sequence[ScheduleFigures]) -> Report:
    """A table for each number of micro-batches."""
    head = ("schedule", "virtual stages", "bubble", "holds at most", "messages")
    sections = []
    for number in dict.fromkeys(row.micro_batches for row in rows):
        own = [row for row in rows if row.micro_batches == number]
        cells: tuple[Row, ...] = tuple(
            (row.schedule, f"{row.virtual_stages:g}", format_percent(row.bubble), f"{row.peak_activations:.4g}",
            f"{row.messages:,}") for row in own
        )  # fmt: skip
        sections.append(Section([], title=f"{own[0].stages} stages, {number} micro-batches"))
        sections.append(Section([Table(rows=(head, *cells), right=range(1, 5))]))
    said = "holds: activations in micro-batches of a stage; bubble: idle over ideal time"
    return [*sections, Section([said])]
