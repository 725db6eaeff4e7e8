"""Reports of one step: its instructions, simulated on streams, or measured and compared with its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shardwise.measure.reconcile.trace_analysis import LEAST_SHARE
from shardwise.present.charts.step_charts import title_of
from shardwise.present.rendering.numbers import num_bytes, percent, seconds
from shardwise.present.rendering.report import Block, Cell, Line, Number, Report, Row, Section, Table
from shardwise.present.reports.wording import overlap_text, tensor_names
from shardwise.price import Simulation
from shardwise.price.simulation.contention import NO_CONTENTION
from shardwise.price.simulation.critical_path import CriticalPart, critical_passes
from shardwise.price.simulation.result import split_by_rank
from shardwise.price.simulation.stage_passes import LIST
from shardwise.values import COMMUNICATION_TERMS, format_percent, format_seconds, pluralize

if TYPE_CHECKING:
    from shardwise.measure import TraceAnalysis
    from shardwise.measure.reconcile.trace_analysis import Bottleneck
    from shardwise.price.instruction_prices import PricedInstruction
    from shardwise.search import InstructionListing
    from shardwise.search.instruction_listing import Segment

PRINTED = "  plans and all other reports print the estimate"
SHOWN_SHARE = 1e-9  # of a step: terms with less are left out
MAX_PATH_PARTS = 8  # of the critical path, in text


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
    if pricing.cluster.num_devices > 1:
        head.append(_contention_text(simulation))
    if simulation.difference:
        head[1:1] = [f"  {simulation.difference}", PRINTED]
    if pricing.layout.pp > 1:
        bubble = percent(simulation.bubble, "bubble")
        head.append(Line((f"  {title_of(step.actions)}; bubble ", bubble, " of the rest of the step")))
    path = Section([_path_table(simulation), *_rank_crossings(simulation)], detail=True, name="critical path")
    title = f"{pricing.architecture.name}: {pricing.layout}"
    sections = [Section(head, title=title), Section([_term_table(simulation)]), path]
    return [*sections, _rank_section(simulation)] if pricing.layout.pp > 1 else sections


def _contention_text(simulation: Simulation) -> str:
    """Return what is known of kernels beside traffic on the chip, and what the step has of it."""
    cluster, published = simulation.step.pricing.cluster, simulation.published_contention
    played = f"simulated as {simulation.step.contention:.3g}"
    if simulation.step.contention == NO_CONTENTION:
        is_fitted = cluster.calibration is not None
        played = "not simulated" + ", as constants fitted to whole steps have it in them" * is_fitted
    if published is None:
        return f"  contention of kernels and traffic: unknown for {cluster.chip.name} (no published figure); {played}"
    highest = f", at most {published.highest:g}" if published.highest else ""
    slowdown = f"{published.factor:.3g} times as long on {cluster.chip.name}{highest} ({published.source})"
    return f"  contention of kernels and traffic: {slowdown}; {played}"


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
    for stream, stream_s in segment.seconds_by_stream.items():
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
            results = tensor_names(instruction.results)
            yield f"{instruction.operation} {tensor_names(instruction.tensors)} -> {results}"
        case "free":
            yield f"free {tensor_names(instruction.tensors)}"
        case "slice":
            yield f"slice {tensor_names(instruction.tensors)} over {', '.join(instruction.over)}"
        case kind:
            yield f"{kind} {instruction.operation} of {tensor_names(instruction.tensors)}"
            yield f"over {', '.join(instruction.over)}"
            if kind == "start" and instruction.count > 1:
                yield f"in {instruction.count} pieces"


MAX_LISTED = 5  # bottlenecks and stalls in text, and differences in the short form
AXES = (*COMMUNICATION_TERMS, "control")


def trace_report(analysis: TraceAnalysis) -> Report:
    """Report the step, where each rank's time went, where it differs from the planned one, who came late, and what stalled."""
    plan, step = analysis.plan, analysis.step
    num_ranks = len(step.ranks)
    title = (
        f"{plan.model.name}, {pluralize(plan.layout.num_devices, 'device')}: {plan.layout}, step {step.step} of "
        f"{analysis.run.path}"
    )
    measured, planned = (
        seconds(step.seconds, "step_s", kind="measured"), seconds(analysis.planned.step_time_s, "planned_s", kind="prediction")
    )  # fmt: skip
    head: list[Block] = [
        Line(("  step ", measured, " measured, ", planned, " planned, simulated with the plan's instructions"))
    ]
    if analysis.planned.difference:
        printed = seconds(analysis.planned.estimate.step_time_s)
        head.append(Line(("  the plan's estimate is ", printed, f": {analysis.planned.difference}")))
    if num_ranks > 1:
        head.append(Line(("  clocks of the ranks compared within ", seconds(step.error_s, "clock_error_s"))))
    sections = [Section(head, title=title)]
    if analysis.lists_bottlenecks:
        sections.append(_bottlenecks(analysis))
    sections.append(Section([_rank_times(analysis)], name="where the time went"))
    overlaps = _overlaps(analysis)
    if len(overlaps.rows) > 1:
        sections.append(Section([overlaps], name="traffic and what hides it"))
    if num_ranks > 1:
        sections.append(Section([_lateness(analysis)], name="arrival at collectives"))
    return [*sections, Section([_differences(analysis)], name="all differences"), *_stalls(analysis)]


