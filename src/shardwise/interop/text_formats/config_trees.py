"""YAML, TOML and JSON files as options with dotted names, and back. Nothing that is read is built or run.

YAML is read by PyYAML's safe loader, TOML and JSON by the standard library; texts that would take too long are refused. TOML
is written as sections with values in JSON's notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from shardwise import values
from shardwise.interop.text_formats.option_tables import FrameworkOption, Options
from shardwise.values import InputError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
TRUE_WORDS, FALSE_WORDS = ["true", "yes", "y", "on", "1"], ["false", "no", "n", "off", "0"]
MAX_CHARACTERS = 1_000_000  # of a script
MAX_DEPTH = 40  # nested sections: far above any configuration


def require_length(text: str, source: str, required: str, max_characters: int = MAX_CHARACTERS) -> None:
    """Raise `InputError` for a text that is too long; `required` says in the message what it should be."""
    if len(text) > max_characters:
        raise InputError(f"{source}: {len(text):,} characters; {required} of at most {max_characters:,} is required")


def nest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of options with dotted names.

    >>> nest({"bf16.enabled": True, "steps": 3})
    {'bf16': {'enabled': True}, 'steps': 3}
    """
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *sections, leaf = name.split(".")
        subtree = tree
        for section in sections:
            subtree = subtree.setdefault(section, {})
        subtree[leaf] = value
    return tree


def flatten(tree: Mapping[str, Any], known_options: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of a tree by dotted name.

    A section is itself an option if it is in `known_options` and none of its members is. Raises `InputError` if the tree is
    too deep.

    >>> flatten({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, ["optimizer", "optimizer.type", "optimizer.params"])
    {'optimizer.type': 'AdamW', 'optimizer.params': {'lr': 0.0001}}
    """
    paths = (name.split(".") for name in known_options)
    sections = {".".join(path[:end]) for path in paths for end in range(1, len(path))}
    return dict(_leaves(tree, known_options, sections, "", 0))


def _leaves(
    tree: Mapping[str, Any], known_options: Collection[str], sections: Collection[str], prefix: str, depth: int
) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise InputError(
            f"{prefix[:80]}: more than {MAX_DEPTH} sections within one another; a configuration is required"
        )
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_option = name in known_options and (name not in sections or not value)
        if isinstance(value, Mapping) and not is_option:
            yield from _leaves(value, known_options, sections, f"{name}.", depth + 1)
        else:
            yield name, value


def normalize_values(options: Mapping[str, Any], table: Mapping[str, FrameworkOption]) -> dict[str, Any]:
    """Return options with values of their types, for frameworks that accept yes or no, quoted numbers and any capitals."""
    return {name: _normalize_value(value, table[name]) if name in table else value for name, value in options.items()}


def _normalize_value(value: Any, option: FrameworkOption) -> Any:
    text = str(value)
    if option.kind == "bool" and text.lower() in TRUE_WORDS + FALSE_WORDS:
        return text.lower() in TRUE_WORDS
    if option.kind == "str" and isinstance(value, (bool, int)):
        text = text if not isinstance(value, bool) else ("yes" if value else "no")
        return text
    if option.kind == "float" and isinstance(value, str) and _NUMBER.fullmatch(text):  # YAML 1.1 reads 1e-8 as a text
        return float(text)
    digits = text.removesuffix(".0")
    if option.kind == "int" and isinstance(value, (str, float)) and digits.isdecimal() and len(text) < 20:
        return int(digits)
    matching = [choice for choice in option.choices if choice.lower() == text.lower()]
    return matching[0] if matching and isinstance(value, str) else value


def parse_json(text: str, source: str) -> dict[str, Any]:
    """Return the object of a JSON text. Raises `InputError` for other texts, repeated keys, and NaN or infinity."""

    return _require_sections(values.parse_json(text, source, finite=True, unique_keys=True), source)


def format_json(options: Mapping[str, Any]) -> str:
    """Return options with dotted names as JSON."""
    return json.dumps(nest(options), indent=2) + "\n"


def _require_sections(tree: object, source: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise InputError(f"{source}: found {type(tree).__name__}; options by name are required")
    return {str(name): value for name, value in tree.items()}


def format_toml_options(options: Options) -> str:
    """Return options as TOML, with a section for each name before the last dot."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    blocks = (
        "\n".join([f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())])
        for section, settings in sections.items()
    )
    return "\n\n".join(blocks) + "\n"


def parse_toml_options(text: str, source: str) -> dict[str, Any]:
    """Return the options of a TOML text. Raises `InputError` if it is not valid."""
    return flatten(values.parse_toml(text, source))


def parse_yaml(text: str, source: str, *, keeps_last: bool = False) -> dict[str, Any]:
    """Return the mapping of a YAML text. Raises `InputError` for other or too large texts, and for repeated keys.

    With `keeps_last` the last value of a repeated key counts, as for programs that do not look for repetitions.
    """
    return _require_sections(values.parse_yaml(text, source, unique_keys=not keeps_last), source)


def format_yaml(options: Options) -> str:
    """Return options with dotted names as YAML, in their order."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    text: str = import_module("yaml").safe_dump(nest(plain), sort_keys=False, width=120, allow_unicode=True)
    return text


def find_marked_yaml(files: Mapping[str, str], section: str) -> tuple[str, str] | None:
    """Return name and text of the only YAML file if it has a top-level section; None for other files."""
    yaml_files = [(name, text) for name, text in files.items() if name.endswith((".yaml", ".yml"))]
    has_section = len(yaml_files) == 1 and re.search(rf"^{section}:", yaml_files[0][1], re.MULTILINE)
    return yaml_files[0] if has_section else None


def has_sections(files: Mapping[str, str], sections: Collection[str]) -> bool:
    """Return whether one of the YAML files has all of some top-level keys."""
    texts = (text for name, text in files.items() if name.endswith((".yaml", ".yml")))
    return any(all(re.search(rf"^{section}:", text, re.MULTILINE) for section in sections) for text in texts)


def find_yaml(files: Mapping[str, str], required: str) -> tuple[str, str]:
    """Return name and text of the only YAML file among the files. Raises `InputError` if there is none, or more than one."""
    candidates = [(name, text) for name, text in files.items() if name.endswith((".yaml", ".yml"))]
    if len(candidates) != 1:
        raise InputError(f"read: found {len(candidates)} YAML files in {', '.join(files)}; {required} is required")
    return candidates[0]
