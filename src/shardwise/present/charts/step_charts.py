"""Timelines and traces of a simulated step, of a pipeline schedule and of a measured step; memory over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from shardwise.pipeline import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    ActionList,
    Slot,
    Timeline,
)
from shardwise.present.charts.chart import Axis, Band, Category, Chart, Curve, LegendEntry, Pairs, RuleLine, Span
from shardwise.present.charts.common_charts import curve_chart, timeline
from shardwise.present.charts.palette import TERM_COLOURS
from shardwise.present.rendering.numbers import percent
from shardwise.present.rendering.report import Line, Number
from shardwise.present.traces import events, merge_spans
from shardwise.price import SimulatedStep, Simulation
from shardwise.price.simulation.result import EXPOSED_AXES
from shardwise.records.step_inspection import MemoryTrace
from shardwise.step import COMPUTE
from shardwise.values import InputError, format_bytes, format_percent, format_seconds, pluralize

MAX_STEP_SPANS = 4096  # passes: a browser does not show more well
FINEST = 2000.0  # parts of the step: anything closer is drawn as one


def step_chart(simulation: Simulation) -> Chart:
    """Return for each rank a row of its kernels, pass by pass, with gaps where it waits, and a thin row for each stream of
    communication; next to it the live memory of a device. Raises `InputError` for more passes than a picture shows."""
    step = simulation.step
    num_slots = sum(map(len, step.clock.starts))
    if num_slots > MAX_STEP_SPANS:
        raise InputError(
            f"--draw: found {num_slots:,} passes; at most {MAX_STEP_SPANS:,} are drawn: a plan of fewer micro-batches or stages"
        )
    streams = _streams(step)
    exposed = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in simulation.exposed.items())
    labels = {"term:optimizer": "update", **{_colour(stream): f"{stream} traffic" for stream in streams}}
    rows, spans, memory_curves = list[Category](), list[Span](), dict[int, Pairs]()
    for rank, memory in enumerate(simulation.memories):
        memory_curves[len(rows)] = tuple((when, num_bytes / 1e9) for when, num_bytes in memory.curve)
        spans += _computing(step, rank, len(rows))
        label = "device" if len(simulation.memories) == 1 else f"rank {rank}"
        rows.append(_row(label, step.ranks[rank].bubble_s / step.step_time_s))
        for stream in streams:
            times = [(start, end) for event, start, end in events(step, rank) if event.stream == stream]
            spans += (
                Span(row=len(rows), start=start, end=end, colour=_colour(stream), hover=f"{stream} traffic")
                for start, end in _merged(step, times)
            )
            rows.append(Category(label=stream, thin=True))
    estimated = f", {format_seconds(simulation.estimate.step_time_s)} estimated" if simulation.difference else ""
    return timeline(
        f"{step.pricing.architecture.name}, {title_of(step.actions)}",
        f"{format_seconds(step.step_time_s)} a step simulated{estimated}; bubble {format_percent(simulation.bubble)}"
        + (f"; exposed: {exposed}" if exposed else ""),
        step.step_time_s, rows, spans, memory_curves, curves_title="memory of a device, GB",
        legend=[*legend_of(step.actions), *(LegendEntry(label=label, colour=colour) for colour, label in labels.items())],
    )  # fmt: skip


def _row(label: str, idle: float) -> Category:
    return Category(label=label, lines=(f"{format_percent(idle)} idle",))


def _streams(step: SimulatedStep) -> tuple[str, ...]:
    """Return the communication streams of any rank, in the order of the axes."""
    streams = (
        event.stream
        for stream_timeline in ({*chain(*step.slot_timelines)} | {*step.updates})
        for event in stream_timeline.events
    )
    used = {stream for stream in streams if stream != COMPUTE}
    return tuple(sorted(used, key=[*EXPOSED_AXES, *sorted(used)].index))


def _computing(step: SimulatedStep, rank: int, row: int) -> Iterator[Span]:
    """Yield the kernels of each pass, and of the update; the longest span of a pass has its micro-batch."""
    stages = step.rank_stages[rank]
    for slot, played, start, _ in step.slots(rank):
        times = [(start + event.start, start + event.end) for event in played.events if event.stream == COMPUTE]
        spans = _merged(step, times)
        longest = max(spans, key=lambda span: span[1] - span[0], default=None)
        for span in spans:
            yield from slot_spans(row, *span, slot, stages, labelled=span == longest)
    update = (
        (step.passes_s + event.start, step.passes_s + event.end)
        for event in step.updates[rank].events
        if event.stream == COMPUTE
    )
    for start, end in _merged(step, update):
        yield Span(row=row, start=start, end=end, colour="term:optimizer", hover="update")


def _colour(stream: str) -> str:
    """Return the colour of a term; for a stream without a term, the ink's."""
    return f"term:{stream}" if stream in TERM_COLOURS else "ink"


