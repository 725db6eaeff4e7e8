"""Reports of one step: its instructions, simulated on streams, or measured and compared with its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.measure.reconcile.rank_time import Occupancy
from shardwise.measure.reconcile.trace_analysis import LEAST_SHARE, Bottleneck, TraceAnalysis
from shardwise.present.charts.step_charts import title_of
from shardwise.present.rendering.numbers import num_bytes, percent, seconds
from shardwise.present.rendering.report import Block, Cell, Line, Number, Report, Row, Section, Table
from shardwise.present.reports.wording import overlap_text
from shardwise.price import Simulation
from shardwise.price.simulation.critical_path import CriticalPart, critical_passes
from shardwise.price.simulation.result import split_by_rank
from shardwise.price.simulation.stage_passes import LIST
from shardwise.values import COMMUNICATION_TERMS, format_percent, format_seconds, pluralize

if TYPE_CHECKING:
    from shardwise.price.instruction_prices import PricedInstruction
    from shardwise.search import InstructionListing
    from shardwise.search.instruction_listing import Segment

SHOWN_SHARE = 1e-9  # of a step: terms with less are left out
MAX_PATH_PARTS = 8  # of the critical path, in text
MAX_TENSORS = 3  # names of an instruction


def simulation_report(simulation: Simulation) -> Report:
    """Report a step beside its estimate; in detail what its length is made of, and of a pipeline each rank."""
    step, estimate, pricing = simulation.step, simulation.estimate, simulation.step.pricing
    overlap = "starts and waits where the list has them" if step.overlap == LIST else f"overlap {step.overlap}"
    contention = f", kernels {step.contention:g} times as long beside traffic" * (step.contention > 1.0)
    exposed_share = None if pricing.cluster.calibration is None else estimate.exposed_share
    difference = simulation.step_time_s / estimate.step_time_s - 1.0
    head: list[Block] = [
        Line(
            (
                "  step ", seconds(simulation.step_time_s, "step_time_s"), f" simulated ({overlap}{contention}), ",
                seconds(estimate.step_time_s, "estimate.step_time_s"),
                f" estimated ({overlap_text(pricing.job.overlap_convention, exposed_share)}): ",
                Number(f"{difference:+.1%}", difference, "%"),
            )
        ),
        Line(
            (
                "  memory ", num_bytes(simulation.peak_bytes, "peak_bytes"), " simulated, ",
                num_bytes(estimate.memory_bytes, "estimate.memory_bytes"), " estimated",
            )
        ),
    ]  # fmt: skip
    if pricing.layout.pp > 1:
        bubble = percent(simulation.bubble, "bubble")
        head.append(Line((f"  {title_of(step.actions)}; bubble ", bubble, " of the rest of the step")))
    path = Section([_path_table(simulation), *_rank_crossings(simulation)], detail=True, name="critical path")
    title = f"{pricing.architecture.name}: {pricing.layout}"
    sections = [Section(head, title=title), Section([_term_table(simulation)]), path]
    return [*sections, _rank_section(simulation)] if pricing.layout.pp > 1 else sections


def _term_table(simulation: Simulation) -> Table:
    """Return where the seconds go, simulated and estimated."""
    estimate = simulation.estimate
    rows: list[Row] = [("seconds of a step", "simulated", "estimated")]
    for name in dict.fromkeys((*simulation.time, *estimate.time)):
        pair = simulation.time.get(name, 0.0), estimate.time.get(name, 0.0)
        if max(pair) > SHOWN_SHARE * simulation.step_time_s:
            title = f"exposed {name}" if name in simulation.exposed else name
            paths = (
                f"time.{name}" if name in simulation.time else "",
                f"estimate.time.{name}" if name in estimate.time else "",
            )
            rows.append((title, *map(seconds, pair, paths)))
    rows.append(
        ("step", seconds(simulation.step_time_s, "step_time_s"), seconds(estimate.step_time_s, "estimate.step_time_s"))
    )
    return Table(rows=tuple(rows), right=(1, 2))


def _path_table(simulation: Simulation) -> Table:
    """Return what the critical path is made of."""
    parts, step_s = simulation.critical_path, simulation.step_time_s
    rows: list[Row] = [("critical path", "seconds", "share")]
    rows += [
        (
            _path_part_name(part), seconds(part.seconds, f"critical_path.{index}.seconds"),
            percent(part.seconds / step_s, f"critical_path.{index}.share"),
        )
        for index, part in enumerate(parts[:MAX_PATH_PARTS])
    ]  # fmt: skip
    rest_s = sum(part.seconds for part in parts[MAX_PATH_PARTS:])
    if rest_s:
        rows.append((f"{len(parts) - MAX_PATH_PARTS} others", seconds(rest_s), percent(rest_s / step_s)))
    return Table(rows=tuple(rows), right=(1, 2))


def _path_part_name(part: CriticalPart) -> str:
    return f"{part.axis} of {part.unit}" if part.axis else f"{part.unit} {part.phase}"


def _rank_crossings(simulation: Simulation) -> Iterator[Block]:
    """Yield, of a pipeline, how often the critical path changes its rank."""
    pieces = split_by_rank(critical_passes(simulation.step))
    if len(simulation.step.ranks) == 1:
        return
    index = max(range(len(pieces)), key=lambda number: pieces[number][-1].end - pieces[number][0].start)
    first, last = pieces[index][0], pieces[index][-1]
    yield Line(
        (
            f"  {sum(map(len, pieces)):,} passes, {len(pieces) - 1:,} messages; the longest part on one rank is rank "
            f"{first.rank}, {'&'.join(map(str, first.slot))} to {'&'.join(map(str, last.slot))}: ",
            seconds(last.end - first.start, f"critical_passes.{index}.seconds"),
        )
    )


def _rank_section(simulation: Simulation) -> Section:
    """Return what each rank computes, waits for and holds."""
    rows: list[Row] = [("rank", "computes", "exposed", "waits for stages", "memory")]
    for number, (rank, memory) in enumerate(zip(simulation.step.ranks, simulation.memories, strict=True)):
        computed, exposed = (seconds(sum(values.values())) for values in (rank.computed, rank.exposed))
        rows.append(
            (
                str(number), computed, exposed, seconds(rank.bubble_s, f"ranks.{number}.bubble_s"),
                num_bytes(memory.peak_bytes, f"ranks.{number}.peak_bytes"),
            )
        )  # fmt: skip
    return Section([Table(rows=tuple(rows), right=range(5))], detail=True, name="each rank")


def instructions_report(listing: InstructionListing) -> Report:
    """Report the instructions of a pipeline stage: a table for each pass of a unit."""
    plan = listing.plan
    head = f"{plan.model.name}: {plan.layout}" + (f", stage {listing.stage}" if plan.layout.pp > 1 else "")
    segments = enumerate(listing.segments)
    return [
        Section([head]),
        *(_segment_section(segment, f"segments.{index}.", listing.shows_all) for index, segment in segments),
    ]


def _segment_section(segment: Segment, path: str, shows_all: bool) -> Section:
    repeats = [
        f"{segment.layers} layers" * (segment.layers > 1),
        f"{segment.micro_batches} micro-batches" * (segment.micro_batches > 1),
    ]
    title = f"{segment.name} of {segment.unit}" + "".join(f", {text}" for text in repeats if text)
    by_stream: list[Cell] = []
    for stream, stream_s in segment.seconds.items():
        by_stream += [f"{', ' * bool(by_stream)}{stream} ", seconds(stream_s, f"{path}seconds_by_stream.{stream}")]
    rows = [
        _instruction_row(instruction, f"{path}instructions.{index}.")
        for index, instruction in enumerate(segment.instructions)
        if shows_all or instruction.kind not in ("free", "slice")
    ]
    table = Table(rows=(("stream", "what", "bytes", "alone", "why"), *rows), right=(2, 3))
    return Section([Line(("  in a step, each stream alone: ", *(by_stream or ["nothing"]))), "", table], title=title)


def _instruction_row(instruction: PricedInstruction, path: str) -> Row:
    return (
        instruction.stream, " ".join(_instruction_words(instruction)),
        num_bytes(instruction.num_bytes, f"{path}num_bytes") if instruction.num_bytes else "",
        "" if instruction.seconds is None else seconds(instruction.seconds, f"{path}seconds"), instruction.why,
    )  # fmt: skip


def _instruction_words(instruction: PricedInstruction) -> Iterator[str]:
    """Yield what is done, with which tensors."""
    match instruction.kind:
        case "launch":
            results = _tensor_names(instruction.results)
            yield f"{instruction.operation} {_tensor_names(instruction.tensors)} -> {results}"
        case "free":
            yield f"free {_tensor_names(instruction.tensors)}"
        case "slice":
            yield f"slice {_tensor_names(instruction.tensors)} over {', '.join(instruction.over)}"
        case kind:
            yield f"{kind} {instruction.operation} of {_tensor_names(instruction.tensors)}"
            yield f"over {', '.join(instruction.over)}"
            if kind == "start" and instruction.count > 1:
                yield f"in {instruction.count} pieces"


def _tensor_names(tensors: Sequence[str]) -> str:
    """Return names of tensors, and how many more there are."""
    more = len(tensors) - MAX_TENSORS
    return ", ".join(tensors[:MAX_TENSORS]) + (f" and {more} more" if more > 0 else "")


MOST = 5  # bottlenecks and stalls in text, and differences in the short form
AXES = (*COMMUNICATION_TERMS, "control")


def trace_report(found: TraceAnalysis, folder: str, *, bottlenecks: bool = False) -> Report:
    """The step, where each rank's time went, where it differs from the planned one, who came late, and what holds it up."""
    plan, step = found.plan, found.step
    head = f"{plan.model.name}, {pluralize(plan.layout.num_devices, 'device')}: {plan.layout}, step {step.step} of {folder}"
    lines = [f"  step {format_seconds(step.seconds)} measured, {format_seconds(found.planned.step_time_s)} planned"]
    if len(step.ranks) > 1:
        lines.append(f"  clocks of the ranks compared within {format_seconds(step.error_s)}")
    sections = [Section(lines, title=head)]
    if bottlenecks:
        sections.append(_bottlenecks(found))
    sections.append(Section([_format_ranks(found)], name="where the time went"))
    overlaps = _overlaps(found)
    if len(overlaps.rows) > 1:
        sections.append(Section([overlaps], name="traffic and what hides it"))
    if len(step.ranks) > 1:
        sections.append(Section([_late(found)], name="arrival at collectives"))
    return [*sections, Section([_differences(found)], name="all differences"), *_stalls(found)]


