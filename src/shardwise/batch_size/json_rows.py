"""Rows of files that hold runs: lines of JSON, and the numbers in them, with every problem named by its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.values import FileMessages, parse_json_line, read_text


def read_required_text(path: Path, required: str) -> str:
    """Return a file's text. Raises `InputError` that says what is `required`."""
    return read_text(path, FileMessages(fix=f"{required} is required"))


def parse_json_lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each line's place, FILE:LINE, and its value; a line that is not JSON is given as its text."""
    for line_number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}:{line_number}", parse_json_line(line)
            except ValueError:
                yield f"{path}:{line_number}", line


def not_an_object_text(row: Any, location: str) -> str:
    """Return the problem of a row that is no object."""
    return f"{location}: found {str(row)[:40]!r}; a JSON object is required"


def read_positive(
    row: Mapping[str, Any], name: str, location: str, problems: list[str], *, required: bool = False
) -> float | None:
    """Return the number above 0 under a name; None where there is none, and, with a line added to `problems`, for anything
    else."""
    value = row.get(name)
    if value is None and not required:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if 0 < number < math.inf:
        return number
    problems.append(
        f"{location}: {name} is {value!r}; a number above 0{'' if required else ', or nothing,'} is required"
    )
    return None
