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

from shardwise.interop.text_formats.config_trees import parse_yaml, require_length
from shardwise.interop.text_formats.option_tables import FrameworkOption, Options
from shardwise.interop.text_formats.shell_script import ShellVariables, list_commands
from shardwise.values import InputError

OptionTable = Mapping[str, FrameworkOption]


def format_flags(options: Options) -> Iterator[list[str]]:
    """Yield the words of each option; an option that is True has its name alone, one that is False none."""
    for name, value in options.items():
        if value is True:
            yield [f"--{name}"]
        elif value is not False:
            arguments = value if isinstance(value, (list, tuple)) else [value]
            yield [f"--{name}", *(shlex.quote(_format_value(argument)) for argument in arguments)]


def _format_value(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def parse_flags(tokens: Sequence[str], table: OptionTable) -> dict[str, Any]:
    """Return the options among the words of a command line, converted to their types in the table.

    Dashes and underscores are the same. A value that does not fit its type stays text; an option outside the table takes all
    words up to the next option.
    """
    options: dict[str, Any] = {}
    index = next((i for i, token in enumerate(tokens) if token.startswith("--")), len(tokens))
    while index < len(tokens):
        name, equals, value = tokens[index].removeprefix("--").partition("=")
        arguments = [value] if equals else _value_words(tokens, index + 1)
        name = name.replace("_", "-")
        if tokens[index].startswith("--"):
            options[name] = _parse_value(arguments, table.get(name))
        index += 1 + (0 if equals else len(arguments))
    return options


def _value_words(tokens: Sequence[str], start: int) -> list[str]:
    """Return the words up to the next option. A negative number is no option."""
    end = start
    while end < len(tokens) and not tokens[end].startswith("--"):
        end += 1
    return list(tokens[start:end])


def _parse_value(arguments: list[str], option: FrameworkOption | None) -> Any:
    if not arguments or (option and option.kind == "bool"):
        return True if not arguments else arguments[0].lower() not in ("false", "0", "no")
    kind = option.kind if option else "str"
    if kind == "list":
        return [_parse_number(argument) for argument in arguments]
    return _parse_number(arguments[0], kind) if kind in ("int", "float") else " ".join(arguments)


def _parse_number(text: str, kind: str = "any") -> Any:
    for number_type in (int, float) if kind != "float" else (float,):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


def format_tyro(options: Options, subcommands: Sequence[str] = ()) -> list[str]:
    """Return shell words for each option. `subcommands` come last, as the flags behind a subcommand belong to it."""
    flags = [_format_tyro_option(name, value) for name, value in options.items() if name not in subcommands]
    return [*flags, *(f"{name.replace('_', '-')}:{options[name]}" for name in subcommands if name in options)]


def _format_tyro_option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        section, _, leaf = name.rpartition(".")
        return f"--{name}" if value else f"--{section}.no_{leaf}"
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f"--{name} {shlex.quote(text)}"


def parse_tyro(tokens: Sequence[str], table: OptionTable, subcommands: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options among the words, with underscores in names, converted to their types in the table."""
    prefixes = {f"{name.replace('_', '-')}:": name for name in subcommands}
    subcommand_options: dict[str, Any] = {}
    flags: list[str] = []
    for token in tokens:
        prefix = next((candidate for candidate in prefixes if token.replace("_", "-").startswith(candidate)), None)
        if prefix is None:
            flags.append(token)
        else:
            subcommand_options[prefixes[prefix]] = token[len(prefix) :]
    hyphenated_table = {name.replace("_", "-"): option for name, option in table.items()}
    flag_options: dict[str, Any] = {}
    for name, value in parse_flags(flags, hyphenated_table).items():
        flag_options |= _read_tyro_option(name.replace("-", "_"), value, table)
    return {**flag_options, **subcommand_options}


def _read_tyro_option(name: str, value: Any, table: OptionTable) -> Mapping[str, Any]:
    """Read an option: no_name sets name to false, a list is split at commas, and None (unless the option is text) is None."""
    section, _, leaf = name.rpartition(".")
    enabled_name = f"{section}.{leaf.removeprefix('no_')}"
    if name not in table and leaf.startswith("no_") and enabled_name in table:
        return {enabled_name: False}
    kind = table[name].kind if name in table else "str"
    if kind == "list" and isinstance(value, list):
        return {name: [part for text in value for part in str(text).split(",")]}
    return {name: None if value == "None" and kind != "str" else value}


_ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=([^\n]*)$")


def parse_assignments(text: str, program: str, source: str) -> dict[str, Any]:
    """Return the options of the last command in a script that starts a program with any; values are read as YAML.

    Variables that the script does not set stay as text. Raises `InputError` if there is no such command.
    """
    options = find_assignments(text, program, source)
    if not options:
        raise InputError(f"{source}: no command starts {program} with options NAME=VALUE; one is required")
    return options


def find_assignments(text: str, program: str, source: str) -> dict[str, Any]:
    """Return the options as `parse_assignments` does, or none if no command has any."""
    require_length(text, source, "a launch script")
    variables = ShellVariables(source)
    for _ in list_commands(text, variables, lambda token: False):
        pass  # the assignments on the way set the variables
    options: dict[str, Any] = {}
    for line in re.sub(r"(^|\n)\s*#[^\n]*", r"\1", text).replace("\\\n", " ").splitlines():
        if program in line:
            options = _parse_command(variables.expand(line), program, source) or options
    return options


def _parse_command(line: str, program: str, source: str) -> dict[str, Any]:
    try:
        tokens = shlex.split(line)
        # A launcher takes the command as one of its arguments: --command "python3 -m PROGRAM NAME=VALUE".
        quoted = next((token for token in tokens if program in token and " " in token.strip()), None)
        tokens = tokens if quoted is None else shlex.split(quoted)
    except ValueError as error:
        raise InputError(f"{source}: not a shell command: {error}") from None
    assignments = [match for token in tokens if (match := _ASSIGNMENT.match(token))]
    return {
        match[1]: match[2] if "$" in match[2] else _parse_yaml_value(match[2], source)
        for match in assignments if not match[1].isupper()
    }  # fmt: skip


def _parse_yaml_value(text: str, source: str) -> Any:
    return parse_yaml(f"value: {text}", source)["value"] if text else ""
