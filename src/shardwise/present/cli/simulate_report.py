"""A simulated step as sections."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.present.cli.section import Report, Row, Section, Table
from shardwise.present.cli.summary import overlap_text
from shardwise.present.pictures.pipeline_schedule_timeline import title_of
from shardwise.price import Simulation
from shardwise.price.simulation.critical_path import CriticalPart, critical_passes
from shardwise.price.simulation.result import split_by_rank
from shardwise.price.simulation.stage_passes import LIST
from shardwise.search import Plan
from shardwise.values import format_bytes, format_percent, format_seconds

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
    return [*sections, _ranks(found)] if plan.layout.pp > 1 else sections


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


def _ranks(found: Simulation) -> Section:
    """Of each rank what it computes, waits for and holds."""
    rows: list[Row] = [("rank", "computes", "exposed", "waits for stages", "memory")]
    for number, (rank, memory) in enumerate(zip(found.step.ranks, found.memories, strict=True)):
        computed, exposed = (format_seconds(sum(one.values())) for one in (rank.computed, rank.exposed))
        rows.append((str(number), computed, exposed, format_seconds(rank.bubble_s), format_bytes(memory.peak_bytes)))
    return Section([Table(rows=tuple(rows), right=range(5))], detail=True, name="each rank")
