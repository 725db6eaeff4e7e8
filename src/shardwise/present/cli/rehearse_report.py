"""A rehearsal, as sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.measure.reconcile.rehearsal import REHEARSAL_TOLERANCE, Rehearsal, is_judged
from shardwise.measure.reconcile.step_terms import MemoryTerm
from shardwise.present.cli.reconcile_report import collective_lines
from shardwise.present.cli.section import Marked, Report, Row, Section, Table
from shardwise.search import Plan
from shardwise.values import format_bytes


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
        Section([Marked(_verdict(found), "good" if found.ok else "bad")]),
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


def _verdict(found: Rehearsal) -> str:
    if found.ok:
        return f"ok: the list of collectives is the planned one, memory within {REHEARSAL_TOLERANCE:.0%} by term"
    off = [f"{one.name} is not within {REHEARSAL_TOLERANCE:.0%}" for one in found.failed_terms]
    unequal = [] if found.collectives.equal else ["the list of collectives is not the planned one"]
    return f"NOT ok: {'; '.join(unequal + off)}"
