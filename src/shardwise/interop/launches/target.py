"""`Target`: a framework at a release, its options, how fields of a launch map to them, and what it requires of a launch.

A field of a launch has a dotted name (`launch.Launch.fields`), such as `layout.tp`; an option has the name that the framework
gives it. Each mapping converts in both directions. Options of a release come from the tables in `frameworks/options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.text_formats.option_tables import FrameworkOption, Options, option_problem, option_table
from shardwise.model import Architecture
from shardwise.values import InputError, describe_unknown, did_you_mean

MAX_COUNT = 10**12  # steps, sequences, tokens or devices: far above any launch


class OptionReader:
    """Reads options of one launch by name and records which were read.

    `user_fields` are fields of the launch that the user gives beside the files, by dotted name; `model` is its model, if
    known. `problem` returns what is wrong with an option's value, or None, so that readers get values of the right type.
    """

    def __init__(
        self, options: Options, machines: Machines, user_fields: Mapping[str, Any] | None = None,
        model: Architecture | None = None, problem: Callable[[str, Any], str | None] = lambda name, value: None,
    ) -> None:  # fmt: skip
        self.options, self.machines, self.user_fields, self.model = options, machines, user_fields or {}, model
        self.problem = problem
        self.read_names: set[str] = set()
        self.notes: list[str] = []  # sentences about options that are priced as something else

    def __contains__(self, name: str) -> bool:
        self.read_names.add(name)
        return name in self.options

    def get(self, name: str, default: Any = None) -> Any:
        """Return an option's value, or the framework's default. Raises `InputError` for a value of another type."""
        # What was never read is reported as "unread". So `from_options` must read all options of a branch before it returns, also
        # those whose values it does not use.
        self.read_names.add(name)
        value = self.options.get(name, default)
        if isinstance(value, str) and value.lower() in ("none", "null") and self.problem(name, value):
            value = default
        problem = None if value is None or value is default or name not in self.options else self.problem(name, value)
        if problem:
            raise InputError(problem)
        return value

    def acknowledge(self, *names: str) -> None:
        """Record options as read that change no field. Raises `InputError` for values of another type."""
        for name in names:
            self.get(name)

    def require(self, name: str) -> Any:
        """Return the value of an option that every launch has. Raises `InputError` if it is missing."""
        setting = self.get(name)
        if setting is None:
            raise InputError(f"{name}: missing; a launch that says it is required")
        return setting

    def get_count(self, name: str, default: int | None = None) -> int | None:
        """Return an option that counts things, or the default. Raises `InputError` unless it is from 1 to `MAX_COUNT`."""
        count = self.get(name, default)
        if count is None:
            return None
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_COUNT:
            raise InputError(f"{name}: found {str(count)[:80]!r}; a whole number from 1 to {MAX_COUNT:,} is required")
        return count

    def get_degree(self, name: str, default: int = 1) -> int:
        """Return a degree of parallelism; if missing or "none", the default. Raises `InputError` for anything but a count."""
        degree = self.get(name)
        if degree is None or (isinstance(degree, str) and degree.lower() in ("none", "null")):
            return default
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise InputError(f"{name}: found {degree!r}; a whole number of at least 1 is required")
        return degree

    def unread_names(self) -> Iterator[str]:
        """Return the names of the options that were not read."""
        return (name for name in self.options if name not in self.read_names)


@dataclass(frozen=True, slots=True)
class OptionMapping:
    """Two functions between fields of a launch and options of a framework.

    `to_options` returns the options of a launch; `from_options` returns fields by dotted name (`launch.Launch.fields`).
    """

    to_options: Callable[[Launch], Options]
    from_options: Callable[[OptionReader], Mapping[str, Any]]


def map_value(field: str, option: str, default: Any = None) -> OptionMapping:
    """Map a field to an option with the same value; with the framework's `default` it may be left out."""
    return map_names(field, option, None, default)


def map_required(field: str, option: str) -> OptionMapping:
    """Map a field to an option with the same value that every launch must have."""
    return OptionMapping(
        lambda launch: {option: launch.fields()[field]}, lambda reader: {field: reader.require(option)}
    )