def _merged(step: SimulatedStep, times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return intervals in order, merged where they are too close to be distinguished."""
    spans = merge_spans(((start, end, "") for start, end in times), step.step_time_s / FINEST)
    return [(start, end) for start, end, _, _ in spans]


MAX_SCHEDULE_SPANS = 8192  # slots: more are no picture that a browser shows well
PASS_TERMS = {
    FORWARD: "forward",
    FULL_BACKWARD: "backward",
    BACKWARD_INPUT: "backward for activations",
    BACKWARD_WEIGHT: "backward for weights",
}


def legend_of(line: ActionList) -> tuple[LegendEntry, ...]:
    """Return the kinds of action that a list has, with their colours."""
    kinds = {action.kind for _, _, action in line.actions()}
    return tuple(
        LegendEntry(label=f"{kind}: {term}", colour=f"term:{term}")
        for kind, term in PASS_TERMS.items()
        if kind in kinds
    )


def timeline_chart(line: Timeline) -> Chart:
    """Return a row for each rank, a span for each slot with its micro-batches. Raises `InputError` for too large a list."""
    num_slots = sum(map(len, line.starts))
    if num_slots > MAX_SCHEDULE_SPANS:
        raise InputError(
            f"--draw: found {num_slots:,} slots; at most {MAX_SCHEDULE_SPANS:,} are drawn: fewer stages or micro-batches"
        )
    spans = list[Span]()
    for rank in range(line.actions.num_ranks):
        stages = sorted({action.stage for slot in line.actions.order[rank] for action in slot})
        for slot, start, end in zip(line.actions.order[rank], line.starts[rank], line.ends[rank], strict=True):
            spans += slot_spans(rank, start, end, slot, stages)
    idle = (seconds / line.makespan if line.makespan else 0.0 for seconds in line.idle())
    return timeline(
        title_of(line.actions), bubble_line(line).text, line.makespan,
        [_row(f"rank {rank}", share) for rank, share in enumerate(idle)], spans,
        {rank: tuple(line.memory(rank)) for rank in range(line.actions.num_ranks)},
        curves_title="activations held, in micro-batches of a stage", legend=legend_of(line.actions),
    )  # fmt: skip


def title_of(actions: ActionList) -> str:
    """Return the schedule and its sizes in words."""
    v = actions.num_virtual_stages
    virtual = f", {v:g} virtual stages on each" if v != 1 else ""
    plural_ending = "es" if actions.num_micro_batches > 1 else ""
    stages = (
        f"{actions.name}: {pluralize(actions.num_ranks, 'stage')}{virtual}" if actions.num_ranks > 1 else "no pipeline"
    )
    return f"{stages}, {actions.num_micro_batches:,} micro-batch{plural_ending}"


def bubble_line(timeline: Timeline) -> Line:
    """Return the length of a played list, its idle time and its bubble."""
    return Line(
        (
            Number(f"{timeline.makespan:.6g} s", timeline.makespan, "s", "makespan_s"), ", ",
            percent(timeline.idle_fraction, "idle_fraction"), " of it idle; bubble ", percent(timeline.bubble, "bubble"),
            " of the ideal time (", percent(timeline.local_bubble, "local_bubble"), " from a rank's first pass to its last)",
        )
    )  # fmt: skip


def slot_spans(
    row: int, start: float, end: float, slot: Slot, stages: Sequence[int], *, labelled: bool = True
) -> Iterator[Span]:  # fmt: skip
    """Yield the actions of a slot of a rank; those of every other one of its `stages` have a stripe."""
    for lane, action in enumerate(slot):
        yield Span(
            row=row, start=start, end=end, colour=f"term:{PASS_TERMS[action.kind]}", lane=(lane, len(slot)),
            text=str(action.micro_batch) if labelled else "", striped=stages.index(action.stage) % 2 == 1,
            hover=f"{PASS_TERMS[action.kind]} of micro-batch {action.micro_batch}, stage {action.stage}: "
            f"{format_seconds(start)} to {format_seconds(end)}",
        )  # fmt: skip


GAP = 0.02  # between two steps, of the time of all


def anatomy_chart(steps: Sequence[MemoryTrace], about: str) -> Chart:
    """Return stacked bytes by category over the steps, one behind the other, each as long as it took."""
    length = sum(step.samples[-1].seconds for step in steps if step.samples)
    begins, now = [], 0.0
    for step in steps:
        begins.append(now)
        now += (step.samples[-1].seconds if step.samples else 0.0) + GAP * length
    terms = steps[0].terms
    bands = []
    for place, term in enumerate(terms):
        edges = tuple(
            (
                begin + sample.seconds,
                float(sum(sample.bytes_by_term[:place])),
                float(sum(sample.bytes_by_term[: place + 1])),
            )
            for begin, step in zip(begins, steps, strict=True)
            for sample in step.samples
        )
        if any(high > low for _, low, high in edges):
            bands.append(Band(label=term, edges=edges, colour=f"term:{term}"))
    totals = tuple(
        (begin + sample.seconds, float(sum(sample.bytes_by_term)))
        for begin, step in zip(begins, steps, strict=True)
        for sample in step.samples
    )
    return curve_chart(
        title=f"Memory of the first {len(steps)} steps, by category",
        subtitle=f"{about}, rank {steps[0].rank}; at most {format_bytes(max(step.peak_bytes for step in steps))}",
        x=Axis(title="seconds, watched from below, which is slower", unit="s"),
        y=Axis(title="held by tensors", unit="B"),
        marks=(
            Curve(label="all", points=totals, reference=True), *bands,
            *(RuleLine(label=f"step {step.step}", at=begin) for begin, step in zip(begins, steps, strict=True)),
        ),
    )  # fmt: skip
