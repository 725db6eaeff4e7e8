"""Numbers of reports by unit: each function returns a `Number` with its text, value, unit and path."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.present.rendering.report import Line, Number, NumberKind
from shardwise.values import format_bytes, format_percent, format_quantity, format_seconds, format_usd

UNKNOWN = "-"


def num_bytes(value: float | None, path: str = "") -> Number:
    """A number of bytes, such as "12.3 GB"."""
    return Number(UNKNOWN if value is None else format_bytes(value), value, "B", path)


def seconds(
    value: float | None, path: str = "", interval: tuple[float, float] | None = None, kind: NumberKind = "exact"
) -> Number:
    """A time, such as "1.23 s"."""
    return Number(UNKNOWN if value is None else format_seconds(value), value, "s", path, interval, kind)


def share(value: float | None, path: str = "", *, digits: int = 1) -> Number:
    """A share of a whole, such as "12.3%"."""
    return Number(UNKNOWN if value is None else f"{value:.{digits}%}", value, "%", path)


def percent(value: float | None, path: str = "") -> Number:
    """A share of a whole with the digits that it needs (`format_percent`)."""
    return Number(UNKNOWN if value is None else format_percent(value), value, "%", path)


def count(value: float | None, path: str = "", unit: str = "") -> Number:
    """A whole number with separators, such as "1,048,576"."""
    return Number(UNKNOWN if value is None else f"{value:,.0f}", value, unit, path)


def usd(value: float | None, path: str = "", interval: tuple[float, float] | None = None) -> Number:
    """An amount of US dollars."""
    return Number(UNKNOWN if value is None else format_usd(value), value, "$", path, interval)


def ends(number: Number, form: Callable[[float], str]) -> Line:
    """Return a number with the ends of its interval behind it, such as "1.5 (1.2 to 2.1)"; alone if it has none."""
    if number.interval is None:
        return Line((number,))
    path = f"{number.path}_interval90" if number.path else ""
    low, high = (
        Number(form(end), end, number.unit, path and f"{path}.{index}") for index, end in enumerate(number.interval)
    )
    return Line((number, " (", low, " to ", high, ")"))


def quantity(value: float | None, unit: str, path: str = "", *, digits: int = 3) -> Number:
    """A number with a unit and its prefix, such as "459 TFLOP/s"."""
    return Number(UNKNOWN if value is None else format_quantity(value, unit, digits=digits), value, unit, path)


def fixed(value: float | None, decimals: int, path: str = "", unit: str = "") -> Number:
    """A number with separators and some decimals, such as "1,234.5"."""
    return Number(UNKNOWN if value is None else f"{value:,.{decimals}f}", value, unit, path)


def significant(value: float | None, path: str = "", unit: str = "", *, digits: int = 4) -> Number:
    """A number with some significant digits, such as "0.01562"."""
    return Number(UNKNOWN if value is None else f"{value:.{digits}g}", value, unit, path)