def map_names(field: str, option: str, names: Mapping[Any, Any] | None, default: Any = None) -> OptionMapping:
    """Map a field to an option with other names for its values (`names`: ours to theirs; None: the same names).

    A value without a name is not written, and so does not come back (`translate_launch.lost_fields`). `default` is the
    framework's.
    """
    ours_by_theirs = None if names is None else {theirs: ours for ours, theirs in names.items()}

    def write_option(launch: Launch) -> Options:
        value = launch.fields()[field]
        if names is not None and value not in names:
            return {}
        theirs = value if names is None else names[value]
        return {} if theirs == default else {option: theirs}

    def read_option(reader: OptionReader) -> Mapping[str, Any]:
        theirs = reader.get(option, default)
        if theirs is None:
            return {}
        if ours_by_theirs is not None and theirs not in ours_by_theirs:
            raise InputError(f"{option}: {describe_unknown(str(theirs), map(str, ours_by_theirs))}")
        return {field: theirs if ours_by_theirs is None else ours_by_theirs[theirs]}

    return OptionMapping(write_option, read_option)


def map_flag(field: str, option: str, *, inverted: bool = False) -> OptionMapping:
    """Map a boolean field to an option that is set if the field is true (`inverted`: false)."""
    return OptionMapping(
        lambda launch: {option: True} if bool(launch.fields()[field]) is not inverted else {},
        lambda reader: {field: bool(reader.get(option, False)) is not inverted},
    )


def add_options(*names: str, to_options: Callable[[Launch], Options]) -> OptionMapping:
    """Write options that no field follows from: they are known, and set no field when read."""

    def read_nothing(reader: OptionReader) -> Mapping[str, Any]:
        reader.acknowledge(*names)
        return {}

    return OptionMapping(to_options, read_nothing)


LaunchFiles = Mapping[str, str]  # texts by file name


class Requirement(NamedTuple):
    """A condition that a target sets for a launch beyond its stack's abilities (`layout.rules.stack_abilities`).

    `reads_model`: it is about the model alone, whatever the layout.
    """

    holds: Callable[[Launch], bool]
    message: Callable[[Launch], str]
    reads_model: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework whose launches are written and read.

    `version` is the release that `source` documents and whose options `options_file` lists. `stack` predicts it and says what
    it can run. `mappings` convert between fields of a launch and options, `model_mappings` those of the model's sizes; a field
    that no mapping reads back is not expressible. `model_name` returns the name of the model that options have, if any, and
    `find_model` the catalogue's model of that name. `includes_model`: a launch holds the model's sizes, or names it. `slurm`: it
    is started by a SLURM batch script. A launch that is not `is_written` is read only. `choose_stack` returns the stack of a
    launch, for a trainer that runs on several, and `stack_mappings` has those of a stack whose launches have other options.
    `recognizes` returns whether files are the framework's by keys that no other has.
    `order`: axes of ranks, innermost first; None: as the plan places them. `write` turns
    options into files, `read` files into options, and `read_recipe` files with several recipes, one of which is named;
    `command` is the shell command that starts it on each node.
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
    read_recipe: Callable[[LaunchFiles, str], Options] | None = None
    notes: Callable[[Launch], Iterable[str]] = lambda launch: ()
    model_name: Callable[[Options], str | None] = lambda options: None
    find_model: Callable[[Options], Architecture | None] = lambda options: None
    includes_model: bool = True
    slurm: bool = True
    is_written: bool = True
    choose_stack: Callable[[Options], str] | None = None
    stack_mappings: Sequence[tuple[str, Sequence[OptionMapping]]] = ()
    recognizes: Callable[[LaunchFiles], bool] = lambda files: False
    model_mappings: Sequence[OptionMapping] = ()
    order: tuple[str, ...] | None = ("tp", "cp", "fsdp", "dp", "pp")

    def for_launch(self, options: Options) -> Target:
        """Return the target with the stack that the options choose, and with its mappings."""
        stack = self.stack if self.choose_stack is None else self.choose_stack(options)
        if stack == self.stack:
            return self
        return replace(self, stack=stack, mappings=dict(self.stack_mappings).get(stack, self.mappings))

    @property
    def options(self) -> Mapping[str, FrameworkOption]:
        """Every option of the release by name."""
        return option_table(self.options_file)

    def problems(self, options: Options) -> list[str]:
        """Return what is wrong with some options: unknown to the release, or of another type."""
        return [text for name, value in options.items() if (text := self._problem(name, value))]

    def value_problem(self, name: str, value: object) -> str | None:
        """Return what is wrong with the value of an option, or None; options that the release lacks pass."""
        return self._problem(name, value) if name in self.options else None

    def unpriced_effect(self, name: str, value: object) -> str | None:
        """Return what an option changes without being priced: "model", "memory" or "time"; None if nothing, or not known."""
        option = self.options.get(name)
        return option.changes(value) if option else None

    def _problem(self, name: str, value: object) -> str | None:
        option = self.options.get(name)
        if option is None:
            return f"{name}: no option of {self.title} {self.version}{did_you_mean(name, self.options)}"
        return option_problem(option, value)


README_FILE, BATCH_FILE = "README.md", "launch.slurm"
