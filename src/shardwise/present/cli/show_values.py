"""What `show` prints of a value: in its unit."""

from __future__ import annotations

from typing import Any

UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "bytes": "B",
    "usd_per_hour": "USD/h",
}  # by a part of a value's name
WIDEST_SOURCE = 100  # of a table


def shown(key: str, value: Any) -> str:
    """A value in the unit that its name says."""
    from shardwise.values import format_count, format_quantity, format_seconds

    if value is None or value == () or value == []:
        return "none"
    if isinstance(value, (list, tuple)):
        return ("x" if isinstance(value[0], int) and not isinstance(value[0], bool) else ", ").join(
            shown("", part) for part in value
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if key.endswith("num_params") and isinstance(value, float):
        return format_count(value)
    if key.endswith("_w"):
        return f"{value:g} W"
    for part, unit in UNITS.items():
        if part in key:
            return format_quantity(float(value), unit, digits=4)
    if key.endswith("latency_s"):
        return format_seconds(float(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def first_words(source: str) -> str:
    """A source without what it says, where that makes a table too wide."""
    if len(source) <= WIDEST_SOURCE:
        return source
    clause = source.partition(";")[0]
    return clause if len(clause) <= WIDEST_SOURCE else clause.partition(":")[0]
