"""Shell scripts that start a training: the words of their commands, with the variables that the script itself sets.

Only assignments, arrays and words are understood; nothing is run. A value that comes from elsewhere (`$1`, `$(command)`, a
variable that nobody sets) stays as it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.errors import InputError

MOST_CHARACTERS = 1_000_000
MOST_WORDS = 20_000
DEEPEST = 20  # of variables that name variables
_VARIABLE = re.compile(r"\$\{(\w+)\[[@*]\]\}|\$\{(\w+)(?::?-([^{}$]*))?\}|\$([A-Za-z_]\w*)")
_ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+|readonly\s+)?([A-Za-z_]\w*)\+?=")
_ARRAY = re.compile(
    r"^\s*(?:declare\s+-a\s+|local\s+)?([A-Za-z_]\w*)(\+?)=\(((?:'[^']*'|\"[^\"]*\"|[^()'\"])*)\)", re.MULTILINE
)
_QUOTED_ARRAY = re.compile(r'"(\$\{\w+\[[@*]\]\})"')  # each of its words is one
ENDS = {";", "&&", "||", "|", "&", "then", "do", "fi", "done", "else"}


class Command(NamedTuple):
    """What a script starts: `launcher` are the words before the program (torchrun's), `arguments` those behind it."""

    launcher: tuple[str, ...]
    arguments: tuple[str, ...]


def training_command(text: str, what: str) -> Command:
    """The command of a script that starts a program of Python with most options, the script's own variables filled in.

    Raises `InputError` for a text that is no script, or in which no command has an option.
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(
            f"{what}: {len(text):,} characters; a launch script of at most {MOST_CHARACTERS:,} is required"
        )
    text = _QUOTED_ARRAY.sub(r"\1", _uncommented(text.replace("\\\n", " ")))
    variables = dict(_arrays(text, what))
    commands: list[list[str]] = []
    for line in _ARRAY.sub("", text).splitlines():
        _take(line, variables, commands, what)
    found = max(commands, key=_num_options, default=[])
    if not _num_options(found):
        raise InputError(
            f"{what}: no command has an option; a script that starts a training (... --name value ...) is required"
        )
    at = next((i for i, word in enumerate(found) if word.endswith(".py") or (i and found[i - 1] == "-m")), -1)
    return Command(tuple(found[: at + 1]), tuple(part for word in found[at + 1 :] for part in _parts(word)))


def _parts(word: str) -> list[str]:
    """An option with its values in one word, as an array without quotes has it, is several."""
    return word.split() if word.startswith("--") else [word]


def _num_options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _uncommented(text: str) -> str:
    """Without comments: from a # at the start of a word on."""
    return re.sub(r"(^|(?<=\s))#[^\n]*", "", text)


def _arrays(text: str, what: str) -> Iterator[tuple[str, str]]:
    """Arrays by name, each as the words that it has; with += those of before too."""
    found: dict[str, str] = {}
    for name, more, words in _ARRAY.findall(text):
        found[name] = (found.get(name, "") + " " if more else "") + " ".join(words.split("\n"))
        yield name, found[name]


def _take(line: str, variables: dict[str, str], commands: list[list[str]], what: str) -> None:
    """One line of a script: an assignment, or commands."""
    match = _ASSIGNMENT.match(line.strip())
    if match and not _num_options(_split(line, what)[1:]):
        words = _split(line.strip()[match.end() :], what)
        before = f"{variables.get(match[1], '')} " if line[: match.end() + 2].find("+=") >= 0 else ""
        variables[match[1]] = before + _filled(" ".join(words), variables)
        return
    words = _split(_filled(line, variables), what)
    start = 0
    for at, word in enumerate([*words, ";"]):
        if word in ENDS:
            if at > start:
                commands.append(words[start:at])
            start = at + 1


def _filled(text: str, variables: dict[str, str]) -> str:
    """A text with its variables replaced, as often as they name one another."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[4]
        return variables.get(name, match[3] if match[3] is not None else match[0])

    for _ in range(DEEPEST):
        filled = _VARIABLE.sub(value, text)
        if filled == text or len(filled) > MOST_CHARACTERS:
            break
        text = filled
    return text


def _split(text: str, what: str) -> list[str]:
    try:
        words = shlex.split(text, comments=False)
    except ValueError:
        words = text.replace('"', " ").replace("'", " ").split()  # a quote that another line closes
    if len(words) > MOST_WORDS:
        raise InputError(f"{what}: {len(words):,} words on a line; at most {MOST_WORDS:,} are required")
    return words
