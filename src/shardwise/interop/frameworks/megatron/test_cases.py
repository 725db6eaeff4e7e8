"""Test cases of the Megatron-LM repository: YAML files with its arguments by flag, under MODEL_ARGS.

Source: Megatron-LM at d98e8a64, tests/functional_tests/shell_test_utils/run_ci_test.sh, which starts a training with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.launches.target import LaunchFiles
from shardwise.interop.text_formats.command_flags import parse_flags
from shardwise.interop.text_formats.config_trees import find_marked_yaml, parse_yaml
from shardwise.interop.text_formats.option_tables import option_table
from shardwise.values import InputError

ARGUMENTS = "MODEL_ARGS"


def read_test_case(files: LaunchFiles) -> dict[str, Any] | None:
    """Return the arguments of a test case; None for files that are none. Raises `InputError` if its arguments are no mapping."""
    marked = find_marked_yaml(files, ARGUMENTS)
    if marked is None:
        return None
    name, text = marked
    arguments = parse_yaml(text, name, keeps_last=True)[ARGUMENTS]  # as yq, which passes them on, does
    if not isinstance(arguments, Mapping):
        raise InputError(f"{name}: {ARGUMENTS} is {type(arguments).__name__}; arguments by flag are required")
    command: list[str] = []
    for flag, value in arguments.items():
        if value is None or value is False:  # not passed
            continue
        values = value if isinstance(value, list) else [value]
        command += [str(flag), *(str(part) for part in values if part is not True)]
    return parse_flags(command, option_table("megatron"))
