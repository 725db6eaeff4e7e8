"""What a target is: a framework at a release, its options, what of a launch they say, and what it asks of one."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple

from shardwise.errors import require
from shardwise.export.field import Field, Options
from shardwise.export.launch import Launch
from shardwise.model.architecture import Architecture
from shardwise.names import did_you_mean

Files = Mapping[str, str]  # texts by name
MOST_LISTED = 20  # choices that an error lists


class Option(NamedTuple):
    """An option of a release: its name, its type (int, float, bool, str, list), and the values it takes if it takes no others."""

    name: str
    kind: str
    choices: tuple[str, ...] = ()


class Need(NamedTuple):
    """Something that a target asks of a launch beside what its stack's abilities say (`planning.abilities`)."""

    holds: Callable[[Launch], bool]
    says: Callable[[Launch], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework whose launches are written and read.

    `version` is the release that `source` documents and `table` lists the options of. `stack` is what predicts it and says what
    it can run. `fields` convert between parts of a launch and options, `model_fields` those of the model's sizes; a part that no
    field reads back is not expressible. `model` is that of the catalogue which options name, where they name one.
    `says_model`: a launch holds the model's sizes, or names it. `slurm`: a batch script of SLURM starts it. `order`: axes of
    ranks, innermost first; None: as the plan places them. `write` makes files of options, `read` options of files; `command` is
    what starts it on each node, in words of a shell.
    """

    name: str
    title: str
    version: str
    source: str
    stack: str
    table: str
    fields: Sequence[Field]
    needs: Sequence[Need]
    write: Callable[[Options, Launch], Files]
    read: Callable[[Files], Options]
    command: Callable[[Launch], str]
    notes: Callable[[Launch], Iterable[str]] = lambda launch: ()
    model: Callable[[Options], Architecture | None] = lambda options: None
    says_model: bool = True
    slurm: bool = True
    model_fields: Sequence[Field] = ()
    order: tuple[str, ...] | None = ("tp", "cp", "fsdp", "dp", "pp")

    @property
    def options(self) -> Mapping[str, Option]:
        """Every option of the release by name."""
        return option_table(self.table)

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
        return kind_problem(option, value)


def kind_problem(option: Option, value: object) -> str | None:
    """What is wrong with a value of an option: that it is none of those that there are, or not of its kind."""
    name = option.name
    if option.choices and not isinstance(value, (list, tuple)) and str(value) not in option.choices:
        few = ", ".join(option.choices[:MOST_LISTED]) + ", ..." * (len(option.choices) > MOST_LISTED)
        return f"{name}: found {value!r}{did_you_mean(value, option.choices)}; one of {few} is required"
    if not _is_a(option.kind, value):
        return f"{name}: found {value!r}; a value of type {option.kind} is required"
    return None


def require_kinds(options: Options, table: Mapping[str, Option]) -> None:
    """Raise `InputError` for options of a table whose values are not of their kinds; others are left to who names them."""
    known = ((table[name], value) for name, value in options.items() if name in table)
    require([text for option, value in known if (text := kind_problem(option, value))])


def _is_a(kind: str, value: object) -> bool:
    """Whether a value is of a kind of the tables; whole numbers are floats too, nothing else is two things."""
    kinds: Mapping[str, tuple[type, ...]] = {
        "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list, tuple), "any": (object,),
    }  # fmt: skip
    return isinstance(value, kinds[kind]) and (kind in ("bool", "any") or not isinstance(value, bool))


@cache
def option_table(name: str) -> Mapping[str, Option]:
    """Options of a release from the package's table: name, type, choices."""
    text = resources.files("shardwise.export").joinpath("options", f"{name}.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {
        row["name"]: Option(row["name"], row["type"], tuple(filter(None, row["choices"].split("|")))) for row in rows
    }
