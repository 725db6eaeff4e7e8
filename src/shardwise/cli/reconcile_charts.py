"""A run against its plan, as charts."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.draw.bars import Bar, BarChart
from shardwise.measurement.record import MEASURED_TERMS
from shardwise.planning.plan import Plan
from shardwise.reconcile.compare import Reconciliation
from shardwise.terms import MEMORY_TERMS


def charts(plan: Plan, found: Reconciliation) -> tuple[BarChart, BarChart]:
    """Predicted above measured, of time and of memory."""
    time, memory = found.time, found.memory
    about = f"{plan.model.name}, {plan.layout}, on {found.machine}"
    seconds = [
        {one.name: one.predicted_s or 0.0 for one in time.terms},
        {one.name: one.measured_s for one in time.terms},
    ]
    held = [
        {one.name: one.predicted or 0.0 for one in memory.terms},
        {one.name: max(one.measured, 0.0) for one in memory.terms},
    ]
    return (
        _chart("Time of a step", about, seconds, MEASURED_TERMS, "s"),
        _chart("Memory of a device", about, held, MEMORY_TERMS, "B"),
    )  # fmt: skip


def _chart(title: str, about: str, both: list[dict[str, float]], order: Iterable[str], unit: str) -> BarChart:
    names = [name for name in order if any(parts.get(name, 0.0) > 0 for parts in both)]
    bars = tuple(
        Bar(label=label, parts={name: parts.get(name, 0.0) for name in names})
        for label, parts in zip(("predicted", "measured"), both, strict=True)
    )
    return BarChart(title=f"{title}: predicted and measured", subtitle=about, bars=bars, unit=unit)
