"""Options as words of a command line, --name value, by the table of a release's options."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.export.field import Options
from shardwise.export.target import Option

Table = Mapping[str, Option]


def flag_words(options: Options) -> Iterator[list[str]]:
    """The words of each option; of one that is true its name alone."""
    for name, value in options.items():
        if value is True:
            yield [f"--{name}"]
        elif value is not False:
            values = value if isinstance(value, (list, tuple)) else [value]
            yield [f"--{name}", *(shlex.quote(_text(one)) for one in values)]


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def options_in(words: Sequence[str], table: Table) -> dict[str, Any]:
    """The options among the words of a command line, each as its type in the table has it.

    Dashes and underscores are the same. What no type fits stays a text, and what the table does not know takes the words that
    follow it, as many as are no option.
    """
    found: dict[str, Any] = {}
    at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    while at < len(words):
        name, equals, value = words[at].removeprefix("--").partition("=")
        values = [value] if equals else _values(words, at + 1)
        name = name.replace("_", "-")
        if words[at].startswith("--"):
            found[name] = _typed(values, table.get(name))
        at += 1 + (0 if equals else len(values))
    return found


def _values(words: Sequence[str], at: int) -> list[str]:
    """Words up to the next option; a negative number is none."""
    end = at
    while end < len(words) and not words[end].startswith("--"):
        end += 1
    return list(words[at:end])


def _typed(values: list[str], option: Option | None) -> Any:
    if not values or (option and option.kind == "bool"):
        return True if not values else values[0].lower() not in ("false", "0", "no")
    kind = option.kind if option else "str"
    if kind == "list":
        return [_number(one) for one in values]
    return _number(values[0], kind) if kind in ("int", "float") else " ".join(values)


def _number(text: str, kind: str = "any") -> Any:
    for make in (int, float) if kind != "float" else (float,):
        try:
            return make(text)
        except ValueError:
            continue
    return text
