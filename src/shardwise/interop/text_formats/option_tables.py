"""The options of a framework's release by name, with their types and choices, and what is wrong with a value."""

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from shardwise.values import did_you_mean, raise_problems

Options = Mapping[str, Any]  # by the target's name; names of nested files are dotted
UNPRICED_EFFECTS = ("model", "memory", "time")
MAX_CHOICES_LISTED = 20  # choices in an error message


class FrameworkOption(NamedTuple):
    """An option of a release. `kind` is int, float, bool, str, list or any; count, for a whole number with a suffix such as 8k;
    field, for a setting that no flag sets. `choices` are its only values, if it has such. `aliases` are further flags.

    `effect` is "priced"; "none", for what changes neither model, memory nor time of a step; "model", "memory" or "time", which it
    changes without being priced, unless its value is one of the `harmless`; or empty, where a table does not say.
    """

    name: str
    kind: str
    choices: tuple[str, ...] = ()
    effect: str = ""
    harmless: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def changes(self, value: object) -> str | None:
        """Return what a value changes without being priced: "model", "memory" or "time"; None if nothing."""
        if self.effect not in UNPRICED_EFFECTS or value is None or value in ([], {}):
            return None
        if value is False and "true" not in self.harmless:  # the option is off
            return None
        return None if str(value).lower() in ("", "none", "null", *self.harmless) else self.effect


def option_problem(option: FrameworkOption, value: object) -> str | None:
    """Return what is wrong with an option's value, or None: not one of its choices, or not of its type."""
    name = option.name
    if option.choices and not isinstance(value, (list, tuple)) and str(value) not in option.choices:
        listed = ", ".join(option.choices[:MAX_CHOICES_LISTED]) + ", ..." * (len(option.choices) > MAX_CHOICES_LISTED)
        return f"{name}: found {value!r}{did_you_mean(value, option.choices)}; one of {listed} is required"
    if not _has_type(option.kind, value):
        return f"{name}: found {value!r}; a value of type {option.kind} is required"
    return None


def require_types(options: Options, table: Mapping[str, FrameworkOption]) -> None:
    """Raise `InputError` for options in the table whose values have another type. Options outside the table pass."""
    typed = ((table[name], value) for name, value in options.items() if name in table)
    raise_problems([text for option, value in typed if (text := option_problem(option, value))])


def _has_type(kind: str, value: object) -> bool:
    """Return whether a value has a type of the option tables. An int is also a float; a bool is only a bool."""
    types: Mapping[str, tuple[type, ...]] = {
        "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list, tuple), "any": (object,),
        "count": (int,), "field": (),
    }  # fmt: skip
    return isinstance(value, types[kind]) and (kind in ("bool", "any") or not isinstance(value, bool))


@cache
def option_table(name: str) -> Mapping[str, FrameworkOption]:
    """Return a release's options by name from the package's table `name`.csv (name, type, choices)."""
    return {row["name"]: _read_option(row) for row in csv.DictReader(read_option_file(f"{name}.csv").splitlines())}


def _read_option(row: Mapping[str, str]) -> FrameworkOption:
    harmless, aliases = _split(row.get("harmless") or ""), _split(row.get("aliases") or "")
    return FrameworkOption(row["name"], row["type"], _split(row["choices"]), row.get("effect") or "", harmless, aliases)


def _split(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("|")))


def read_option_file(name: str) -> str:
    """Return the text of a file in `frameworks/options`, without comment lines."""
    text = resources.files("shardwise.interop.frameworks").joinpath("options", name).read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))
