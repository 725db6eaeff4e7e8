"""The numbers along axes: round ticks, the round ends that hold all values, and where on an axis a value is."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
