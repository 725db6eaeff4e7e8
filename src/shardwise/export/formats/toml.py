"""TOML files of sections: options by dotted name, written by a few lines and read by the standard parser."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Options
from shardwise.export.formats.trees import dotted


def toml_text(options: Options) -> str:
    """A section for each name before the last dot. Texts, numbers, truth values and lists of them are the same in JSON."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    parts = (
        "\n".join([f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in own.items())])
        for section, own in sections.items()
    )
    return "\n\n".join(parts) + "\n"


def toml_options(text: str, what: str) -> dict[str, Any]:
    """The options of a file. Raises `InputError` for what is not TOML."""
    try:
        return dotted(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{what}: not valid TOML: {error}") from None
