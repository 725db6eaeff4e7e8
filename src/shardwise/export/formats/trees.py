"""Nested configurations as options with dotted names, and back; those of JSON. Nothing of what is read is built or run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.target import Option

YES, NO = ["true", "yes", "y", "on", "1"], ["false", "no", "n", "off", "0"]
DEEPEST = 40  # sections within sections: far above any configuration


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of options with dotted names.

    >>> nested({"bf16.enabled": True, "steps": 3})
    {'bf16': {'enabled': True}, 'steps': 3}
    """
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree


def dotted(tree: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """The options of a tree by dotted name. A section is an option where it is `known`, and holds nothing that is known within.

    Raises `InputError` for a tree that is too deep.

    >>> dotted({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, ["optimizer", "optimizer.type", "optimizer.params"])
    {'optimizer.type': 'AdamW', 'optimizer.params': {'lr': 0.0001}}
    """
    parts = (name.split(".") for name in known)
    sections = {".".join(part[:end]) for part in parts for end in range(1, len(part))}
    return dict(_leaves(tree, known, sections, "", 0))


def _leaves(
    tree: Mapping[str, Any], known: Collection[str], sections: Collection[str], prefix: str, depth: int
) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST:
        raise InputError(f"{prefix[:80]}: more than {DEEPEST} sections within one another; a configuration is required")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        whole = name in known and (name not in sections or not value)
        if isinstance(value, Mapping) and not whole:
            yield from _leaves(value, known, sections, f"{name}.", depth + 1)
        else:
            yield name, value


def spelt(options: Mapping[str, Any], table: Mapping[str, Option]) -> dict[str, Any]:
    """Options with values as their table has them, where a framework takes other spellings too: a yes or no in words, a number or
    a name in quotes, a name in capitals."""
    return {name: _spelt(value, table[name]) if name in table else value for name, value in options.items()}


def _spelt(value: Any, option: Option) -> Any:
    text = str(value)
    if option.kind == "bool" and text.lower() in YES + NO:
        return text.lower() in YES
    if option.kind == "str" and isinstance(value, (bool, int)):
        text = text if not isinstance(value, bool) else ("yes" if value else "no")
        return text
    if (
        option.kind == "int"
        and isinstance(value, (str, float))
        and text.removesuffix(".0").isdecimal()
        and len(text) < 20
    ):
        return int(text.removesuffix(".0"))
    alike = [one for one in option.choices if one.lower() == text.lower()]
    return alike[0] if alike and isinstance(value, str) else value


def json_tree(text: str, what: str) -> dict[str, Any]:
    """The object that a JSON text holds. Raises `InputError` for another text, and for a key that is given twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        _require_once([name for name, _ in pairs], what)
        return found

    def no_number(word: str) -> Any:
        raise InputError(f"{what}: found {word}; a finite number is required")

    try:
        return _sections(json.loads(text, object_pairs_hook=once, parse_constant=no_number), what)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what}: not valid JSON: {str(error)[:200]}") from None


def json_text(options: Mapping[str, Any]) -> str:
    """Options with dotted names as JSON."""
    return json.dumps(nested(options), indent=2) + "\n"


def _require_once(names: list[str], what: str) -> None:
    """Raise `InputError` for a key that is given twice: the second would hide the first."""
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise InputError(f"{what}: {twice[0][:80]!r} is given twice; each key once is required")


def _sections(found: object, what: str) -> dict[str, Any]:
    """What was read, where it is a section whose names are texts."""
    if not isinstance(found, dict):
        raise InputError(f"{what}: found {type(found).__name__}; options by name are required")
    return {str(name): value for name, value in found.items()}
