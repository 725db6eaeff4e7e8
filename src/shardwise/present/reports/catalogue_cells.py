"""Cells of catalogues: values in the units that their names say, and sources shortened for tables."""

from __future__ import annotations

from typing import Any

from shardwise.present.rendering.report import Cell, Number
from shardwise.values import format_count, format_quantity, format_seconds

UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "bytes": "B",
    "usd_per_hour": "USD/h",
}  # by a part of a value's name
MAX_SOURCE_LENGTH = 100  # characters of a source in a table


def value_cell(key: str, value: Any, path: str) -> Cell:
    """Return a value of the catalogue as a cell: a number with its path in the payload, or a text."""
    text = format_catalogue_value(key, value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Number(text, value, next((unit for part, unit in UNITS.items() if part in key), ""), path)
    return text


def format_catalogue_value(key: str, value: Any) -> str:
    """Format a value in the unit that its name says.

    >>> format_catalogue_value("memory_bytes", 80e9), format_catalogue_value("wraps", (True, False))
    ('80 GB', 'yes, no')
    """
    if value is None or value == () or value == []:
        return "none"
    if isinstance(value, (list, tuple)):
        separator = "x" if isinstance(value[0], int) and not isinstance(value[0], bool) else ", "
        return separator.join(format_catalogue_value("", part) for part in value)
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


def shorten_source(source: str) -> str:
    """Return a source without what it says, where that makes a table too wide."""
    if len(source) <= MAX_SOURCE_LENGTH:
        return source
    clause = source.partition(";")[0]
    return clause if len(clause) <= MAX_SOURCE_LENGTH else clause.partition(":")[0]
