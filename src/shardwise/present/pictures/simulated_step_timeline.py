"""A simulated step as a picture and as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from shardwise.pipeline import Action
from shardwise.present.draw.notebook import Shown, Table
from shardwise.present.draw.palette import INK, TERM_COLOURS, Colour
from shardwise.present.draw.timeline import Part, Row, Span, TimelineChart
from shardwise.present.draw.trace import Event, chrome_trace
from shardwise.present.pictures.pipeline_schedule_timeline import arrows_of, legend_of, parts_of, title_of
from shardwise.price import SimulatedStep, Simulation, TimedKernel
from shardwise.price.simulation.result import EXPOSED_AXES, MemoryCurve
from shardwise.price.simulation.streams import StreamEvent as Done
from shardwise.step import COMPUTE
from shardwise.values import InputError, format_bytes, format_percent, format_seconds

MOST_DRAWN = 4096  # passes: a browser does not show more well
MOST_TRACED = 1_000_000  # events: a trace of them is 200 MB
FINEST = 2000.0  # parts of the step: anything closer is drawn as one


def step_chart(simulation: Simulation) -> TimelineChart:
    """The picture: for each rank a row of its kernels, pass by pass, with gaps where it waits, and a thin row for each stream
    of communication; next to it the live memory of a device. Raises `InputError` for more passes than a picture shows."""
    found = simulation.step
    num_slots = sum(map(len, found.clock.starts))
    if num_slots > MOST_DRAWN:
        raise InputError(
            f"--draw: found {num_slots:,} passes; at most {MOST_DRAWN:,} are drawn: a plan of fewer micro-batches or stages"
        )
    streams = _streams(found)
    legend = [*legend_of(found.actions), (TERM_COLOURS["optimizer"], "update")]
    legend += [(_colour(stream), f"{stream} traffic") for stream in streams]
    exposed = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in simulation.exposed.items())
    return TimelineChart(
        title=f"{found.pricing.architecture.name}, {title_of(found.actions)}",
        subtitle=f"{format_seconds(found.step_time_s)} a step; bubble {format_percent(simulation.bubble)}"
        + (f"; exposed: {exposed}" if exposed else ""),
        end=found.step_time_s, rows=tuple(_rows(found, simulation.memories, streams)), legend=tuple(legend),
        curve_title="memory of a device, GB",
    )  # fmt: skip


def shown_simulation(simulation: Simulation) -> Shown:
    """A simulated step in a notebook."""
    facts = {
        "step": format_seconds(simulation.step_time_s), "bubble": format_percent(simulation.bubble),
        "memory at most": format_bytes(simulation.peak_bytes),
    } | {f"exposed {axis}": format_seconds(seconds) for axis, seconds in simulation.exposed.items()}  # fmt: skip
    title = f"A step of {simulation.step.pricing.architecture.name}, simulated"
    return Shown(title=title, tables=(Table.of(facts),), charts=lambda: (step_chart(simulation),))


def _streams(found: SimulatedStep) -> tuple[str, ...]:
    """The communication streams of any rank, in the order of the axes."""
    every = (event.stream for one in ({*chain(*found.slot_timelines)} | {*found.updates}) for event in one.events)
    used = {stream for stream in every if stream != COMPUTE}
    return tuple(sorted(used, key=[*EXPOSED_AXES, *sorted(used)].index))


def _rows(found: SimulatedStep, memories: Sequence[MemoryCurve], streams: Sequence[str]) -> Iterator[Row]:
    for rank, memory in enumerate(memories):
        idle = found.ranks[rank].bubble_s / found.step_time_s
        held = tuple((when, held / 1e9) for when, held in memory.curve)
        label = "device" if len(memories) == 1 else f"rank {rank}"
        yield Row(label=label, note=f"{format_percent(idle)} idle", spans=tuple(_computing(found, rank)), curve=held)
        for stream in streams:
            times = sorted((start, end) for one, start, end in events(found, rank) if one.stream == stream)
            spans = tuple(_span(start, end, stream) for start, end in _merged(found, times))
            yield Row(label=stream, note="", spans=spans, thin=True)


def _computing(found: SimulatedStep, rank: int) -> Iterator[Span]:
    """The kernels of each pass, and of the update; the first span of a pass that has room for it has its micro-batch."""
    own = found.rank_stages[rank]
    for slot, played, start, _ in found.slots(rank):
        times = [(start + event.start, start + event.end) for event in played.events if event.stream == COMPUTE]
        spans = _merged(found, times)
        longest = max(spans, key=lambda span: span[1] - span[0], default=None)
        yield from (Span(start=a, end=b, parts=parts_of(slot, own, labelled=(a, b) == longest)) for a, b in spans)
    update = (
        (found.passes_s + one.start, found.passes_s + one.end)
        for one in found.updates[rank].events
        if one.stream == COMPUTE
    )
    yield from (_span(start, end, "optimizer") for start, end in _merged(found, update))


def _span(start: float, end: float, term: str) -> Span:
    return Span(start=start, end=end, parts=(Part(fill=_colour(term)),))


def _colour(term: str) -> Colour:
    """The colour of a term; for a stream without a term, the ink's."""
    return TERM_COLOURS.get(term, INK)


