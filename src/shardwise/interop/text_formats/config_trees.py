"""YAML, TOML and JSON files as options with dotted names, and back. Nothing that is read is built or run.

YAML is read by PyYAML's safe loader, TOML and JSON by the standard library; texts that would take too long are refused. TOML
is written as sections with values in JSON's notation.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

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

    def build_section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _require_unique([name for name, _ in pairs], source)
        return dict(pairs)

    def refuse_constant(literal: str) -> Any:
        raise InputError(f"{source}: found {literal}; a finite number is required")

    try:
        tree = json.loads(text, object_pairs_hook=build_section, parse_constant=refuse_constant)
        return _require_sections(tree, source)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not valid JSON: {str(error)[:200]}") from None


def format_json(options: Mapping[str, Any]) -> str:
    """Return options with dotted names as JSON."""
    return json.dumps(nest(options), indent=2) + "\n"


def _require_unique(names: list[str], source: str) -> None:
    """Raise `InputError` for a repeated key: the second would hide the first."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(f"{source}: {repeated[0][:80]!r} is given twice; each key once is required")


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
    try:
        return flatten(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{source}: not valid TOML: {error}") from None


MAX_YAML_CHARACTERS = 200_000  # PyYAML takes seconds for as many
MAX_YAML_BRACKETS = 2_000  # a text full of brackets takes it minutes
MAX_YAML_VALUES = 100_000  # far above any launch


def parse_yaml(text: str, source: str, *, keeps_last: bool = False) -> dict[str, Any]:
    """Return the mapping of a YAML text. Raises `InputError` for other or too large texts, and for repeated keys.

    With `keeps_last` the last value of a repeated key counts, as for programs that do not look for repetitions.
    """
    yaml = _load_pyyaml()
    require_length(text, source, "a YAML file", MAX_YAML_CHARACTERS)
    if text.count("[") + text.count("{") > MAX_YAML_BRACKETS:
        raise InputError(f"{source}: more than {MAX_YAML_BRACKETS:,} brackets; a launch is required")
    try:
        tree = yaml.load(text, Loader=yaml.SafeLoader if keeps_last else _unique_key_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"line {mark.line + 1}: " if mark else ""
        raise InputError(
            f"{source}: not valid YAML: {position}{getattr(error, 'problem', None) or 'cannot be read'}"
        ) from None
    except (RecursionError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"{source}: not readable as YAML: {type(error).__name__}") from None
    if isinstance(tree, dict):
        _require_few(tree, source)
    return _require_sections(tree, source)


def _require_few(tree: Any, source: str) -> None:
    """Raise `InputError` if a tree has more than `MAX_YAML_VALUES` values, nested ones included."""
    # An alias is loaded as the same object, so a short text with aliases of aliases can stand for billions of values (and an
    # alias of itself for endlessly many). Each is counted as often as it occurs, since whoever walks the tree visits it as often.
    pending, count = [tree], 0
    while pending:
        node = pending.pop()
        children = list(node.values()) if isinstance(node, Mapping) else node
        children = children if isinstance(children, (list, tuple, set)) else []
        count += len(children)
        if count > MAX_YAML_VALUES:
            raise InputError(f"{source}: more than {MAX_YAML_VALUES:,} values; a launch is required")
        pending.extend(children)


def _load_pyyaml() -> Any:
    return import_module("yaml")


def _unique_key_loader() -> Any:
    """Return PyYAML's safe loader, changed to refuse a repeated key instead of taking the last one."""
    yaml = _load_pyyaml()
    loader: Any = type("Loader", (yaml.SafeLoader,), {})

    def mapping(constructor: Any, node: Any) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in counts.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} is given twice; each key once is required", node.start_mark
                )
        constructor.flatten_mapping(node)
        return dict(constructor.construct_mapping(node, deep=True))

    loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return loader


def format_yaml(options: Options) -> str:
    """Return options with dotted names as YAML, in their order."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    text: str = _load_pyyaml().safe_dump(nest(plain), sort_keys=False, width=120, allow_unicode=True)
    return text


def find_yaml(files: Mapping[str, str], required: str) -> tuple[str, str]:
    """Return name and text of the only YAML file among the files. Raises `InputError` if there is none, or more than one."""
    candidates = [(name, text) for name, text in files.items() if name.endswith((".yaml", ".yml"))]
    if len(candidates) != 1:
        raise InputError(f"read: found {len(candidates)} YAML files in {', '.join(files)}; {required} is required")
    return candidates[0]