def _bottlenecks(analysis: TraceAnalysis) -> Section:
    """Return what holds the step up, and what would mend it."""
    lines: list[Block] = []
    for index, bottleneck in enumerate(analysis.bottlenecks[:MAX_LISTED]):
        path = f"bottlenecks.{index}"
        lost_s, part = seconds(bottleneck.seconds, f"{path}.seconds"), percent(bottleneck.share, f"{path}.share")
        lines += [
            Line((f"  {index + 1}. {bottleneck.kind}, rank {bottleneck.rank}: ", lost_s, ", ", part, " of the step")),
            f"     {bottleneck.what}", _remedy(bottleneck, f"{path}.remedy"),
        ]  # fmt: skip
    lines += _not_listed(len(analysis.bottlenecks))
    return Section(
        lines or [f"  nothing takes {format_percent(LEAST_SHARE)} of the step"], title="what holds the step up"
    )


def _not_listed(number: int) -> list[str]:
    return [f"  and {number - MAX_LISTED} others: --json has all"] if number > MAX_LISTED else []


def _remedy(bottleneck: Bottleneck, path: str) -> Line:
    if bottleneck.remedy is None:
        return Line((f"     {bottleneck.advice}",))
    remedy = bottleneck.remedy
    saved_s = seconds(remedy.saves_s, f"{path}.saves_s", kind="prediction")
    return Line(
        (
            f"     {remedy.what}: {remedy.layout} would save about ", saved_s, f"; generally {bottleneck.advice}",
        )
    )  # fmt: skip


def _differences(analysis: TraceAnalysis) -> Table:
    """Return the differences from the planned step, each with its cause."""
    rows: list[Row] = [("difference", "of", "expected", "measured", "cause")]
    for index, difference in enumerate(analysis.differences):
        path = f"differences.{index}"
        reason = f": {difference.why}" if difference.why else ""
        rows.append(
            (
                difference.name, difference.where, seconds(difference.expected_s, f"{path}.expected_s", kind="prediction"),
                seconds(difference.measured_s, f"{path}.measured_s", kind="measured"), f"{difference.cause}{reason}",
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=(2, 3), brief=MAX_LISTED)


def _rank_times(analysis: TraceAnalysis) -> Table:
    """Return the seconds of each rank, which add up to its step."""
    ranks = analysis.occupancies
    rows: list[Row] = [("seconds of a step", *(f"rank {rank.rank}" for rank in ranks))]
    for phase in dict.fromkeys(phase for rank in ranks for phase in rank.busy):
        rows.append(
            (phase, *(_measured_part(rank.busy, phase, f"ranks.{index}.busy") for index, rank in enumerate(ranks)))
        )
    for axis in AXES:
        if any(rank.exposed.get(axis) for rank in ranks):
            cells = (_measured_part(rank.exposed, axis, f"ranks.{index}.exposed") for index, rank in enumerate(ranks))
            rows.append((f"exposed {axis}", *cells))
    gaps = (
        Number(f"{format_seconds(rank.gaps_s)} in {rank.num_gaps:,}", rank.gaps_s, "s", f"ranks.{index}.gaps_s")
        for index, rank in enumerate(ranks)
    )
    rows.append(("gaps between kernels", *gaps))
    for label, name in (("outside of passes", "between_s"), ("step", "step_s")):
        rows.append((label, *(seconds(getattr(rank, name), f"ranks.{i}.{name}") for i, rank in enumerate(ranks))))
    rows.append(("busy", *(percent(rank.busy_s / rank.step_s) for rank in ranks)))
    return Table(rows=tuple(rows), right=range(1, len(ranks) + 1))


def _measured_part(parts: Mapping[str, float], name: str, path: str) -> Number:
    return seconds(parts.get(name, 0.0), f"{path}.{name}" if name in parts else "", kind="measured")


def _overlaps(analysis: TraceAnalysis) -> Table:
    rows: list[Row] = [("traffic", "rank", "on its way", "behind kernels", "share")]
    for number, rank in enumerate(analysis.occupancies):
        for index, traffic in enumerate(rank.overlaps):
            path = f"ranks.{number}.overlaps.{index}"
            rows.append(
                (
                    traffic.axis, str(rank.rank), seconds(traffic.traffic_s, f"{path}.traffic_s"),
                    seconds(traffic.hidden_s, f"{path}.hidden_s"), percent(traffic.share, f"{path}.share"),
                )
            )  # fmt: skip
    return Table(rows=tuple(rows), right=(1, 2, 3, 4))


def _lateness(analysis: TraceAnalysis) -> Table:
    rows: list[Row] = [("arrival at collectives", "came last to", "others waited", "for it")]
    for index, late in enumerate(analysis.lateness):
        rows.append(
            (
                f"rank {late.rank}", f"{late.num_last:,} of {late.num_met:,}", f"at {late.num_kept:,}",
                seconds(late.kept_s, f"lateness.{index}.kept_s", kind="measured"),
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=(1, 2, 3))


def _stalls(analysis: TraceAnalysis) -> Iterator[Section]:
    if not analysis.stalls:
        return
    lines: list[Block] = []
    for index, stall in enumerate(analysis.stalls[:MAX_LISTED]):
        took = seconds(stall.seconds, f"stalls.{index}.seconds", kind="measured")
        usual = seconds(stall.usual_s, f"stalls.{index}.usual_s")
        lines.append(Line((f"  rank {stall.rank}: ", took, f" in {stall.where}, where ", usual, " is usual")))
    yield Section([*lines, *_not_listed(len(analysis.stalls))], title="stalls")
