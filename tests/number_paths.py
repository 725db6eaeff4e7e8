"""Numbers of a report are those of the payload, at the places that they name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.present.registry import payload_of, report_of
from shardwise.present.rendering.report import Line, Number, Table


def require_payload_numbers(result: Any) -> int:
    """Compare every number that has a path with the payload; return how many there are."""
    payload, numbers = payload_of(result), [number for number in numbers_of(report_of(result)) if number.path]
    for number in numbers:
        assert resolve(payload, number.path) == number.value, number
    return len(numbers)


def numbers_of(report: Any) -> Iterator[Number]:
    """The numbers of all lines and tables."""
    for section in report:
        for block in section.blocks:
            rows = block.rows if isinstance(block, Table) else ((block,),)
            for cell in (cell for row in rows for cell in row):
                yield from (
                    part for part in (cell.parts if isinstance(cell, Line) else (cell,)) if isinstance(part, Number)
                )


def resolve(value: Any, path: str) -> Any:
    """The value at a dotted path; keys may have dots themselves."""
    if not path:
        return value
    if isinstance(value, (list, tuple)):
        index, _, remaining = path.partition(".")
        return resolve(value[int(index)], remaining)
    keys = [key for key in value if path == key or path.startswith(f"{key}.")]
    key = max(keys, key=len)
    return resolve(value[key], path[len(key) + 1 :])
