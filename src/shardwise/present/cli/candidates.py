"""What may stand at the end of a command line, read off the parsers of the verbs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shardwise.present.cli.verbs import GROUPS, add_verbs
from shardwise.values import Parser


class Candidate(NamedTuple):
    """A word, and what a shell says beside it."""

    word: str
    said: str = ""


def candidates(words: Sequence[str]) -> list[Candidate]:
    """What the last of the words behind `shardwise`, which is being typed, may become; none where any text or file may.

    >>> [one.word for one in candidates(["show", "pre"])]
    ['precisions']
    >>> [one.word for one in candidates(["kv-cache", "llama-3-70b", "--con"])]
    ['--context']
    """
    *before, typed = words
    found = _of_verb(before[0], before[1:], typed) if before else _verbs(typed)
    return [one for one in found if one.word.startswith(typed)]


def _verbs(typed: str) -> list[Candidate]:
    if typed.startswith("-"):
        return [Candidate("--help"), Candidate("--version")]
    return [Candidate(verb.name, verb.line) for group in GROUPS.values() for verb in group]


def _of_verb(verb: str, before: Sequence[str], typed: str) -> Iterable[Candidate]:
    parser = add_verbs(Parser()).get(verb)
    if parser is None:
        return []
    actions = parser.declared()._actions
    flags = {name: action for action in actions for name in action.option_strings}
    taken, waiting = _read(before, flags)
    name, equals, _ = typed.partition("=")
    if waiting:
        return _values(waiting, taken)
    if equals and name in flags:
        return [Candidate(f"{name}={one.word}") for one in _values(flags[name], taken)]
    if typed.startswith("-"):
        return _flags(flags)
    places = [action for action in actions if not action.option_strings and action.help != argparse.SUPPRESS]
    many = bool(places) and places[-1].nargs in ("*", "+")
    place = min(len(taken), len(places) - 1) if many else len(taken)
    return _values(places[place], taken) if place < len(places) else _flags(flags)


def _read(
    words: Sequence[str], flags: dict[str, argparse.Action]
) -> tuple[list[str], argparse.Action | None]:  # fmt: skip
    """The words that are no flags nor their values, and the flag that still waits for its value."""
    taken, waiting = [], None
    for word in words:
        if word.startswith("-"):
            action = flags.get(word)
            waiting = action if action is not None and action.nargs != 0 else None
        elif waiting:
            waiting = None
        else:
            taken.append(word)
    return taken, waiting


def _flags(flags: dict[str, argparse.Action]) -> Iterator[Candidate]:
    for name, action in flags.items():
        if action.help != argparse.SUPPRESS and (len(name) > 2 or len(action.option_strings) == 1):
            yield Candidate(name, " ".join(((action.help or "") % {**vars(action), "prog": ""}).split()))


def _values(action: argparse.Action, taken: Sequence[str]) -> list[Candidate]:
    """What a flag or a place takes: its choices, the names of its catalogue, or what the words before make possible."""
    from shardwise.present.cli.show import names_of

    completes = getattr(action, "completes", "")
    if action.choices is not None:
        return [Candidate(str(one)) for one in action.choices]
    return [Candidate(one) for one in (completes(taken) if callable(completes) else names_of(completes))]
