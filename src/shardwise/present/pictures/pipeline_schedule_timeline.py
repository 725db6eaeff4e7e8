"""A played action list as a picture and as a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwise.pipeline import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Action,
    ActionList,
    Slot,
    Timeline,
)
from shardwise.pipeline.messages import remote_dependencies
from shardwise.present.draw.notebook import Shown, Table
from shardwise.present.draw.palette import TERM_COLOURS, Colour
from shardwise.present.draw.timeline import Part, Row, Span, TimelineChart
from shardwise.present.draw.trace import Arrow, Event, chrome_trace
from shardwise.values import InputError, format_percent, pluralize

MOST_DRAWN = 8192  # slots: more are no picture that a browser shows well
TERMS = {
    FORWARD: "forward",
    FULL_BACKWARD: "backward",
    BACKWARD_INPUT: "backward for activations",
    BACKWARD_WEIGHT: "backward for weights",
}


def legend_of(line: ActionList) -> tuple[tuple[Colour, str], ...]:
    """The kinds of action that a list has, with their colours."""
    kinds = {action.kind for _, _, action in line.actions()}
    return tuple((TERM_COLOURS[term], f"{kind}: {term}") for kind, term in TERMS.items() if kind in kinds)


def timeline_chart(line: Timeline) -> TimelineChart:
    """The picture: a row for each rank, a span for each slot with its micro-batches. Raises `InputError` for too large a list."""
    num_slots = sum(map(len, line.starts))
    if num_slots > MOST_DRAWN:
        raise InputError(
            f"--draw: found {num_slots:,} slots; at most {MOST_DRAWN:,} are drawn: fewer stages or micro-batches"
        )
    return TimelineChart(
        title=title_of(line.actions),
        subtitle=bubble_text(line),
        end=line.makespan,
        rows=tuple(_row(line, rank) for rank in range(line.actions.num_ranks)),
        legend=legend_of(line.actions),
        curve_title="activations held, in micro-batches of a stage",
    )


def shown_timeline(line: Timeline) -> Shown:
    """A played list in a notebook."""
    facts = {
        "length": f"{line.makespan:.6g} s", "idle": format_percent(line.idle_fraction),
        "bubble, idle over ideal time": format_percent(line.bubble),
        "activations at most, in micro-batches of a stage": f"{max(line.peak_activations, default=0.0):.4g}",
    }  # fmt: skip
    return Shown(title=title_of(line.actions), tables=(Table.of(facts),), charts=lambda: (timeline_chart(line),))


def title_of(actions: ActionList) -> str:
    """The schedule and its sizes."""
    v = actions.num_virtual_stages
    virtual = f", {v:g} virtual stages on each" if v != 1 else ""
    many = "es" if actions.num_micro_batches > 1 else ""
    stages = (
        f"{actions.name}: {pluralize(actions.num_ranks, 'stage')}{virtual}" if actions.num_ranks > 1 else "no pipeline"
    )
    return f"{stages}, {actions.num_micro_batches:,} micro-batch{many}"


def bubble_text(line: Timeline) -> str:
    """The bubble in words."""
    idle, bubble, local = map(format_percent, (line.idle_fraction, line.bubble, line.local_bubble))
    within = f"{local} from a rank's first pass to its last"
    return f"{line.makespan:.6g} s, {idle} of it idle; bubble {bubble} of the ideal time ({within})"


def _row(line: Timeline, rank: int) -> Row:
    own = sorted({action.stage for slot in line.actions.order[rank] for action in slot})
    slots = zip(line.actions.order[rank], line.starts[rank], line.ends[rank], strict=True)
    spans = tuple(Span(start=start, end=end, parts=parts_of(slot, own)) for slot, start, end in slots)
    idle = line.idle()[rank] / line.makespan if line.makespan else 0.0
    return Row(
        label=f"rank {rank}", note=f"{format_percent(idle)} idle", spans=spans, curve=tuple(line.memory(rank))
    )  # fmt: skip


def parts_of(slot: Slot, own: Sequence[int], *, labelled: bool = True) -> tuple[Part, ...]:
    """The actions of a slot, of a rank with some stages: every other one of these has a stripe."""
    return tuple(
        Part(
            fill=TERM_COLOURS[TERMS[action.kind]], label=str(action.micro_batch) if labelled else "",
            striped=own.index(action.stage) % 2 == 1,
        )
        for action in slot
    )  # fmt: skip


def trace_text(line: Timeline) -> str:
    """The list as a trace for Chrome and Perfetto: a process for each rank, an arrow for each message between ranks."""
    events = {
        action: Event(
            name=str(action), process=rank, stream="compute", start=start, end=end, category=action.kind,
            args={"stage": action.stage, "micro_batch": action.micro_batch, "together": _others(slot, action)},
        )
        for rank, slot, start, end in line.slots()
        for action in slot
    }  # fmt: skip
    names = [f"rank {rank}" for rank in range(line.actions.num_ranks)]
    return chrome_trace(names, events.values(), arrows_of(line.actions, events))


def arrows_of(actions: ActionList, events: Mapping[Action, Event]) -> Iterator[Arrow]:
    """An arrow for each message between ranks."""
    for action, event in events.items():
        for needed in remote_dependencies(actions, action):
            if needed in events and events[needed].process != event.process:
                yield Arrow(name=str(needed), source=events[needed], target=event)


def _others(slot: Slot, action: Action) -> list[str]:
    return [str(other) for other in slot if other != action]
