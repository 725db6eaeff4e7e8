"""The argument parser of every command line, the verbs' and that of a rank of a run, and text to its streams.

The parser suggests the nearest flag or choice, and reports errors as JSON with `--json`. Text is written in any encoding, on
a disk that may be full, to a reader who may have left.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NoReturn, TextIO

from shardwise.values.errors import OutputError, did_you_mean, told, unknown

FLAG = re.compile(r"(-[-A-Za-z][^\s=]*)(?:=.*)?", re.DOTALL)  # a negative number is none
# What may stand for a value: the names of a catalogue, as `show` calls it, or what the values before it make possible.
Completes = str | Callable[[Sequence[str]], Iterable[str]]
USAGE = 2  # exit code of a command line that is wrong


class Help(argparse.HelpFormatter):
    """Paragraphs folded to the width of the terminal; those with an indented line (examples, tables) as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = (part.strip("\n") for part in text.split("\n\n"))
        return "\n\n".join(part if "\n " in part else _folded(part, width) for part in parts)


def _folded(paragraph: str, width: int) -> str:
    return textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False)


class Group:
    """Arguments that the help has under a title of their own."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def add_argument(self, *names: Any, completes: Completes = "", **settings: Any) -> argparse.Action:
        """As the parser has it; `completes` says what a shell offers for the value."""
        action: argparse.Action = self._group.add_argument(*names, **_typed(settings))
        action.completes = completes  # type: ignore[attr-defined]
        return action


class Parser(argparse.ArgumentParser):
    """A parser that says which flag or choice is nearest to one that it does not know, and with `--json` says it as JSON.

    An empty text is no value to it: it is not taken for an argument that was left out.
    """

    as_json = False
    examples: tuple[str, ...] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": Help, **settings})
        self._titled: dict[str, Group] = {}

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As argparse has it; what takes a value takes one that is not empty, but for a layout: it has every default."""
        return super().add_argument(*names, **_typed(settings))

    def group(self, title: str) -> Group:
        """The group with this title, which is made when it is first asked for."""
        if title not in self._titled:
            self._titled[title] = Group(self.add_argument_group(title))
        return self._titled[title]

    def groups(self, *titles: str) -> tuple[Group, ...]:
        """Several of them."""
        return tuple(map(self.group, titles))

    def describe(self, description: str, examples: Iterable[str], remark: str = "") -> None:
        """Say what the parser is for, before its arguments; and behind them how it is called, and what else to know."""
        self.description, self.examples = description, tuple(examples)
        shown = "\n".join(["examples:", *(f"  {example}" for example in self.examples)])
        self.epilog = "\n\n".join(filter(None, (shown, remark)))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse has it, after a look at the flags: argparse names those that are missing before those that are wrong."""
        words = sys.argv[1:] if args is None else list(args)
        self.as_json = asks_for_json(words)
        known = self._option_string_actions
        wrong = [flag for flag in self._flags(words) if not any(name.startswith(flag) for name in known)]
        if wrong:
            self.error(f"unrecognized arguments: {', '.join(flag + did_you_mean(flag, known) for flag in wrong)}")
        return super().parse_known_args(words, namespace)

    def _flags(self, words: Sequence[str]) -> list[str]:
        """The words that are flags of this parser; behind a verb they are the verb's."""
        flags = [FLAG.fullmatch(word) for word in takewhile(lambda word: word != "--", words)]
        mine = takewhile(bool, flags) if self._subparsers else flags
        return [flag[1] for flag in mine if flag]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown(value, action.choices))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, after the usage; with `--json` as JSON alone. Exits with 2."""
        if self.as_json:
            self.exit(USAGE, told([message], USAGE, as_json=True) + "\n")
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file in (None, sys.stderr):
            complain(message)
        else:
            write(message, file)


def _typed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an argument, with the kind of text that it takes where they do not say another."""
    takes_value = settings.get("action", "store") in ("store", "append")
    return {"type": not_empty, **settings} if takes_value else settings


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for its answer as JSON, and so for its errors."""
    return "--json" in takewhile(lambda word: word != "--", words)


def not_empty(text: str) -> str:
    """The text. Raises `ArgumentTypeError`, to which argparse adds the argument's name, for one of blanks alone."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"found {text!r}; a value is required")
    return text


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
