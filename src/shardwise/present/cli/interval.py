"""A prediction's 90% interval as text. A bound has none."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.price import Estimate
from shardwise.values import format_seconds

INTERVAL = "90% prediction interval"


def step_text(step_time_s: float, interval90: tuple[float, float] | None) -> str:
    """A step's time, with its interval where it is a prediction."""
    around = f" ({INTERVAL} {span_text(interval90)})" if interval90 else ""
    return format_seconds(step_time_s) + around


def span_text(interval90: tuple[float, float]) -> str:
    """The ends of an interval of seconds."""
    return " to ".join(map(format_seconds, interval90))


def rate_text(rate: float, estimate: Estimate, form: Callable[[float], str]) -> str:
    """The ends of the interval of a rate, which is the higher the shorter the step: "" for a bound."""
    if estimate.interval90 is None:
        return ""
    return " to ".join(form(rate * estimate.step_time_s / seconds) for seconds in reversed(estimate.interval90))
