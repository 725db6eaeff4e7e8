"""What a target is: a framework at a release, its options, how fields of a launch map to them, and what it requires of a launch.

A field of a launch has a dotted name (`launch.Launch.fields`), such as `layout.tp`; an option has the name that the framework
gives it. Each mapping converts in both directions. Options of a release come from the tables in `frameworks/options`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from shardwise.interop.launches.launch import Launch, Machines
from shardwise.model.architecture import Architecture
from shardwise.values.errors import InputError, describe_unknown, did_you_mean, raise_problems

Options = Mapping[str, Any]  # by the name that a target gives them; of nested files dotted


class OptionReader:
    """The options of a launch that is read; keeps which of them somebody asked for.

    `user_fields` are fields of the launch that the user gives beside the files, by dotted name; `model` is its model, if known.
    `problem` says what is wrong with the value of an option, where something is: who asks for one gets a value of its type.
    """

    def __init__(
        self, options: Options, machines: Machines, beside: Mapping[str, Any] | None = None,
        model: Architecture | None = None, problem: Callable[[str, Any], str | None] = lambda name, value: None,
    ) -> None:  # fmt: skip
        self.options, self.machines, self.user_fields, self.model = options, machines, beside or {}, model
        self.problem = problem
        self.read_names: set[str] = set()
        self.notes: list[str] = []  # what is priced as something else

    def __contains__(self, name: str) -> bool:
        self.read_names.add(name)
        return name in self.options

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option, or what the target takes where it is not given. Raises `InputError` for one of another type."""
        self.read_names.add(name)
        value = self.options.get(name, default)
        problem = None if value is None or name not in self.options else self.problem(name, value)
        if problem:
            raise InputError(problem)
        return value

    def require(self, name: str) -> Any:
        """The value of an option that no launch goes without. Raises `InputError` where it is missing."""
        found = self.get(name)
        if found is None:
            raise InputError(f"{name}: missing; a launch that says it is required")
        return found

    def unread_names(self) -> Iterator[str]:
        """Options that were not read."""
        return (name for name in self.options if name not in self.read_names)


@dataclass(frozen=True, slots=True)
class OptionMapping:
    """`to_options` gives the options of a launch, `from_options` parts of a launch by dotted name (`launch.Launch.fields`)."""

    to_options: Callable[[Launch], Options]
    from_options: Callable[[OptionReader], Mapping[str, Any]]


def map_value(part: str, option: str, default: Any = None) -> OptionMapping:
    """A part that an option has as it is; with a `default` of the target's it may be left out."""
    return map_names(part, option, None, default)


def map_required(part: str, option: str) -> OptionMapping:
    """A part that an option has as it is, and that every launch says."""
    return OptionMapping(lambda launch: {option: launch.fields()[part]}, lambda given: {part: given.require(option)})


def map_names(part: str, option: str, names: Mapping[Any, Any] | None, default: Any = None) -> OptionMapping:
    """A part whose values have names of the target's own (`names`: ours to theirs; None: the same).

    A value that has none is not said, and so does not come back (`exporting`). The default is the target's.
    """
    back = None if names is None else {theirs: ours for ours, theirs in names.items()}

    def say(launch: Launch) -> Options:
        value = launch.fields()[part]
        if names is not None and value not in names:
            return {}
        theirs = value if names is None else names[value]
        return {} if theirs == default else {option: theirs}

    def hear(given: OptionReader) -> Mapping[str, Any]:
        theirs = given.get(option, default)
        if theirs is None:
            return {}
        if back is not None and theirs not in back:
            raise InputError(f"{option}: {describe_unknown(str(theirs), map(str, back))}")
        return {part: theirs if back is None else back[theirs]}

    return OptionMapping(say, hear)


def map_flag(part: str, option: str, *, inverted: bool = False) -> OptionMapping:
    """A part that is true where an option is given (`inverted`: where it is not)."""
    return OptionMapping(
        lambda launch: {option: True} if bool(launch.fields()[part]) is not inverted else {},
        lambda given: {part: bool(given.get(option, False)) is not inverted},
    )


def add_options(*names: str, say: Callable[[Launch], Options]) -> OptionMapping:
    """Options that go with a launch, and that no part of it follows from: they are known, and say nothing back."""

    def hear(given: OptionReader) -> Mapping[str, Any]:
        for name in names:
            given.get(name)
        return {}

    return OptionMapping(say, hear)