def _merged(found: SimulatedStep, times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals in order; those too close to be distinguished are merged."""
    merged: list[tuple[float, float]] = []
    for start, end in times:
        if merged and start - merged[-1][1] <= found.step_time_s / FINEST:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def events(found: SimulatedStep, rank: int) -> Iterator[tuple[Done, float, float]]:
    """The work of a rank's streams in the step, with start and end."""
    left = {(one.slot, one.event): one for one in found.trailing[rank]}
    for number, (_, played, begin, _) in enumerate(found.slots(rank)):
        for place, one in enumerate(played.events):
            late = left.get((number, place))
            yield one, late.start if late else begin + one.start, late.end if late else begin + one.end
    for one in found.updates[rank].events:
        yield one, found.passes_s + one.start, found.passes_s + one.end


def trace_text(found: SimulatedStep) -> str:
    """The step as a trace for Chrome and Perfetto: a process for each stage, with the passes, every kernel and every transfer
    on its stream; arrows are messages between stages. Raises `InputError` for more events than a browser opens.
    """
    ranks = range(found.actions.num_ranks)
    number = sum(len(played.events) for plays in found.slot_timelines for played in plays)
    if number > MOST_TRACED:
        raise InputError(
            f"--trace: found {number:,} kernels and transfers; at most {MOST_TRACED:,} are written: a plan of fewer micro-batches"
        )
    passes, done = planned_events(found)
    names = [f"stage {rank}" if len(ranks) > 1 else "device" for rank in ranks]
    return chrome_trace(names, [*passes.values(), *done], arrows_of(found.actions, passes))


def planned_events(found: SimulatedStep, first: int = 0) -> tuple[dict[Action, Event], list[Event]]:
    """The passes of all stages, and every kernel and transfer; the process of the first stage has the number `first`."""
    ranks = range(found.actions.num_ranks)
    passes = {
        one: Event(
            name=str(one), process=first + rank, stream="passes", start=start, end=end, category=one.kind,
            args={"stage": one.stage, "micro_batch": one.micro_batch},
        )
        for rank in ranks
        for slot, _, start, end in found.slots(rank)
        for one in slot
    }  # fmt: skip
    return passes, [_traced(one, first + rank, *times) for rank in ranks for one, *times in events(found, rank)]


def _traced(one: Done, rank: int, start: float, end: float) -> Event:
    what = one.work
    if isinstance(what, TimedKernel):
        return Event(
            name=what.name, process=rank, stream=one.stream, start=start, end=end, category=what.phase, args={"unit": what.unit}
        )  # fmt: skip
    return Event(
        name=what.name, process=rank, stream=one.stream, start=start, end=end, category="traffic",
        args={"unit": what.unit, "axis": what.axis},
    )  # fmt: skip
