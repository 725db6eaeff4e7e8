"""Options as words NAME=VALUE of a command line, as MaxText's launch scripts have them. Nothing is run."""

from __future__ import annotations

import re
import shlex
from typing import Any

from shardwise.errors import InputError
from shardwise.export.formats.yaml_text import yaml_tree

MOST_CHARACTERS = 1_000_000
_WORD = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=([^\n]*)$")
_VARIABLE = re.compile(r"\$\{\w+:-([^{}$]*)\}")  # with a value for where it is not set


def assigned(text: str, program: str, what: str) -> dict[str, Any]:
    """The options of the last command of a script that starts a program, and has any; values as YAML reads them.

    What a variable without a value of its own stands for is left out. Raises `InputError` where there is no such command.
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(
            f"{what}: {len(text):,} characters; a launch script of at most {MOST_CHARACTERS:,} is required"
        )
    found: dict[str, Any] = {}
    for line in re.sub(r"(^|\n)\s*#[^\n]*", r"\1", text).replace("\\\n", " ").splitlines():
        if program in line:
            found = _options(line, what) or found
    if not found:
        raise InputError(f"{what}: no command starts {program} with options NAME=VALUE; one is required")
    return found


def _options(line: str, what: str) -> dict[str, Any]:
    try:
        words = shlex.split(_VARIABLE.sub(r"\1", line))
    except ValueError as error:
        raise InputError(f"{what}: not a shell command: {error}") from None
    pairs = [match for word in words if (match := _WORD.match(word)) and "$" not in word]
    return {match[1]: _value(match[2], what) for match in pairs if not match[1].isupper()}


def _value(text: str, what: str) -> Any:
    return yaml_tree(f"value: {text}", what)["value"] if text else ""
