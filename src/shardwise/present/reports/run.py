"""Reports of a run beside its plan: reconciliation and rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from shardwise.measure import Reconciliation
from shardwise.measure.reconcile.reconciliation import LARGEST_REST
from shardwise.measure.reconcile.rehearsal import REHEARSAL_TOLERANCE, Rehearsal, is_judged
from shardwise.measure.reconcile.step_terms import MEMORY_TOLERANCE as MEMORY_CLOSE
from shardwise.measure.reconcile.step_terms import (
    TIME_TOLERANCE,
    Attribution,
    CollectiveComparison,
    MemoryTerm,
    StepMemory,
    StepTime,
)
from shardwise.present.rendering.report import BAR_STEPS, Report, Row, Section, ShareBar, Status, Table
from shardwise.present.reports.wording import INTERVAL, format_interval
from shardwise.search import Plan
from shardwise.values import format_bytes, format_seconds, pluralize

BARS = Table(
    rows=((ShareBar("#"), "predicted and measured", ShareBar("+"), "measured only", ShareBar("-"), "predicted only"),),
    head=False,
    indent=2,
)
MOST_NAMED = 5  # of what a term depends on; --json has all
MOST_MISCOUNTED = 10
LEAST_HIDDEN = 1e-3  # of a step: less is not worth a word
ROUNDING = 1e-9  # of the whole: a smaller difference is none, only how sums round


def reconcile_report(plan: Plan, found: Reconciliation, folder: str) -> Report:
    """The verdict, the terms of the time, what was issued, and what to mend; in detail the terms of the memory."""
    head = f"{plan.model.name}, {pluralize(plan.layout.num_devices, 'device')}: {plan.layout}, against {folder}"
    lines = [f"  {remark}" for remark in found.remarks]
    lines += [f"  ran on {found.machine}{_steady(found)}", *(f"  {line}" for line in _reconciliation_verdict(found))]
    verdict, *issued = collective_lines(found.collectives)
    sections = [
        Section([*lines, f"  {_memory_line(found.memory)}", f"  {verdict}"], title=head),
        Section([_time(found.time), BARS], name="time of a step"),
        Section([_memory(found.memory), *_beside(found.memory)], name="memory of a device", detail=True),
        Section(issued, title="bytes of the collectives, planned and issued", detail=found.collectives.equal),
        Section([f"  {line}" for line in found.advice], title="to mend the plan's seconds"),
    ]
    return [one for one in sections if one.blocks]


def _steady(found: Reconciliation) -> str:
    if found.noisy or not found.changes:
        return ""
    return ", steady: " + ", ".join(f"{name} {change:+.0%}" for name, change in found.changes.items())


def _reconciliation_verdict(found: Reconciliation) -> Iterator[str]:
    time = found.time
    low, high = format_seconds(time.low_s), format_seconds(time.high_s)
    spread = f"(mean of the middle half of {time.num_steps} steps; 80% of them between {low} and {high})"
    yield f"step {format_seconds(time.predicted_s)} predicted, {format_seconds(time.measured_s)} measured {spread}"
    if time.interval90 is None:
        yield f"the prediction is a bound: the step took {time.measured_s / time.predicted_s:.2f} times as long"
    else:
        verdict = "within" if time.within else "outside"
        yield f"{verdict} the {INTERVAL}, {format_interval(time.interval90)}"
    if found.attribution:
        yield from _attribution(found.attribution)
    elif not found.noisy:
        yield f"no attribution: the step is as predicted, within {TIME_TOLERANCE:.0%}"
    side = "under" if time.rest_share < LARGEST_REST else "above"
    yield f"unexplained {format_seconds(time.rest_s)}, {time.rest_share:.1%} of the step ({side} {LARGEST_REST:.0%})"


def _attribution(attribution: Attribution) -> Iterator[str]:
    times = "not predicted" if attribution.ratio is None else f"{attribution.ratio:.2f} times its prediction"
    yield f"attributed to {attribution.term.name}, {times}, {attribution.part:.0%} of the step's error"
    if attribution.depends_on:
        yield f"  it depends on {', '.join(attribution.depends_on[:MOST_NAMED])}"


class _Line(NamedTuple):
    name: str
    predicted: float | None
    measured: float
    note: str = ""


def _table(title: str, rows: Iterable[_Line], whole: float, form: Callable[[float], str]) -> Table:
    """Rows that are not empty; shares are of `whole`, which was measured."""
    shown = [row for row in rows if row.predicted or row.measured]
    most = max(max(row.predicted or 0.0, row.measured) for row in shown)
    cells: list[Row] = [(title, "predicted", "measured", "share", "difference", "", "")]
    for row in shown:
        predicted = "" if row.predicted is None else form(row.predicted)
        measured = form(row.measured) if row.measured >= 0 else f"-{form(-row.measured)}"
        difference = row.measured - (row.predicted or 0.0)
        difference = 0.0 if abs(difference) < ROUNDING * whole else difference
        signed = ("+" if difference >= 0 else "-") + form(abs(difference))
        share = f"{row.measured / whole:.1%}"
        cells.append((f"  {row.name}", predicted, measured, share, signed, _bar(row, most), row.note))
    return Table(rows=tuple(cells), right=(1, 2, 3, 4))


def _bar(row: _Line, most: float) -> ShareBar:
    predicted, measured = (round(BAR_STEPS * max(value or 0.0, 0.0) / most) for value in (row.predicted, row.measured))
    return ShareBar(
        "#" * min(predicted, measured) + "+" * (measured - predicted) + "-" * (predicted - measured), row.name
    )


def _time(time: StepTime) -> Table:
    rows = [
        _Line(
            one.name, one.predicted_s, one.measured_s,
            f"{format_seconds(one.hidden_s)} hidden" if one.hidden_s > LEAST_HIDDEN * time.predicted_s else "",
        )
        for one in time.terms
    ]  # fmt: skip
    return _table("time of a step", rows, time.measured_s, format_seconds)


def _memory_line(memory: StepMemory) -> str:
    """The whole, and which terms are not as predicted."""
    total = memory.total
    off = [one.name for one in (*memory.terms, total) if one.within is False]
    verdict = f"NOT within {MEMORY_CLOSE:.0%}: {', '.join(off)}" if off else f"every term within {MEMORY_CLOSE:.0%}"
    return (
        f"memory {format_bytes(total.predicted or 0.0)} predicted, {format_bytes(total.measured)} measured; {verdict}"
    )


def _memory(memory: StepMemory) -> Table:
    rows = [_Line(one.name, one.predicted, one.measured, _judged(one)) for one in (*memory.terms, memory.total)]
    return _table("memory of a device", rows, memory.total.measured, format_bytes)


def _beside(memory: StepMemory) -> Iterator[str]:
    """What is in no term."""
    if memory.runtime:
        yield f"  besides tensors the plan has {format_bytes(memory.runtime)} for context, libraries and fragmentation"
    if memory.allocated_bytes is not None and memory.reserved_bytes is not None:
        yield (
            f"  the device's allocator gave {format_bytes(memory.allocated_bytes)} and keeps "
            f"{format_bytes(memory.reserved_bytes)}: what it rounds up, and what kernels take while they run"
        )
    if memory.resident_bytes is not None:
        yield (
            f"  the process has {format_bytes(memory.resident_bytes)} of the host: libraries, the allocator's own, the data"
            f"{', and on a CPU the tensors' if memory.allocated_bytes is None else ''}"
        )


def _judged(term: MemoryTerm) -> str:
    """Whether a term is as predicted; where it had more at another moment, that is what is judged."""
    holds = _holds(term.within)
    if term.largest is None or term.largest <= term.measured * (1 + MEMORY_CLOSE):
        return holds
    return f"{format_bytes(term.largest)} at its most, {holds}"


def _holds(within: bool | None) -> str:
    return "" if within is None else f"within {MEMORY_CLOSE:.0%}" if within else f"NOT within {MEMORY_CLOSE:.0%}"


def collective_lines(found: CollectiveComparison) -> Iterator[str]:
    if not found.planned and not found.found:
        yield "collectives of a step: none planned, none issued"
        return
    verdict = "equal in kind, axes, format, bytes and count" if found.equal else "NOT as planned"
    if found.uneven and found.equal:
        verdict += ", but for the bytes of experts' rows, which routers decide"
    yield f"collectives of a step: {found.planned:,} planned, {found.found:,} issued, {verdict}"
    for over in found.planned_bytes | found.found_bytes:
        planned, issued = found.planned_bytes.get(over, 0), found.found_bytes.get(over, 0)
        yield f"  {f'over {over}':<18}{format_bytes(planned):>11}{format_bytes(issued):>11}"
    for one in found.miscounted[:MOST_MISCOUNTED]:
        kind, axes, dtype, num_bytes, _ = one.issued
        yield (
            f"  {kind} over {', '.join(axes)} of {format_bytes(num_bytes)} in {dtype}: {one.planned} planned, {one.found} issued"
        )
    left = len(found.miscounted) - MOST_MISCOUNTED
    if left > 0:
        yield f"  and {left} more that differ; --json has all"


def rehearsal_report(plan: Plan, found: Rehearsal) -> Report:
    """Where the rank is, its groups, what it issued, what it held, and whether that is as planned."""
    head = f"{plan.model.name}, rank {found.rehearsed.rank:,} of {found.ranks:,}: {plan.layout}"
    terms = [_row(one, found.memory.total) for one in found.terms]
    rows: tuple[Row, ...] = (("memory of the rank", "planned", "executed", "difference", ""), *terms)
    return [
        Section(list(_head(found)), title=head),
        Section(list(_groups(found))),
        Section(list(collective_lines(found.collectives))),
        Section([Table(rows=rows, right=(1, 2, 3))]),
        Section([Status(_rehearsal_verdict(found), "good" if found.ok else "bad")]),
    ]


def _head(found: Rehearsal) -> Iterator[str]:
    seen = found.rehearsed
    at = " ".join(
        f"{axis}={place}" for axis, place in seen.coordinate.items() if any(axis in one for one in seen.groups)
    )
    yield f"  at {at or 'no axis of several ranks'}"
    count = "1 micro-batch" if seen.num_micro_batches == 1 else f"{seen.num_micro_batches} micro-batches"
    of = f" of the {found.planned_micro_batches}" if found.planned_micro_batches > seen.num_micro_batches else ""
    yield f"  a step of {count}{of}, rehearsed in {seen.seconds:.1f} s"
    yield from (f"  {remark}" for remark in found.remarks)


def _groups(found: Rehearsal) -> Iterator[Table]:
    rows: list[Row] = [
        (f"  {', '.join(axes)}", f"{len(ranks):,}", _ranks(ranks)) for axes, ranks in found.rehearsed.groups.items()
    ]
    if rows:
        yield Table(rows=(("its groups over", "ranks", ""), *rows), right=(1,))


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks at even distances in few words.

    >>> _ranks([3, 11, 19, 27]), _ranks([0, 1]), _ranks([0, 1, 8, 9])
    ('3 to 27 by 8', '0 and 1', '0, 1, 8, ..., 9')
    """
    if len(ranks) == 2:
        return f"{ranks[0]} and {ranks[1]}"
    step = ranks[1] - ranks[0]
    if list(ranks) == list(range(ranks[0], ranks[-1] + step, step)):
        return f"{ranks[0]} to {ranks[-1]}" + (f" by {step}" if step != 1 else "")
    return f"{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}"


def _row(term: MemoryTerm, peak: MemoryTerm) -> Row:
    planned = "" if term.predicted is None else format_bytes(term.predicted)
    difference = f"{term.difference / term.predicted:+.2%}" if term.predicted else ""
    word = "" if is_judged(term, peak) else "in the peak"
    return f"  {term.name}", planned, format_bytes(term.compared_bytes), difference, word


def _rehearsal_verdict(found: Rehearsal) -> str:
    if found.ok:
        return f"ok: the list of collectives is the planned one, memory within {REHEARSAL_TOLERANCE:.0%} by term"
    off = [f"{one.name} is not within {REHEARSAL_TOLERANCE:.0%}" for one in found.failed_terms]
    unequal = [] if found.collectives.equal else ["the list of collectives is not the planned one"]
    return f"NOT ok: {'; '.join(unequal + off)}"
