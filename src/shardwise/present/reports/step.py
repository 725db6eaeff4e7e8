"""Reports of one step: simulated on streams, or measured and compared with its plan."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.measure.reconcile.rank_time import Occupancy
from shardwise.measure.reconcile.trace_analysis import LEAST_SHARE, Bottleneck, TraceAnalysis
from shardwise.present.charts.step_charts import title_of
from shardwise.present.rendering.report import Report, Row, Section, Table
from shardwise.present.reports.wording import overlap_text
from shardwise.price import Simulation
from shardwise.price.simulation.critical_path import CriticalPart, critical_passes
from shardwise.price.simulation.result import split_by_rank
from shardwise.price.simulation.stage_passes import LIST
from shardwise.search import Plan
from shardwise.values import COMMUNICATION_TERMS, format_bytes, format_percent, format_seconds, pluralize

MOST_PARTS = 8  # of the critical path, in text


def simulation_report(found: Simulation, plan: Plan) -> Report:
    """The step beside its estimate; in detail what its length is made of, and of a pipeline each rank."""
    how = "starts and waits where the list has them" if found.step.overlap == LIST else f"overlap {found.step.overlap}"
    contention = f", kernels {found.step.contention:g} times as long beside traffic" * (found.step.contention > 1.0)
    difference = found.step_time_s / plan.estimate.step_time_s - 1.0
    head = [
        f"  step {format_seconds(found.step_time_s)} simulated ({how}{contention}), "
        f"{format_seconds(plan.estimate.step_time_s)} estimated "
        f"({overlap_text(plan.job.overlap_convention, plan.exposed_share)}): {difference:+.1%}",
        f"  memory {format_bytes(found.peak_bytes)} simulated, {format_bytes(plan.estimate.memory_bytes)} estimated",
    ]
    if plan.layout.pp > 1:
        head.append(f"  {title_of(found.step.actions)}; bubble {format_percent(found.bubble)} of the rest of the step")
    path = Section([_path(found), *_across(found)], detail=True, name="critical path")
    sections = [Section(head, title=f"{plan.model.name}: {plan.layout}"), Section([_terms(found, plan)]), path]
    return [*sections, _rank_rows(found)] if plan.layout.pp > 1 else sections


def _terms(found: Simulation, plan: Plan) -> Table:
    """Where the seconds go, simulated and estimated."""
    estimated = plan.estimate.time
    rows: list[Row] = [("seconds of a step", "simulated", "estimated")]
    for name in dict.fromkeys((*found.time, *estimated)):
        pair = found.time.get(name, 0.0), estimated.get(name, 0.0)
        if max(pair) > 1e-9 * found.step_time_s:
            rows.append((_named(name, found), format_seconds(pair[0]), format_seconds(pair[1])))
    rows.append(("step", format_seconds(found.step_time_s), format_seconds(plan.estimate.step_time_s)))
    return Table(rows=tuple(rows), right=(1, 2))


def _named(term: str, found: Simulation) -> str:
    return f"exposed {term}" if term in found.exposed else term


def _path(found: Simulation) -> Table:
    """The critical path by what it is made of, and across ranks."""
    parts = found.critical_path
    rows: list[Row] = [("critical path", "seconds", "share")]
    rows += [(_words(part), format_seconds(part.seconds), format_percent(part.seconds / found.step_time_s))
             for part in parts[:MOST_PARTS]]  # fmt: skip
    rest = sum(part.seconds for part in parts[MOST_PARTS:])
    if rest:
        rows.append(
            (f"{len(parts) - MOST_PARTS} others", format_seconds(rest), format_percent(rest / found.step_time_s))
        )
    return Table(rows=tuple(rows), right=(1, 2))


def _words(part: CriticalPart) -> str:
    return f"{part.axis} of {part.unit}" if part.axis else f"{part.unit} {part.phase}"


def _across(found: Simulation) -> Iterator[str]:
    """Of a pipeline the ranks that the path goes through."""
    pieces = split_by_rank(critical_passes(found.step))
    if len(found.step.ranks) == 1:
        return
    longest = max(pieces, key=lambda one: one[-1].end - one[0].start)
    first, last = ("&".join(map(str, leg.slot)) for leg in (longest[0], longest[-1]))
    yield (
        f"  {sum(map(len, pieces)):,} passes, {len(pieces) - 1:,} messages; the longest part on one rank is rank "
        f"{longest[0].rank}, {first} to {last}: {format_seconds(longest[-1].end - longest[0].start)}"
    )


def _rank_rows(found: Simulation) -> Section:
    """Of each rank what it computes, waits for and holds."""
    rows: list[Row] = [("rank", "computes", "exposed", "waits for stages", "memory")]
    for number, (rank, memory) in enumerate(zip(found.step.ranks, found.memories, strict=True)):
        computed, exposed = (format_seconds(sum(one.values())) for one in (rank.computed, rank.exposed))
        rows.append((str(number), computed, exposed, format_seconds(rank.bubble_s), format_bytes(memory.peak_bytes)))
    return Section([Table(rows=tuple(rows), right=range(5))], detail=True, name="each rank")


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
