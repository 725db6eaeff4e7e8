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

from shardwise.values.errors import OutputError, describe_unknown, did_you_mean, format_problems

FLAG = re.compile(r"(-[-A-Za-z][^\s=]*)(?:=.*)?", re.DOTALL)  # a negative number is none
# What may stand for a value: the names of a catalogue, as `show` calls it, or what the values before it make possible.
CompletionSource = str | Callable[[Sequence[str]], Iterable[str]]
EXIT_USAGE = 2  # exit code of a command line that is wrong


class ParagraphHelpFormatter(argparse.HelpFormatter):
    """Paragraphs folded to the width of the terminal; those with an indented line (examples, tables) as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = (part.strip("\n") for part in text.split("\n\n"))
        return "\n\n".join(part if "\n " in part else _fold_paragraph(part, width) for part in parts)


def _fold_paragraph(paragraph: str, width: int) -> str:
    return textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False)


class ArgumentGroup:
    """Arguments that the help has under a title of their own."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def add_argument(self, *names: Any, completes: CompletionSource = "", **settings: Any) -> argparse.Action:
        """As the parser has it; `completes` says what a shell offers for the value."""
        action: argparse.Action = self._group.add_argument(*names, **_add_text_type(settings))
        action.completes = completes  # type: ignore[attr-defined]
        return action


class Parser(argparse.ArgumentParser):
    """A parser that says which flag or choice is nearest to one that it does not know, and with `--json` says it as JSON.

    An empty text is no value to it: it is not taken for an argument that was left out.
    """

    as_json = False
    examples: tuple[str, ...] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": ParagraphHelpFormatter, **settings})
        self._titled: dict[str, ArgumentGroup] = {}

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As argparse has it; what takes a value takes one that is not empty, but for a layout: it has every default."""
        return super().add_argument(*names, **_add_text_type(settings))

    def group(self, title: str) -> ArgumentGroup:
        """The group with this title, which is made when it is first asked for."""
        if title not in self._titled:
            self._titled[title] = ArgumentGroup(self.add_argument_group(title))
        return self._titled[title]

    def groups(self, *titles: str) -> tuple[ArgumentGroup, ...]:
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
        self.as_json = wants_json(words)
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
            raise argparse.ArgumentError(action, describe_unknown(value, action.choices))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, after the usage; with `--json` as JSON alone. Exits with 2."""
        if self.as_json:
            self.exit(EXIT_USAGE, format_problems([message], EXIT_USAGE, as_json=True) + "\n")
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file in (None, sys.stderr):
            write_error(message)
        else:
            write_text(message, file)


def _add_text_type(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an argument, with the kind of text that it takes where they do not say another."""
    takes_value = settings.get("action", "store") in ("store", "append")
    return {"type": non_empty_text, **settings} if takes_value else settings


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for its answer as JSON, and so for its errors."""
    return "--json" in takewhile(lambda word: word != "--", words)


def non_empty_text(text: str) -> str:
    """The text. Raises `ArgumentTypeError`, to which argparse adds the argument's name, for one of blanks alone."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"found {text!r}; a value is required")
    return text


# What stands for a character that an encoding lacks.
SUBSTITUTES: Mapping[str, str] = {
    "≥": ">=", "≤": "<=", "≠": "!=", "→": "->", "←": "<-", "−": "-", "–": "-", "—": "-", "·": "*", "×": "x", "±": "+-",
    "µ": "u", "…": "...", "²": "^2", "α": "alpha", "β": "beta", "Σ": "sum", "‖": "|", "“": '"', "”": '"', "‘": "'", "’": "'",
    "█": "#", "▓": "+", "░": "-", "━": "-", "╸": "-", "╺": "-",
}  # fmt: skip


def substitute_unencodable(text: str, encoding: str | None) -> str:
    """The text with characters that the encoding lacks written in those that it has.

    >>> substitute_unencodable("512 ≥ 256 tokens in 3 µs", "ascii")
    '512 >= 256 tokens in 3 us'
    >>> substitute_unencodable("512 ≥ 256 tokens in 3 µs", "cp1252")
    '512 >= 256 tokens in 3 µs'
    """
    encoding = encoding or "utf-8"
    if _can_encode(text, encoding):
        return text
    return "".join(
        one
        if _can_encode(one, encoding)
        else SUBSTITUTES.get(one, one).encode(encoding, "backslashreplace").decode(encoding)
        for one in text
    )


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def write_text(text: str, stream: TextIO | None) -> None:
    """Write and flush. Raises `OutputError` where that is not possible, and `BrokenPipeError` where the reader has left.

    A stream that was closed before the program began (None) takes nothing. One that cannot be written is pointed at nothing, so
    that the interpreter does not try it again when it ends.
    """
    if stream is None:
        return
    try:
        stream.write(substitute_unencodable(text, getattr(stream, "encoding", None)))
        stream.flush()
    except OSError as error:
        _redirect_to_devnull(stream)
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"the output cannot be written: {error.strerror or error}") from None


def write_error(text: str, stream: TextIO | None = None) -> None:
    """Write on the error stream (another one, if given); where that fails too, there is nothing left to report to."""
    with suppress(OutputError, BrokenPipeError):
        write_text(text, stream or sys.stderr)


def _redirect_to_devnull(stream: TextIO) -> None:
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # of no file
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)
