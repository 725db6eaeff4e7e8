"""Lines of a log of any size: read block by block, without colours, none longer than a bound."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 20  # bytes read at a time
LONGEST = 1 << 16  # bytes kept of a line: lines of steps are a few hundred long
# Colours and cursors of terminals, and how `cat -v`, syslog and JSON write them.
_ESCAPES = re.compile(rb"(?:\x1b|\^\[|#033|\\x1b|\\u001b)\[[0-9;?]*[A-Za-z]")


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, however they end; of a longer one its last `LONGEST` bytes."""
    with path.open("rb") as file:
        rest = b""
        while block := file.read(BLOCK):
            *whole, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
            yield from whole
            rest = rest[-LONGEST:]
        if rest:
            yield rest


def text_of(line: bytes) -> str:
    """A line as text, without what colours it."""
    return _ESCAPES.sub(b"", line[-LONGEST:]).decode("utf-8", errors="replace")


def json_line(text: str) -> dict[str, Any] | None:
    """The object that a line is, in front of which a launcher may have written whose it is; None for none."""
    try:
        found = json.loads(text[text.find("{") :])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
