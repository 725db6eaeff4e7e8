"""A sweep, as sections: a table of its points, where scaling ends, the layouts, and why some points have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from shardwise.present.cli.interval import INTERVAL
from shardwise.present.cli.section import Report, Row, Section, Table
from shardwise.present.pictures.sweep_charts import BILLION, absent, what_is_planned
from shardwise.price import PRICE_FIELD, Estimate
from shardwise.search import SweepPoint, Swept, grid_points
from shardwise.search.plan_sweep import find_knee, step_time_parts, waiting_share
from shardwise.search.sweep_values import format_value
from shardwise.values import format_bytes, format_days, format_percent, format_seconds, format_usd, pluralize

ABSENT = "-"
LOST = (0.9, 0.5)  # efficiencies whose loss is said: a tenth, and half; a choice
OF_ESTIMATE: Mapping[str, Callable[[Estimate], str]] = {
    "step": lambda one: format_seconds(one.step_time_s),
    "tokens/s per device": lambda one: f"{one.tokens_per_s_per_device:,.0f}",
    "MFU": lambda one: f"{one.mfu:.1%}",
    "exposed": lambda one: format_percent(step_time_parts(one)["exposed communication"] / one.step_time_s),
    "bubble": lambda one: format_percent(step_time_parts(one)["bubble"] / one.step_time_s),
    "memory": lambda one: format_bytes(one.memory_bytes),
    "bound by": lambda one: one.bound,
}
OF_POINT: Mapping[str, Callable[[SweepPoint], str]] = {
    "a step": lambda one: _usd(one.usd_per_step),
    "1B tokens": lambda one: _usd(None if one.usd_per_token is None else one.usd_per_token * BILLION),
    "days": lambda one: format_days(one.plan.run.days) if one.plan and one.plan.run else ABSENT,
    "the run": lambda one: _usd(one.plan.run.usd) if one.plan and one.plan.run else ABSENT,
}


def _usd(value: float | None) -> str:
    return ABSENT if value is None else format_usd(value)


def sweep_report(swept: Swept) -> Report:
    """Headline, for a grid its MFUs, the table, what bounds scaling, the layouts, what has no plan, notes."""
    what, job = what_is_planned(swept)
    names = " and ".join(f"{sweep.name} over {pluralize(len(sweep.values), 'value')}" for sweep in swept.sweeps)
    left = list(_left(swept))
    return [
        Section([f"  {names}", *_interval(swept)], title=f"{what}, {job}"),
        *([Section([_mfus(swept)])] if len(swept.sweeps) > 1 else []),
        Section([sweep_table(swept)]),
        Section(list(_knees(swept))),
        Section([_layouts(swept)], title="layouts"),
        *([Section(left, title=f"stopped after {len(swept.points)} of {swept.num_points} points; not planned:")] if left else []),
        Section([*_notes(swept.points), *_prices(swept.points)]),
    ]  # fmt: skip


def _interval(swept: Swept) -> Iterator[str]:
    """How far a prediction may be off, as factors of each step."""
    found = [point.plan.estimate for point in swept.points if point.plan and point.plan.estimate.interval90]
    ratios = [end / one.step_time_s for one in found for end in one.interval90 or ()]
    if ratios:
        yield f"  {INTERVAL}: {min(ratios):.2f} to {max(ratios):.2f} times each step"


def sweep_table(swept: Swept) -> Table:
    """A line for each point; columns that nothing is known of are left out."""
    points, names = swept.points, [sweep.name for sweep in swept.sweeps]
    columns: list[tuple[str, list[str]]] = [
        (name, [format_value(point.at[name]) for point in points]) for name in names
    ]
    columns += [
        (name, [form(point.plan.estimate) if point.plan else ABSENT for point in points])
        for name, form in OF_ESTIMATE.items()
    ]
    columns[len(names)] = (
        "step",
        [format_seconds(p.plan.estimate.step_time_s) if p.plan else absent(p) for p in points],
    )
    if "gpus" in names:
        found = _efficiencies(swept)
        columns.insert(len(names) + 2, ("efficiency", [f"{found[p.name]:.1%}" if p.plan else ABSENT for p in points]))
    columns += [(name, [form(point) for point in points]) for name, form in OF_POINT.items()]
    kept = [(name, cells) for name, cells in columns if name in names or set(cells) != {ABSENT}]
    rows: list[Row] = [tuple(name for name, _ in kept), *zip(*(cells for _, cells in kept), strict=True)]
    right = [number for number, (name, _) in enumerate(kept) if name not in ("bound by", "model")]
    return Table(rows=tuple(rows), right=right)


def _efficiencies(swept: Swept) -> dict[str, float]:
    """Tokens/s of a device over those with the first number of devices that has a plan, by the point's name."""
    return {
        point.name: point.plan.estimate.tokens_per_s_per_device / first
        for _, points in swept.series("gpus")
        for first in [one.plan.estimate.tokens_per_s_per_device for one in points if one.plan][:1]
        for point in points
        if point.plan
    }


