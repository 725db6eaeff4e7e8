"""A traced step, as sections."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.measure.reconcile.rank_time import Occupancy
from shardwise.measure.reconcile.trace_analysis import LEAST_SHARE, Bottleneck, TraceAnalysis
from shardwise.present.cli.section import Report, Row, Section, Table
from shardwise.values import COMMUNICATION_TERMS, format_percent, format_seconds, pluralize

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
    sections.append(Section([_ranks(found)], name="where the time went"))
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


def _ranks(found: TraceAnalysis) -> Table:
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
