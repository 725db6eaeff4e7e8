"""Estimates as tables and bars: the terms of a step's time, and of a device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwise.present.draw.bars import Bar, BarChart
from shardwise.present.draw.notebook import Shown, Table
from shardwise.values import InputError, format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.price import Estimate

Charts = tuple[BarChart, BarChart]


def estimate_facts(estimate: Estimate) -> dict[str, str]:
    """The headline figures of an estimate, by name."""
    between = (
        " to ".join(map(format_seconds, estimate.interval90)) if estimate.interval90 else "none: the step is a bound"
    )
    fits = f"fits, {estimate.margin:.0%} free" if estimate.fits else f"DOES NOT FIT, {-estimate.margin:.0%} too much"
    return {
        "step": format_seconds(estimate.step_time_s), "90% prediction interval": between,
        "tokens/s per device": f"{estimate.tokens_per_s_per_device:,.0f}", "MFU": f"{estimate.mfu:.1%}",
        "bound by": estimate.bound,
        "memory": f"{format_bytes(estimate.memory_bytes)} of {format_bytes(estimate.memory_capacity_bytes)} ({fits})",
    }  # fmt: skip


def estimate_charts(about: str, estimates: Mapping[str, Estimate]) -> Charts:
    """Seconds of a step and bytes of a device, by term, a bar for each labelled estimate. Raises `InputError` for none."""
    if not estimates:
        raise InputError("picture: found no estimate; one at least is required")
    capacity = max(estimate.memory_capacity_bytes for estimate in estimates.values())
    time = tuple(Bar(label=label, parts=estimate.time) for label, estimate in estimates.items())
    memory = tuple(Bar(label=label, parts=estimate.memory) for label, estimate in estimates.items())
    return (
        BarChart(title="Time of a step", subtitle=about, bars=time, unit="s"),
        BarChart(
            title="Memory of the fullest device", subtitle=about, bars=memory,
            limit=capacity, limit_label=f"capacity: {format_bytes(capacity)}",
        ),
    )  # fmt: skip


def shown_estimate(estimate: Estimate) -> Shown:
    """An estimate in a notebook."""
    kind = "a prediction" if estimate.interval90 else "a bound"
    return Shown(
        title=f"Estimate, {kind}", tables=(Table.of(estimate_facts(estimate)),),
        charts=lambda: estimate_charts(kind, {"this layout": estimate}),
    )  # fmt: skip
