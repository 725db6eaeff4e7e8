"""Options as words of a command line, and back: `--name value`, tyro's flags, and `NAME=VALUE`. Nothing is run.

Flags are read by the table of a release's options. tyro's are --section.name value, --section.no-name, and section:choice for
subcommands (source: tyro's documentation, boolean flags and subcommands; torchtitan, config/manager.py, which has lists as
A,B,C). `NAME=VALUE` is how MaxText's launch scripts give options.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.interop.launches.target import FrameworkOption, Options
from shardwise.interop.text_formats.config_trees import parse_yaml
from shardwise.values.errors import InputError

OptionTable = Mapping[str, FrameworkOption]


def format_flags(options: Options) -> Iterator[list[str]]:
    """The words of each option; of one that is true its name alone."""
    for name, value in options.items():
        if value is True:
            yield [f"--{name}"]
        elif value is not False:
            values = value if isinstance(value, (list, tuple)) else [value]
            yield [f"--{name}", *(shlex.quote(_format_value(one)) for one in values)]


def _format_value(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def parse_flags(words: Sequence[str], table: OptionTable) -> dict[str, Any]:
    """The options among the words of a command line, each as its type in the table has it.

    Dashes and underscores are the same. What no type fits stays a text, and what the table does not know takes the words that
    follow it, as many as are no option.
    """
    found: dict[str, Any] = {}
    at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    while at < len(words):
        name, equals, value = words[at].removeprefix("--").partition("=")
        values = [value] if equals else _value_words(words, at + 1)
        name = name.replace("_", "-")
        if words[at].startswith("--"):
            found[name] = _parse_value(values, table.get(name))
        at += 1 + (0 if equals else len(values))
    return found


def _value_words(words: Sequence[str], at: int) -> list[str]:
    """Words up to the next option; a negative number is none."""
    end = at
    while end < len(words) and not words[end].startswith("--"):
        end += 1
    return list(words[at:end])


def _parse_value(values: list[str], option: FrameworkOption | None) -> Any:
    if not values or (option and option.kind == "bool"):
        return True if not values else values[0].lower() not in ("false", "0", "no")
    kind = option.kind if option else "str"
    if kind == "list":
        return [_parse_number(one) for one in values]
    return _parse_number(values[0], kind) if kind in ("int", "float") else " ".join(values)


def _parse_number(text: str, kind: str = "any") -> Any:
    for make in (int, float) if kind != "float" else (float,):
        try:
            return make(text)
        except ValueError:
            continue
    return text


def format_tyro(options: Options, subcommands: Sequence[str] = ()) -> list[str]:
    """Words of a shell for each option; those that are `subcommands` come last, as what follows one belongs to it."""
    flags = [_format_tyro_option(name, value) for name, value in options.items() if name not in subcommands]
    return [*flags, *(f"{name.replace('_', '-')}:{options[name]}" for name in subcommands if name in options)]


def _format_tyro_option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        section, _, last = name.rpartition(".")
        return f"--{name}" if value else f"--{section}.no_{last}"
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f"--{name} {shlex.quote(text)}"


def parse_tyro(words: Sequence[str], table: OptionTable, subcommands: Sequence[str] = ()) -> dict[str, Any]:
    """The options among words, with underscores, each as its type in the table has it."""
    starts = {f"{name.replace('_', '-')}:": name for name in subcommands}
    chosen: dict[str, Any] = {}
    flags: list[str] = []
    for word in words:
        choice = next((start for start in starts if word.replace("_", "-").startswith(start)), None)
        if choice is None:
            flags.append(word)
        else:
            chosen[starts[choice]] = word[len(choice) :]
    hyphened = {name.replace("_", "-"): option for name, option in table.items()}
    found: dict[str, Any] = {}
    for name, value in parse_flags(flags, hyphened).items():
        found |= _read_tyro_option(name.replace("-", "_"), value, table)
    return {**found, **chosen}


def _read_tyro_option(name: str, value: Any, table: OptionTable) -> Mapping[str, Any]:
    """One option: no_name is name, false; lists are of texts between commas; None (of anything but text) stands for none."""
    section, _, last = name.rpartition(".")
    positive = f"{section}.{last.removeprefix('no_')}"
    if name not in table and last.startswith("no_") and positive in table:
        return {positive: False}
    kind = table[name].kind if name in table else "str"
    if kind == "list" and isinstance(value, list):
        return {name: [part for one in value for part in str(one).split(",")]}
    return {name: None if value == "None" and kind != "str" else value}


MAX_SCRIPT_CHARACTERS = 1_000_000
_ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=([^\n]*)$")
_VARIABLE_WITH_DEFAULT = re.compile(r"\$\{\w+:-([^{}$]*)\}")  # with a value for where it is not set


def parse_assignments(text: str, program: str, what: str) -> dict[str, Any]:
    """The options of the last command of a script that starts a program, and has any; values as YAML reads them.

    What a variable without a value of its own stands for is left out. Raises `InputError` where there is no such command.
    """
    if len(text) > MAX_SCRIPT_CHARACTERS:
        raise InputError(
            f"{what}: {len(text):,} characters; a launch script of at most {MAX_SCRIPT_CHARACTERS:,} is required"
        )
    found: dict[str, Any] = {}
    for line in re.sub(r"(^|\n)\s*#[^\n]*", r"\1", text).replace("\\\n", " ").splitlines():
        if program in line:
            found = _parse_command(line, what) or found
    if not found:
        raise InputError(f"{what}: no command starts {program} with options NAME=VALUE; one is required")
    return found


def _parse_command(line: str, what: str) -> dict[str, Any]:
    try:
        words = shlex.split(_VARIABLE_WITH_DEFAULT.sub(r"\1", line))
    except ValueError as error:
        raise InputError(f"{what}: not a shell command: {error}") from None
    pairs = [match for word in words if (match := _ASSIGNMENT.match(word)) and "$" not in word]
    return {match[1]: _parse_yaml_value(match[2], what) for match in pairs if not match[1].isupper()}


def _parse_yaml_value(text: str, what: str) -> Any:
    return parse_yaml(f"value: {text}", what)["value"] if text else ""