def _mfus(swept: Swept) -> Table:
    """MFU of a grid: a row for each value of the first sweep, a column for each of the second."""
    first, second = swept.sweeps
    at = {tuple(point.at.values()): point for point in swept.points}
    rows: list[Row] = [(f"MFU by {first.name} and {second.name}", *map(format_value, second.values))]
    for value in first.values:
        found = [at.get((value, other)) for other in second.values]
        rows.append(
            (format_value(value), *(f"{p.plan.estimate.mfu:.1%}" if p and p.plan else absent(p) for p in found))
        )
    return Table(rows=tuple(rows), right=range(1, len(rows[0])))


def _knees(swept: Swept) -> Iterator[str]:
    """Where each series stops to scale, and where compute takes most throughout; from where on efficiency is lost."""
    name = swept.along.name
    efficiencies = _efficiencies(swept) if name == "gpus" else {}
    for at, points in swept.series() if swept.along.is_ordered else ():
        planned = [point for point in points if point.plan]
        if len(planned) < 2:
            continue
        found = find_knee(points)
        said = (
            f"knee at {name}={format_value(found.point.at[name])}: {found.reason}" if found else _no_knee(planned, name)
        )
        where = ", ".join(f"{other}={format_value(value)}" for other, value in at.items())
        lost = [
            f"below {part:.0%} at {name}={format_value(first.at[name])}"
            for part in LOST
            for first in [point for point in planned if efficiencies.get(point.name, 1.0) < part][:1]
        ]
        yield (f"{where}: " if where else "") + said + (f"; efficiency falls {', '.join(lost)}" if lost else "")


def _no_knee(planned: Sequence[SweepPoint], name: str) -> str:
    """What bounds all of the steps, and how much of them devices wait at most."""
    found = [(waiting_share(point.plan.estimate), point) for point in planned if point.plan]
    most, where = max(found, key=lambda pair: pair[0])
    assert where.plan
    return (
        f"no knee: every step is bound by {where.plan.estimate.bound}; exposed communication and bubble are at most "
        f"{most:.0%} of it, at {name}={format_value(where.at[name])}"
    )


def _layouts(swept: Swept) -> Table:
    """Of each point its layout, or why it has none."""
    rows: list[Row] = []
    for point in swept.points:
        first, *others = (str(point.plan.layout) if point.plan else str(point.error)).split("\n")
        rows += [(point.name, first), *(("", other) for other in others)]
    return Table(rows=tuple(rows), head=False, indent=2)


def _left(swept: Swept) -> Iterator[str]:
    """What was not planned where the sweep was stopped."""
    done = [dict(point.at) for point in swept.points]
    for at in grid_points(swept.sweeps):
        if dict(at) not in done:
            yield f"  {', '.join(f'{name}={format_value(value)}' for name, value in at.items())}"


def _notes(points: Sequence[SweepPoint]) -> Iterator[str]:
    """What estimates say about themselves, with the points where not all say it."""
    planned = [(point.name, point.plan.estimate.notes) for point in points if point.plan]
    said: dict[str, list[str]] = {}
    for name, notes in planned:
        for note in notes:
            said.setdefault(note, []).append(name)
    for note, names in said.items():
        yield f"  note: {note}" if len(names) == len(planned) else f"  note: {'; '.join(names)}: {note}"


def _prices(points: Sequence[SweepPoint]) -> Iterator[str]:
    """Which chips have no sourced price."""
    chips = {point.case.cluster.chip.name: point.case.cluster.chip for point in points}
    dearer = ", ".join(sorted(name for name, chip in chips.items() if chip.price_usd_per_hour is None))
    if dearer:
        yield f"  note: no sourced {PRICE_FIELD} of {dearer}: dollars are left out (--set chip.{PRICE_FIELD}=VALUE)"
