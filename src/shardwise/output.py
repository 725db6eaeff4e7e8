"""Text to the streams of a command line: of any encoding, on a disk that may be full, to a reader who may have left."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from shardwise.errors import OutputError

# What stands for a character that an encoding lacks.
PLAIN: Mapping[str, str] = {
    "≥": ">=", "≤": "<=", "≠": "!=", "→": "->", "←": "<-", "−": "-", "–": "-", "—": "-", "·": "*", "×": "x", "±": "+-",
    "µ": "u", "…": "...", "²": "^2", "α": "alpha", "β": "beta", "Σ": "sum", "‖": "|", "“": '"', "”": '"', "‘": "'", "’": "'",
    "█": "#", "▓": "+", "░": "-", "━": "-", "╸": "-", "╺": "-",
}  # fmt: skip


def printable(text: str, encoding: str | None) -> str:
    """The text with characters that the encoding lacks written in those that it has.

    >>> printable("512 ≥ 256 tokens in 3 µs", "ascii")
    '512 >= 256 tokens in 3 us'
    >>> printable("512 ≥ 256 tokens in 3 µs", "cp1252")
    '512 >= 256 tokens in 3 µs'
    """
    encoding = encoding or "utf-8"
    if _encodes(text, encoding):
        return text
    return "".join(
        one if _encodes(one, encoding) else PLAIN.get(one, one).encode(encoding, "backslashreplace").decode(encoding)
        for one in text
    )


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def write(text: str, stream: TextIO | None) -> None:
    """Write and flush. Raises `OutputError` where that is not possible, and `BrokenPipeError` where the reader has left.

    A stream that was closed before the program began (None) takes nothing. One that cannot be written is pointed at nothing, so
    that the interpreter does not try it again when it ends.
    """
    if stream is None:
        return
    try:
        stream.write(printable(text, getattr(stream, "encoding", None)))
        stream.flush()
    except OSError as error:
        _abandon(stream)
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"the output cannot be written: {error.strerror or error}") from None


def complain(text: str, stream: TextIO | None = None) -> None:
    """Write on the error stream (another one, if given); where that fails too, there is nothing left to report to."""
    with suppress(OutputError, BrokenPipeError):
        write(text, stream or sys.stderr)


def _abandon(stream: TextIO) -> None:
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # of no file
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)
