"""What `show` prints: values in their units, rows in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Value = tuple[str, Any, str]  # name, value, source; None and "": there is no source for it
Row = tuple[str, ...]
UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "bytes": "B",
    "usd_per_hour": "USD/h",
}  # by a part of a value's name


def table(rows: Sequence[Row], *, right: Sequence[int] = ()) -> str:
    """Rows in columns, as wide as their widest cell; those in `right` end at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def shown(key: str, value: Any) -> str:
    """A value in the unit that its name says."""
    from shardwise.units import format_count, format_quantity, format_seconds

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
