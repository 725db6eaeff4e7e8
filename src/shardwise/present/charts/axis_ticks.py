"""Ticks of axes: their places, and values as texts in the units of axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

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
    return _decade_ticks(low, high, every, steps)


def _decade_ticks(low: float, high: float, every: int, steps: Iterable[int]) -> tuple[float, ...]:
    """Return the steps of every n-th power of ten from `low` to `high`."""
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    decades = [decade for decade in range(first, last) if decade % every == 0]
    ticks = (float(f"{step}e{decade}") for decade in decades for step in steps)
    return tuple(tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))


def even_ticks(high: float, max_ticks: int = 10, low: float = 0.0) -> tuple[float, ...]:
    """Return multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at most `max_ticks` and one.

    >>> even_ticks(9.0, 4), even_ticks(109.0, 5, low=60.0)
    ((0.0, 5.0), (60.0, 70.0, 80.0, 90.0, 100.0))
    """
    span = high - low
    decade = math.floor(math.log10(span / max_ticks))
    step = next(s for s in (float(f"{m}e{decade}") for m in (1, 2, 5, 10)) if span / s <= max_ticks + 1e-9)
    return tuple(i * step for i in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1))


LOG_STEPS = (
    (1, (1, 2, 5)),
    (1, (1, 3)),
    (1, (1,)),
    (2, (1,)),
    (3, (1,)),
    (6, (1,)),
)  # of every n-th decade, finest first


def tick_sets(low: float, high: float, max_ticks: int, *, log: bool) -> tuple[tuple[float, ...], ...]:
    """Return ticks for ever narrower plots, each of two at least, the finest first. A range within a decade has linear ones.

    >>> tick_sets(6e4, 8e7, 8, log=True)[-1]
    (100000.0, 1000000.0, 10000000.0)
    """
    decades = (_decade_ticks(low, high, every, steps) for every, steps in LOG_STEPS) if log else ()
    logarithmic = [ticks for ticks in decades if len(ticks) > 1]
    linear = (even_ticks(high, limit, low) for limit in range(max_ticks, 1, -1))
    return tuple(dict.fromkeys(logarithmic or linear))


def padded_range(values: Sequence[float], *, log: bool = False, room: float = 0.06) -> tuple[float, float]:
    """Return the range of an axis that contains all values, with room at both ends.

    >>> padded_range([0.0, 10.0], room=0.1)
    (-1.0, 11.0)
    """
    low, high = min(values), max(values)
    if log:
        return low / (1 + 3 * room), high * (1 + 3 * room)
    margin = (high - low or abs(high) or 1.0) * room
    return low - margin, high + margin


def round_ends(low: float, high: float) -> tuple[float, float]:
    """Return the nearest 1, 2 or 5 times a power of ten that hold two values between them."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{step}e{decade}") for decade in decades for step in (1, 2, 5)]
    start = max(step for step in steps if step <= low * (1 + 1e-9))
    return start, min(step for step in steps if step >= high * (1 - 1e-9) and step > start)
