"""Report of plans on several clusters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from shardwise.present.rendering.report import Report, Row, Section, Table
from shardwise.present.reports.wording import INTERVAL, format_interval
from shardwise.search import Comparison, Plan, describe_missed_limits
from shardwise.search.compare_clusters import Contender, suggest_remedies
from shardwise.values import (
    Progress,
    format_count,
    format_days,
    format_seconds,
    format_usd,
    ignore_progress,
)
from shardwise.values.units import format_energy

if TYPE_CHECKING:
    from shardwise.layout import Choices


ABSENT = "-"
Column = Callable[[Contender], str]
COLUMNS: Mapping[str, Column] = {
    "devices": lambda one: f"{one.num_devices:,}",
    "step": lambda one: format_seconds(one.plan.estimate.step_time_s) if one.plan else "nothing fits",
    "stack": lambda one: one.stack or ABSENT,
    INTERVAL: lambda one: format_interval(one.interval90) if one.interval90 else ABSENT,
    "MFU": lambda one: f"{one.plan.estimate.mfu:.1%}" if one.plan else ABSENT,
    "days": lambda one: _days(one.run.days) if one.run else ABSENT,
    "chip-hours": lambda one: format_count(one.run.chip_hours) if one.run else ABSENT,
    "price": lambda one: _price(one.plan) if one.plan else ABSENT,
    "cost": lambda one: format_usd(one.run.usd) if one.run and one.run.usd is not None else ABSENT,
    "energy": lambda one: format_energy(one.run.energy_mwh) if one.run and one.run.energy_mwh is not None else ABSENT,
    "in time": lambda one: _said(one.in_time),
    "in budget": lambda one: _said(one.within_budget),
}


def _days(days: float) -> str:
    return f"{days:,.1f}" if days >= 1 else format_days(days)


def _price(plan: Plan) -> str:
    """Dollars of a chip-hour, and when they were read."""
    chip = plan.cluster.chip
    if chip.price_usd_per_hour is None:
        return ABSENT
    return f"${chip.price_usd_per_hour:.2f}/h" + (f" ({chip.price_date})" if chip.price_date else "")


def _said(met: bool | None) -> str:
    return ABSENT if met is None else "yes" if met else "NO"


def comparison_report(comparison: Comparison) -> Report:
    """The table with what holds for its figures, the choice with its reason, each cluster's layout, what is absent."""
    assert comparison.chosen is not None
    chosen = comparison.contenders[comparison.chosen]
    layouts = Table(rows=tuple((one.cluster, _layout_text(one)) for one in comparison.contenders), head=False, indent=2)
    return [
        Section([comparison_table(comparison), *_notes(comparison, caveats=True)]),
        Section([f"chosen: {chosen.cluster}, {comparison.reason}"]),
        Section([layouts], title="layouts"),
        Section(list(_absent(comparison))),
        Section(list(_notes(comparison, caveats=False)), title="what the predictions rest on", detail=True),
    ]


def comparison_table(comparison: Comparison) -> Table:
    """A line for each cluster, the chosen one marked; columns of limits that were not given are left out."""
    limits = comparison.limits
    unasked = {"in time": limits.deadline_s is None, "in budget": limits.budget_usd is None}
    unasked |= {INTERVAL: not any(one.interval90 for one in comparison.contenders)}
    unasked |= dict.fromkeys(
        ("days", "chip-hours", "price", "cost", "energy"), not any(one.run for one in comparison.contenders)
    )
    names = [name for name in COLUMNS if not unasked.get(name)]
    rows: list[Row] = [("  cluster", *names)]
    for number, one in enumerate(comparison.contenders):
        mark = "* " if number == comparison.chosen else "  "
        rows.append((mark + one.cluster, *(COLUMNS[name](one) for name in names)))
    return Table(rows=tuple(rows), right=range(1, len(rows[0])))


def _notes(comparison: Comparison, *, caveats: bool) -> Iterator[str]:
    """What each estimate says about itself, its caveats or the rest; a note that several share is said once."""
    clusters: dict[str, list[str]] = {}
    for one in comparison.contenders:
        for note in one.notes:
            if one.plan and caveats == (note in one.plan.estimate.caveats):
                clusters.setdefault(note, []).append(one.cluster)
    yield from (f"  note: {', '.join(names)}: {note}" for note, names in clusters.items())
    if caveats:
        yield from _mixed(comparison)


def _mixed(comparison: Comparison) -> Iterator[str]:
    predicted = {one.stack is not None for one in comparison.contenders if one.plan}
    if len(predicted) > 1:
        yield "  note: some of these steps are predictions and some bounds, which do not compare"


def _layout_text(one: Contender) -> str:
    return str(one.plan.layout) if one.plan else (one.problem or "")


def _absent(comparison: Comparison) -> Iterator[str]:
    for one in comparison.contenders:
        if one.run and one.run.missing:
            yield f"{one.cluster}: no sourced {', '.join(one.run.missing)} of {one.chip}, so what follows from it is left out"


def near_miss(comparison: Comparison, choices: Choices | None, progress: Progress = ignore_progress) -> Iterator[str]:
    """What each cluster misses, and for the one that misses by the least what would do."""
    limits = comparison.limits
    planned = [(one, one.plan, one.run) for one in comparison.contenders if one.plan and one.run]
    for one in comparison.contenders:
        missed = describe_missed_limits(limits, one.run) if one.run else [one.problem or "nothing fits"]
        yield from (f"{one.cluster}: {line}" for line in missed)
    by_days = limits.deadline_s is not None
    nearest, plan, _ = min(planned, key=lambda found: found[2].days if by_days else found[2].usd or math.inf)
    for line in suggest_remedies(plan, limits, choices=choices, progress=progress):
        yield f"what would do for {nearest.cluster}: {line}"
