"""Axes of charts: titles, units, ranges, ticks and positions in pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


MOST_DECADES = 10  # that have room along an axis


def ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten from `low` to `high`; 1, 2 and 5 times those where there are at most three decades.

    Where there are more than `MOST_DECADES`, every so many-th of them, 1 among them.
    """
    span = math.log10(high) - math.log10(low)
    steps = (1, 2, 5) if span <= 3.0 + 1e-9 else (1,)
    every = math.ceil(span / MOST_DECADES)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    decades = [decade for decade in range(first, last) if decade % every == 0]
    found = (float(f"{step}e{decade}") for decade in decades for step in steps)
    return tuple(tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))


def even_ticks(high: float, most: int = 10) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `high`, at most `most` and one."""
    decade = math.floor(math.log10(high / most))
    step = next(s for s in (float(f"{m}e{decade}") for m in (1, 2, 5, 10)) if high / s <= most + 1e-9)
    return tuple(i * step for i in range(int(high / step + 1e-9) + 1))


def round_ends(values: Sequence[float]) -> tuple[float, float]:
    """The nearest 1, 2 or 5 times a power of ten that hold all values between them."""
    decades = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    steps = [float(f"{step}e{decade}") for decade in decades for step in (1, 2, 5)]
    low = max(step for step in steps if step <= min(values) * (1 + 1e-9))
    return low, min(step for step in steps if step >= max(values) * (1 - 1e-9) and step > low)


def log_place(value: float, span: tuple[float, float]) -> float:
    """Where on a logarithmic axis a value is, from 0 to 1."""
    low, high = span
    return math.log(value / low) / math.log(high / low)
