"""Runs a case through its adapter (adapters.toml): public functions, called by name on the case's inputs."""

from __future__ import annotations

import importlib
import math
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from shardwise.values.errors import InputError

HERE = Path(__file__).parent
# Seconds or bytes in one of the unit that a name's suffix says; no suffix stands for the plain unit.
UNITS = {
    "_ns": 1e-9, "_us": 1e-6, "_ms": 1e-3, "_days": 86400.0, "_years": 86400.0 * 365.25, "_GB": 1e9, "_GiB": 2.0**30,
}  # fmt: skip


class Each(list[Any]):
    """The results of a step that ran once for each element of its lists."""


@cache
def tables(name: str) -> dict[str, Any]:
    """One of the data files."""
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def unit(name: str) -> float:
    """The scale of a name's suffix."""
    return next((scale for suffix, scale in UNITS.items() if name.endswith(suffix)), 1.0)


def public(path: str) -> Any:
    """The object behind a dotted name, no part of which is private."""
    assert not any(part.startswith("_") for part in path.split(".")), f"{path} is not public"
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            member: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            member = getattr(member, part)
        return member
    raise AssertionError(f"{path}: no such module")


def plain(value: Any) -> Any:
    """Lists as tuples, as the package takes them."""
    return tuple(map(plain, value)) if isinstance(value, list) and not isinstance(value, Each) else value


def follow(value: Any, path: list[str]) -> Any:
    """The part of a result at a path of attributes, keys and positions; of each result after a step with `each`."""
    if not path:
        return value
    if isinstance(value, Each):
        return Each(follow(item, path) for item in value)
    head, remaining = path[0], path[1:]
    if head == "*":
        return Each(follow(item, remaining) for item in value)
    if head.isdigit():
        return follow(value[int(head)], remaining)
    if isinstance(value, Mapping) and head in value:
        return follow(value[head], remaining)
    return follow(getattr(value, head), remaining)


class Run:
    """One case on its adapter; a step runs when a result asks for it."""

    def __init__(self, adapter: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        self.inputs = {name: self.scaled(name, plain(value)) for name, value in inputs.items()}
        self.steps = {step.get("as", ""): step for step in adapter["steps"]}
        self.paths: Mapping[str, str] = adapter["results"]
        self.done: dict[str, Any] = {}

    def scaled(self, name: str, value: Any) -> Any:
        return value * unit(name) if isinstance(value, (int, float)) and unit(name) != 1.0 else value

    def result(self, key: str) -> Any:
        """What the adapter gives for one expected key, in the unit of the key's suffix."""
        value = self.reference(self.paths[key])
        return self.unscaled(value, unit(key))

    def unscaled(self, value: Any, scale: float) -> Any:
        if isinstance(value, list):
            return [self.unscaled(item, scale) for item in value]
        return value / scale if scale != 1.0 else value

    def reference(self, path: str) -> Any:
        name, *remaining = path.split(".")
        if name not in self.done:
            self.done[name] = self.call(self.steps[name])
        return follow(self.done[name], remaining)

    def arguments(self, names: list[str]) -> Iterator[tuple[str, Any]]:
        """Values by name; an input that the case does not have is left to the function's default."""
        for name in names:
            if name.startswith("@"):
                yield name, self.reference(name[1:])
            elif name in self.inputs:
                yield name, self.inputs[name]

    def call(self, step: Mapping[str, Any]) -> Any:
        path = step["call"]
        function = self.reference(path[1:]) if path.startswith("@") else public(path)
        positional = list(self.arguments(step.get("positional", [])))
        named = {key: dict(self.arguments([name])) for key, name in step.get("named", {}).items()}
        keywords = [
            (key, name, value) for key, named_arguments in named.items() for name, value in named_arguments.items()
        ]
        lists = [name for name in step.get("each", []) if self.spread(name, positional, keywords)]
        if not lists:
            return self.attempt(step, function, [v for _, v in positional], {k: v for k, _, v in keywords})
        count = len(self.spread(lists[0], positional, keywords))
        return Each(
            self.attempt(
                step,
                function,
                [value[i] if name in lists else value for name, value in positional],
                {key: value[i] if name in lists else value for key, name, value in keywords},
            )
            for i in range(count)
        )

    def spread(self, name: str, positional: list[tuple[str, Any]], keywords: list[tuple[str, str, Any]]) -> Any:
        """The list to go through for a name in `each`; nothing where the case has a single value."""
        values = [v for n, v in positional if n == name] + [v for _, n, v in keywords if n == name]
        return values[0] if values and isinstance(values[0], (list, tuple)) else ()

    def attempt(self, step: Mapping[str, Any], function: Any, positional: list[Any], named: dict[str, Any]) -> Any:
        try:
            returned = function(*positional, **named)
        except InputError as error:
            if not step.get("on_error"):
                raise
            return type(error).__name__
        return Each(returned) if isinstance(returned, Iterator) else returned


def names_used(adapter: Mapping[str, Any]) -> set[str]:
    """Names of the inputs that an adapter reads."""
    steps = adapter["steps"]
    names = [name for step in steps for name in (*step.get("positional", []), *step.get("named", {}).values())]
    return {name for name in names if not name.startswith("@")}


def agrees(actual: Any, expected: Any, rel_tol: float) -> bool:
    """Numbers within the tolerance, lists element by element, everything else exactly, as text where text is expected.

    A set is compared in order, an array without dims as its element.
    """
    if isinstance(actual, (set, frozenset)):
        actual = sorted(actual)
    if getattr(actual, "ndim", None) == 0:
        actual = actual.item()
    if isinstance(expected, bool):
        return actual is expected
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(
            agrees(actual_item, expected_item, rel_tol)
            for actual_item, expected_item in zip(actual, expected, strict=True)
        )
    if isinstance(expected, str):
        return str(actual) == expected
    if isinstance(actual, bool) or not isinstance(actual, Real):
        return False
    return math.isclose(float(actual), expected, rel_tol=rel_tol)
