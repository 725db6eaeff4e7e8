"""A run against its plan as tables and bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardwise.present.draw.bars import Bar, BarChart
from shardwise.present.draw.notebook import Shown, Table
from shardwise.records.step_log import MEASURED_TERMS
from shardwise.values import MEMORY_TERMS, format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.measure import Reconciliation


def shown_reconciliation(found: Reconciliation) -> Shown:
    """A reconciliation in a notebook: the step and what it is attributed to, then every term."""
    time, memory = found.time, found.memory
    facts = {
        "ran on": found.machine, "step predicted": format_seconds(time.predicted_s),
        "step measured": f"{format_seconds(time.measured_s)}, mean of the middle half of {time.num_steps} steps",
        "attributed to": found.attribution.term.name if found.attribution else "", "unexplained": f"{time.rest_share:.1%}",
    } | {f"remark {number}": remark for number, remark in enumerate(found.remarks, 1)}  # fmt: skip
    seconds = [(one.name, _seconds(one.predicted_s), _seconds(one.measured_s)) for one in time.terms]
    held = [(one.name, _bytes(one.predicted), _bytes(one.measured)) for one in (*memory.terms, memory.total)]
    tables = (
        Table.of(facts),
        Table(head=("time of a step", "predicted", "measured"), rows=tuple(row for row in seconds if any(row[1:]))),
        Table(head=("memory of a device", "predicted", "measured"), rows=tuple(row for row in held if any(row[1:]))),
    )
    return Shown(
        title=f"A run on {found.machine} against its plan", tables=tables, charts=lambda: reconciliation_charts(found)
    )


def _seconds(value: float | None) -> str:
    return format_seconds(value) if value else ""


def _bytes(value: float | None) -> str:
    return format_bytes(value) if value and value > 0 else ""


def reconciliation_charts(found: Reconciliation, about: str = "") -> tuple[BarChart, BarChart]:
    """Predicted above measured, of time and of memory; `about` says whose they are."""
    time, memory = found.time.terms, found.memory.terms
    predicted_s = {one.name: one.predicted_s or 0.0 for one in time}
    predicted_bytes = {one.name: one.predicted or 0.0 for one in memory}
    measured_s = {one.name: one.measured_s for one in time}
    measured_bytes = {one.name: max(one.measured, 0.0) for one in memory}
    said = about or f"on {found.machine}"
    return (
        _chart("Time of a step", said, predicted_s, measured_s, MEASURED_TERMS, "s"),
        _chart("Memory of a device", said, predicted_bytes, measured_bytes, MEMORY_TERMS, "B"),
    )  # fmt: skip


def _chart(
    title: str,
    about: str,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    order: Iterable[str],
    unit: str,
) -> BarChart:
    both = {"predicted": predicted, "measured": measured}
    names = [name for name in order if any(parts.get(name, 0.0) > 0 for parts in both.values())]
    bars = (Bar(label=label, parts={name: parts.get(name, 0.0) for name in names}) for label, parts in both.items())
    return BarChart(title=f"{title}: predicted and measured", subtitle=about, bars=tuple(bars), unit=unit)