LaunchFiles = Mapping[str, str]  # texts by name
MAX_CHOICES_LISTED = 20  # choices that an error lists


class FrameworkOption(NamedTuple):
    """An option of a release: its name, its type (int, float, bool, str, list), and the values it takes if it takes no others."""

    name: str
    kind: str
    choices: tuple[str, ...] = ()


class Requirement(NamedTuple):
    """Something that a target asks of a launch beside what its stack's abilities say (`layout.rules.stack_abilities`)."""

    holds: Callable[[Launch], bool]
    message: Callable[[Launch], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework whose launches are written and read.

    `version` is the release that `source` documents and `options_file` lists the options of. `stack` is what predicts it and says
    what it can run. `mappings` convert between fields of a launch and options, `model_mappings` those of the model's sizes; a
    field that no mapping reads back is not expressible. `find_model` finds the model of the catalogue that options name, if they
    name one. `includes_model`: a launch holds the model's sizes, or names it. `slurm`: a batch script of SLURM starts it.
    `order`: axes of ranks, innermost first; None: as the plan places them. `write` makes files of options, `read` options of
    files; `command` is what starts it on each node, in words of a shell.
    """

    name: str
    title: str
    version: str
    source: str
    stack: str
    options_file: str
    mappings: Sequence[OptionMapping]
    requirements: Sequence[Requirement]
    write: Callable[[Options, Launch], LaunchFiles]
    read: Callable[[LaunchFiles], Options]
    command: Callable[[Launch], str]
    notes: Callable[[Launch], Iterable[str]] = lambda launch: ()
    find_model: Callable[[Options], Architecture | None] = lambda options: None
    includes_model: bool = True
    slurm: bool = True
    model_mappings: Sequence[OptionMapping] = ()
    order: tuple[str, ...] | None = ("tp", "cp", "fsdp", "dp", "pp")

    @property
    def options(self) -> Mapping[str, FrameworkOption]:
        """Every option of the release by name."""
        return option_table(self.options_file)

    def problems(self, options: Options) -> list[str]:
        """What of some options is not among those of the release, or not of their kind."""
        return [text for name, value in options.items() if (text := self._problem(name, value))]

    def value_problem(self, name: str, value: object) -> str | None:
        """What is wrong with the value of an option of the release; nothing of others."""
        return self._problem(name, value) if name in self.options else None

    def _problem(self, name: str, value: object) -> str | None:
        option = self.options.get(name)
        if option is None:
            return f"{name}: no option of {self.title} {self.version}{did_you_mean(name, self.options)}"
        return option_problem(option, value)


def option_problem(option: FrameworkOption, value: object) -> str | None:
    """What is wrong with a value of an option: that it is none of those that there are, or not of its kind."""
    name = option.name
    if option.choices and not isinstance(value, (list, tuple)) and str(value) not in option.choices:
        few = ", ".join(option.choices[:MAX_CHOICES_LISTED]) + ", ..." * (len(option.choices) > MAX_CHOICES_LISTED)
        return f"{name}: found {value!r}{did_you_mean(value, option.choices)}; one of {few} is required"
    if not _has_type(option.kind, value):
        return f"{name}: found {value!r}; a value of type {option.kind} is required"
    return None


def require_types(options: Options, table: Mapping[str, FrameworkOption]) -> None:
    """Raise `InputError` for options of a table whose values are not of their kinds; others are left to who names them."""
    known = ((table[name], value) for name, value in options.items() if name in table)
    raise_problems([text for option, value in known if (text := option_problem(option, value))])


def _has_type(kind: str, value: object) -> bool:
    """Whether a value is of a kind of the tables; whole numbers are floats too, nothing else is two things."""
    kinds: Mapping[str, tuple[type, ...]] = {
        "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list, tuple), "any": (object,),
    }  # fmt: skip
    return isinstance(value, kinds[kind]) and (kind in ("bool", "any") or not isinstance(value, bool))


@cache
def option_table(name: str) -> Mapping[str, FrameworkOption]:
    """Options of a release from the package's table: name, type, choices."""
    text = (
        resources.files("shardwise.interop.frameworks").joinpath("options", f"{name}.csv").read_text(encoding="utf-8")
    )
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {
        row["name"]: FrameworkOption(row["name"], row["type"], tuple(filter(None, row["choices"].split("|"))))
        for row in rows
    }


README_FILE, BATCH_FILE = "README.md", "launch.slurm"
