"""Shell scripts that start a training: the words of their commands, with the variables that the script itself sets.

Assignments, arrays, whole-number arithmetic and conditions on texts are understood; nothing is run. A value that comes from
elsewhere (`$1`, `$(command)`, an unset variable) stays as it is written. Of a condition on it (or on files) nothing is
known, so what depends on it is left out, as are loops and cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.errors import InputError
from shardwise.export.formats.shell_words import Variables, split_words, statements

MOST_CHARACTERS = 1_000_000
DEEPEST = 5  # of commands that are words of a command (bash -c "...")
_ASSIGNMENT = re.compile(r"^(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=")
ENDS = {"&&", "||", "|", "&"}
OPENED, CLOSED = ("for", "while", "until", "case", "select"), ("done", "esac")  # what may run any number of times
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")  # modules that start a program


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
    variables = Variables(what)
    found = max(_commands(text, variables), key=_num_options, default=[])
    if not _num_options(found):
        raise InputError(
            f"{what}: no command has an option; a script that starts a training (... --name value ...) is required"
        )
    at = next((i for i, word in enumerate(found) if _is_program(found, i, word)), -1)
    return Command(tuple(found[: at + 1]), tuple(found[at + 1 :]))


def _is_program(words: list[str], at: int, word: str) -> bool:
    return word.endswith(".py") or (at > 0 and words[at - 1] == "-m" and word not in LAUNCHERS)


def _num_options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _commands(text: str, variables: Variables, depth: int = 0) -> Iterator[list[str]]:
    """Words of each command of a text; its assignments are taken on the way."""
    for statement in _reached(text, variables):
        match = _ASSIGNMENT.match(statement)
        if match and _is_assignment(statement[match.end() :], variables.what):
            variables.take(match[1], statement[match.end() :], more=bool(match[2]))
            continue
        for words in _parts(split_words(variables.filled(statement), variables.what)):
            yield words
            for nested in (word for word in words if " --" in word and ".py " in word):
                if depth < DEEPEST:
                    yield from _commands(nested, variables, depth + 1)


def _is_assignment(value: str, what: str) -> bool:
    """Whether nothing but a value follows; else it is a command with a variable before it."""
    return value.startswith("(") or not _num_options(split_words(value, what)[1:])


def _parts(words: list[str]) -> Iterator[list[str]]:
    start = 0
    for at, word in enumerate([*words, "|"]):
        if word in ENDS:
            if at > start:
                yield words[start:at]
            start = at + 1


def _reached(text: str, variables: Variables) -> Iterator[str]:
    """Statements of a text that are reached: of conditions the first branch that is known to hold, of loops and cases none."""
    branches: list[bool | None] = []  # of each open condition: whether this branch runs; None behind the one that did
    loops = 0
    for statement in statements(text):
        word, _, rest = statement.partition(" ")
        if word in OPENED or word in CLOSED:
            loops = max(loops + (1 if word in OPENED else -1), 0)
        elif loops:
            continue
        elif word == "if":
            branches.append(all(branches) and variables.holds(rest))
        elif word in ("elif", "else") and branches:
            branches[-1] = (
                None if branches[-1] is not False else all(branches[:-1]) and (word == "else" or variables.holds(rest))
            )
        elif word == "fi" and branches:
            branches.pop()
        elif all(branches):
            body = rest if word in ("then", "do", "else", "{") else statement
            if body and body not in ("fi", "}"):
                yield body