def _bottlenecks(found: TraceAnalysis) -> Section:
    """What holds the step up, and what would mend it."""
    lines = []
    for number, one in enumerate(found.bottlenecks[:MOST], start=1):
        lines += [
            f"  {number}. {one.kind}, rank {one.rank}: {format_seconds(one.seconds)}, {format_percent(one.share)} of the step",
            f"     {one.what}", f"     {_mended(one)}",
        ]  # fmt: skip
    lines += _others(len(found.bottlenecks))
    return Section(
        lines or [f"  nothing takes {format_percent(LEAST_SHARE)} of the step"], title="what holds the step up"
    )


def _others(number: int) -> list[str]:
    """How many are not listed."""
    return [f"  and {number - MOST} others: --json has all"] if number > MOST else []


def _mended(one: Bottleneck) -> str:
    if one.remedy is None:
        return one.advice
    change = one.remedy
    return f"{change.what}: {change.layout} would save about {format_seconds(change.saves_s)}; generally {one.advice}"


def _differences(found: TraceAnalysis) -> Table:
    """The largest, each with its cause."""
    rows: list[Row] = [("difference", "of", "expected", "measured", "cause")]
    for one in found.differences:
        seconds = (format_seconds(value) for value in (one.expected_s, one.measured_s))
        rows.append((one.name, one.where, *seconds, f"{one.cause}{f': {one.why}' if one.why else ''}"))
    return Table(rows=tuple(rows), right=(2, 3), brief=MOST)


