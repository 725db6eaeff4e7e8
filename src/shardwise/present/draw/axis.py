"""An axis: what it counts, how its numbers are written, its ticks, and where along it a value lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.present.draw.scales import even_ticks, log_place, round_ends, ticks
from shardwise.values import format_bytes, format_quantity, format_seconds, format_usd

MOST_TICKS = 8  # of a linear axis
HEADROOM = 1.05  # of a linear axis over the largest value
SHOWN: Mapping[str, Callable[[float], str]] = {
    "": format_quantity,
    "s": format_seconds,
    "B": format_bytes,
    "$": format_usd,
    "%": lambda value: f"{100 * value:.3g}%",
    "x": lambda value: f"{value:.3g}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A logarithmic axis, or a linear one from 0; `unit` is a key of `SHOWN`, "" for decimal prefixes."""

    title: str
    unit: str = ""
    linear: bool = False

    def show(self, value: float) -> str:
        """A value as it is written at a tick."""
        return SHOWN[self.unit](value)

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """Where the axis begins and ends, so that it holds all values."""
        return (0.0, max(values) * HEADROOM) if self.linear else round_ends(values)

    def ticks(self, ends: tuple[float, float]) -> tuple[float, ...]:
        """The values that are written along it."""
        return even_ticks(ends[1], MOST_TICKS) if self.linear else ticks(*ends)

    def place(self, value: float, ends: tuple[float, float]) -> float:
        """Where a value is, from 0 to 1."""
        return (value - ends[0]) / (ends[1] - ends[0]) if self.linear else log_place(value, ends)
