"""Options as tyro reads them from a command line: --section.name value, --section.no-name, and section:choice for subcommands.

Source: tyro's documentation (boolean flags, subcommands); torchtitan, config/manager.py, which has lists as A,B,C.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.export.field import Options
from shardwise.export.formats.flags import Table, options_in


def tyro_words(options: Options, subcommands: Sequence[str] = ()) -> list[str]:
    """Words of a shell for each option; those that are `subcommands` come last, as what follows one belongs to it."""
    flags = [_word(name, value) for name, value in options.items() if name not in subcommands]
    return [*flags, *(f"{name.replace('_', '-')}:{options[name]}" for name in subcommands if name in options)]


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        section, _, last = name.rpartition(".")
        return f"--{name}" if value else f"--{section}.no_{last}"
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f"--{name} {shlex.quote(text)}"


def tyro_options(words: Sequence[str], table: Table, subcommands: Sequence[str] = ()) -> dict[str, Any]:
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
    for name, value in options_in(flags, hyphened).items():
        found |= _read(name.replace("-", "_"), value, table)
    return {**found, **chosen}


def _read(name: str, value: Any, table: Table) -> Mapping[str, Any]:
    """One option: no_name is name, false; lists are of texts between commas; None (of anything but text) stands for none."""
    section, _, last = name.rpartition(".")
    positive = f"{section}.{last.removeprefix('no_')}"
    if name not in table and last.startswith("no_") and positive in table:
        return {positive: False}
    kind = table[name].kind if name in table else "str"
    if kind == "list" and isinstance(value, list):
        return {name: [part for one in value for part in str(one).split(",")]}
    return {name: None if value == "None" and kind != "str" else value}
