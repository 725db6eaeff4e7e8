"""A traced step, as sections."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.cli.section import Report, Row, Section, Table
from shardwise.reconcile.traces.found import Traced
from shardwise.reconcile.traces.occupancy import Occupancy
from shardwise.terms import COMMUNICATION
from shardwise.units import counted, format_percent, format_seconds

AXES = (*COMMUNICATION, "control")


def trace_report(found: Traced, folder: str) -> Report:
    """The step, where each rank's time went, and who came late."""
    plan, step = found.plan, found.step
    head = (
        f"{plan.model.name}, {counted(plan.layout.num_devices, 'device')}: {plan.layout}, step {step.step} of {folder}"
    )
    lines = [f"  step {format_seconds(step.seconds)} measured, {format_seconds(found.planned.step_time_s)} planned"]
    if len(step.ranks) > 1:
        lines.append(f"  clocks of the ranks compared within {format_seconds(step.error_s)}")
    sections = [Section(lines, title=head), Section([_ranks(found)], name="where the time went")]
    overlaps = _overlaps(found)
    if len(overlaps.rows) > 1:
        sections.append(Section([overlaps], name="traffic and what hides it"))
    if len(step.ranks) > 1:
        sections.append(Section([_late(found)], name="arrival at collectives"))
    return [*sections, *_stalls(found)]


def _ranks(found: Traced) -> Table:
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


def _overlaps(found: Traced) -> Table:
    rows: list[Row] = [("traffic", "rank", "on its way", "behind kernels", "share")]
    for one in found.occupancies:
        for traffic in one.overlaps:
            seconds = (format_seconds(value) for value in (traffic.traffic_s, traffic.hidden_s))
            rows.append((traffic.axis, str(one.rank), *seconds, format_percent(traffic.share)))
    return Table(rows=tuple(rows), right=(1, 2, 3, 4))


def _late(found: Traced) -> Table:
    rows: list[Row] = [("arrival at collectives", "came last to", "others waited for it")]
    for one in found.lateness:
        rows.append((f"rank {one.rank}", f"{one.num_last:,} of {one.num_met:,}", format_seconds(one.kept_s)))
    return Table(rows=tuple(rows), right=(1, 2))


def _stalls(found: Traced) -> Iterator[Section]:
    if found.stalls:
        lines = [
            f"  rank {one.rank}: {format_seconds(one.seconds)} in {one.where}, where {format_seconds(one.usual_s)} is usual"
            for one in found.stalls
        ]
        yield Section(lines, title="stalls")