def _format_ranks(found: TraceAnalysis) -> Table:
    """Seconds of each rank, which add up to its step."""
    ranks = found.occupancies
    axes = [axis for axis in AXES if any(one.exposed.get(axis) for one in ranks)]
    rows: list[Row] = [("seconds of a step", *(f"rank {one.rank}" for one in ranks))]
    for phase in dict.fromkeys(phase for one in ranks for phase in one.busy):
        rows.append((phase, *(format_seconds(one.busy.get(phase, 0.0)) for one in ranks)))
    for axis in axes:
        rows.append((f"exposed {axis}", *(format_seconds(one.exposed.get(axis, 0.0)) for one in ranks)))
    rows.append(("gaps between kernels", *(_gaps(one) for one in ranks)))
    rows.append(("outside of passes", *(format_seconds(one.between_s) for one in ranks)))
    rows.append(("step", *(format_seconds(one.step_s) for one in ranks)))
    rows.append(("busy", *(format_percent(one.busy_s / one.step_s) for one in ranks)))
    return Table(rows=tuple(rows), right=range(1, len(ranks) + 1))


def _gaps(one: Occupancy) -> str:
    return f"{format_seconds(one.gaps_s)} in {one.num_gaps:,}"


def _overlaps(found: TraceAnalysis) -> Table:
    rows: list[Row] = [("traffic", "rank", "on its way", "behind kernels", "share")]
    for one in found.occupancies:
        for traffic in one.overlaps:
            seconds = (format_seconds(value) for value in (traffic.traffic_s, traffic.hidden_s))
            rows.append((traffic.axis, str(one.rank), *seconds, format_percent(traffic.share)))
    return Table(rows=tuple(rows), right=(1, 2, 3, 4))


def _late(found: TraceAnalysis) -> Table:
    rows: list[Row] = [("arrival at collectives", "came last to", "others waited", "for it")]
    for one in found.lateness:
        rows.append(
            (
                f"rank {one.rank}",
                f"{one.num_last:,} of {one.num_met:,}",
                f"at {one.num_kept:,}",
                format_seconds(one.kept_s),
            )
        )
    return Table(rows=tuple(rows), right=(1, 2, 3))


def _stalls(found: TraceAnalysis) -> Iterator[Section]:
    if found.stalls:
        lines = [
            f"  rank {one.rank}: {format_seconds(one.seconds)} in {one.where}, where {format_seconds(one.usual_s)} is usual"
            for one in found.stalls[:MOST]
        ]
        yield Section([*lines, *_others(len(found.stalls))], title="stalls")
