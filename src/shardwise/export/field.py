"""How a part of a launch reads in a target's options, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InputError
from shardwise.export.launch import Launch, Machines
from shardwise.model.architecture import Architecture
from shardwise.names import unknown

Options = Mapping[str, Any]  # by the name that a target gives them; of nested files dotted


class Given:
    """The options of a launch that is read; keeps which of them somebody asked for.

    `beside` are parts that whoever reads it says beside the files, by dotted name; `model` is its model, where that is known.
    `problem` says what is wrong with the value of an option, where something is: who asks for one gets a value of its type.
    """

    def __init__(
        self, options: Options, machines: Machines, beside: Mapping[str, Any] | None = None,
        model: Architecture | None = None, problem: Callable[[str, Any], str | None] = lambda name, value: None,
    ) -> None:  # fmt: skip
        self.options, self.machines, self.beside, self.model = options, machines, beside or {}, model
        self.problem = problem
        self.heard: set[str] = set()
        self.notes: list[str] = []  # what is priced as something else

    def __contains__(self, name: str) -> bool:
        self.heard.add(name)
        return name in self.options

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option, or what the target takes where it is not given. Raises `InputError` for one of another type."""
        self.heard.add(name)
        value = self.options.get(name, default)
        problem = None if value is None or name not in self.options else self.problem(name, value)
        if problem:
            raise InputError(problem)
        return value

    def need(self, name: str) -> Any:
        """The value of an option that no launch goes without. Raises `InputError` where it is missing."""
        found = self.get(name)
        if found is None:
            raise InputError(f"{name}: missing; a launch that says it is required")
        return found

    def unheard(self) -> Iterator[str]:
        """Options that were not read."""
        return (name for name in self.options if name not in self.heard)


@dataclass(frozen=True, slots=True)
class Field:
    """`say` gives the options of a launch, `hear` parts of a launch by dotted name (`launch.Launch.parts`)."""

    say: Callable[[Launch], Options]
    hear: Callable[[Given], Mapping[str, Any]]


def same(part: str, option: str, default: Any = None) -> Field:
    """A part that an option has as it is; with a `default` of the target's it may be left out."""
    return named(part, option, None, default)


def required(part: str, option: str) -> Field:
    """A part that an option has as it is, and that every launch says."""
    return Field(lambda launch: {option: launch.parts()[part]}, lambda given: {part: given.need(option)})


def named(part: str, option: str, names: Mapping[Any, Any] | None, default: Any = None) -> Field:
    """A part whose values have names of the target's own (`names`: ours to theirs; None: the same).

    A value that has none is not said, and so does not come back (`exporting`). The default is the target's.
    """
    back = None if names is None else {theirs: ours for ours, theirs in names.items()}

    def say(launch: Launch) -> Options:
        value = launch.parts()[part]
        if names is not None and value not in names:
            return {}
        theirs = value if names is None else names[value]
        return {} if theirs == default else {option: theirs}

    def hear(given: Given) -> Mapping[str, Any]:
        theirs = given.get(option, default)
        if theirs is None:
            return {}
        if back is not None and theirs not in back:
            raise InputError(f"{option}: {unknown(str(theirs), map(str, back))}")
        return {part: theirs if back is None else back[theirs]}

    return Field(say, hear)


def flag(part: str, option: str, *, inverted: bool = False) -> Field:
    """A part that is true where an option is given (`inverted`: where it is not)."""
    return Field(
        lambda launch: {option: True} if bool(launch.parts()[part]) is not inverted else {},
        lambda given: {part: bool(given.get(option, False)) is not inverted},
    )


def beside(*names: str, say: Callable[[Launch], Options]) -> Field:
    """Options that go with a launch, and that no part of it follows from: they are known, and say nothing back."""

    def hear(given: Given) -> Mapping[str, Any]:
        for name in names:
            given.get(name)
        return {}

    return Field(say, hear)
