"""Argument parser of every command line (the verbs and the ranks of a run), and output of text to its streams.

The parser suggests the nearest flag or choice, and reports errors as JSON with `--json`. Text is written in any encoding, to
a disk that may be full or a pipe whose reader may be gone.
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

FLAG = re.compile(r"(-[-A-Za-z][^\s=]*)(?:=.*)?", re.DOTALL)  # not a negative number
# Completions of a value: a catalogue by its name in `show`, or a function of the words before it.
CompletionSource = str | Callable[[Sequence[str]], Iterable[str]]
EXIT_USAGE = 2  # exit code for a wrong command line


class ParagraphHelpFormatter(argparse.HelpFormatter):
    """Help formatter that wraps paragraphs to the terminal's width, but for those with indented lines (examples, tables)."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = (block.strip("\n") for block in text.split("\n\n"))
        return "\n\n".join(block if "\n " in block else _fold_paragraph(block, width) for block in blocks)


def _fold_paragraph(paragraph: str, width: int) -> str:
    return textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False)


class ArgumentGroup:
    """Arguments that the help lists under a title of their own."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def add_argument(self, *names: Any, completes: CompletionSource = "", **settings: Any) -> argparse.Action:
        """Add an argument, as `ArgumentParser.add_argument` does; `completes` says what a shell completes its value with."""
        action: argparse.Action = self._group.add_argument(*names, **_add_text_type(settings))
        action.completes = completes  # type: ignore[attr-defined]
        return action


class Parser(argparse.ArgumentParser):
    """Argument parser that suggests the nearest known flag or choice, and with `--json` prints its errors as JSON.

    An empty text is rejected as a value; it is not treated as an argument that was left out.
    """

    as_json = False
    examples: tuple[str, ...] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": ParagraphHelpFormatter, **settings})
        self._titled: dict[str, ArgumentGroup] = {}

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an argument, as argparse does; one that takes a value rejects an empty text unless `type` says otherwise."""
        return super().add_argument(*names, **_add_text_type(settings))

    def group(self, title: str) -> ArgumentGroup:
        """Return the argument group with this title, created at its first use."""
        if title not in self._titled:
            self._titled[title] = ArgumentGroup(self.add_argument_group(title))
        return self._titled[title]

    def groups(self, *titles: str) -> tuple[ArgumentGroup, ...]:
        """Return the argument groups with these titles."""
        return tuple(map(self.group, titles))

    def describe(self, description: str, examples: Iterable[str], remark: str = "") -> None:
        """Set the description (printed before the arguments), and the examples and the remark printed after them."""
        self.description, self.examples = description, tuple(examples)
        examples_text = "\n".join(["examples:", *(f"  {example}" for example in self.examples)])
        self.epilog = "\n\n".join(filter(None, (examples_text, remark)))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, but report unknown flags first: argparse names missing arguments before unknown ones."""
        command_line = sys.argv[1:] if args is None else list(args)
        self.as_json = wants_json(command_line)
        options = self._option_string_actions
        unknown = [flag for flag in self._flags(command_line) if not any(name.startswith(flag) for name in options)]
        if unknown:
            self.error(f"unrecognized arguments: {', '.join(flag + did_you_mean(flag, options) for flag in unknown)}")
        return super().parse_known_args(command_line, namespace)

    def _flags(self, command_line: Sequence[str]) -> list[str]:
        """Return the words that are flags of this parser; those after a verb belong to the verb's parser."""
        matches = [FLAG.fullmatch(word) for word in takewhile(lambda word: word != "--", command_line)]
        before_verb = takewhile(bool, matches) if self._subparsers else matches
        return [match[1] for match in before_verb if match]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, describe_unknown(value, action.choices))

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, or with `--json` the error as JSON alone, and exit with code 2."""
        if self.as_json:
            self.exit(EXIT_USAGE, format_problems([message], EXIT_USAGE, as_json=True) + "\n")
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if file in (None, sys.stderr):
            write_error(message)
        else:
            write_text(message, file)


def _add_text_type(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an argument with the type `non_empty_text`, unless they name a type or the argument takes no
    value."""
    takes_value = settings.get("action", "store") in ("store", "append")
    return {"type": non_empty_text, **settings} if takes_value else settings


def wants_json(command_line: Sequence[str]) -> bool:
    """Return True if a command line asks for its answer, and so for its errors, as JSON."""
    return "--json" in takewhile(lambda word: word != "--", command_line)


def non_empty_text(text: str) -> str:
    """Return the text. Raises `ArgumentTypeError`, to which argparse adds the argument's name, for one that is blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"found {text!r}; a value is required")
    return text


# Replacements of characters that an encoding lacks.
SUBSTITUTES: Mapping[str, str] = {
    "≥": ">=", "≤": "<=", "≠": "!=", "→": "->", "←": "<-", "−": "-", "–": "-", "—": "-", "·": "*", "×": "x", "±": "+-",
    "µ": "u", "…": "...", "²": "^2", "α": "alpha", "β": "beta", "Σ": "sum", "‖": "|", "“": '"', "”": '"', "‘": "'", "’": "'",
    "█": "#", "▓": "+", "░": "-", "━": "-", "╸": "-", "╺": "-",
}  # fmt: skip


def substitute_unencodable(text: str, encoding: str | None) -> str:
    """Replace the characters that an encoding lacks by ones that it has.

    >>> substitute_unencodable("512 ≥ 256 tokens in 3 µs", "ascii")
    '512 >= 256 tokens in 3 us'
    >>> substitute_unencodable("512 ≥ 256 tokens in 3 µs", "cp1252")
    '512 >= 256 tokens in 3 µs'
    """
    encoding = encoding or "utf-8"
    if _can_encode(text, encoding):
        return text
    return "".join(
        character
        if _can_encode(character, encoding)
        else SUBSTITUTES.get(character, character).encode(encoding, "backslashreplace").decode(encoding)
        for character in text
    )


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def write_text(text: str, stream: TextIO | None) -> None:
    """Write a text and flush. Raises `OutputError` if that fails, and `BrokenPipeError` if the reader is gone.

    A stream that was closed before the program began (None) is ignored. One that cannot be written is redirected to the null
    device, so that the interpreter does not fail on it again at exit.
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
    """Write to stderr, or to another stream; ignore failures, as nowhere is left to report them."""
    with suppress(OutputError, BrokenPipeError):
        write_text(text, stream or sys.stderr)


def _redirect_to_devnull(stream: TextIO) -> None:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a stream without a file
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)
