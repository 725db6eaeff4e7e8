"""Ticks of axes: their places, and values as texts in the units of axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from shardwise.values import format_bytes, format_quantity, format_seconds, format_usd

FORMATS: Mapping[str, Callable[[float], str]] = {
    "": format_quantity,
    "s": format_seconds,
    "B": format_bytes,
    "$": format_usd,
    "%": lambda value: f"{100 * value:.3g}%",
    "x": lambda value: f"{value:.3g}",
}
MAX_DECADES = 10  # that are ticks of one axis


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return powers of ten from `low` to `high`; 1, 2 and 5 times those where there are at most three decades.

    Where there are more than `MAX_DECADES`, every n-th of them, 1 among them.
    """
    span = math.log10(high) - math.log10(low)
    steps = (1, 2, 5) if span <= 3.0 + 1e-9 else (1,)
    every = math.ceil(span / MAX_DECADES)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    decades = [decade for decade in range(first, last) if decade % every == 0]
    ticks = (float(f"{step}e{decade}") for decade in decades for step in steps)
    return tuple(tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))


def even_ticks(high: float, max_ticks: int = 10) -> tuple[float, ...]:
    """Return multiples of 1, 2 or 5 times a power of ten from 0 to `high`, at most `max_ticks` and one."""
    decade = math.floor(math.log10(high / max_ticks))
    step = next(s for s in (float(f"{m}e{decade}") for m in (1, 2, 5, 10)) if high / s <= max_ticks + 1e-9)
    return tuple(i * step for i in range(int(high / step + 1e-9) + 1))


def round_ends(low: float, high: float) -> tuple[float, float]:
    """Return the nearest 1, 2 or 5 times a power of ten that hold two values between them."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{step}e{decade}") for decade in decades for step in (1, 2, 5)]
    start = max(step for step in steps if step <= low * (1 + 1e-9))
    return start, min(step for step in steps if step >= high * (1 - 1e-9) and step > start)
