"""YAML, TOML and JSON files as options with dotted names, and back. Nothing of what is read is built or run.

YAML is read by PyYAML's safe loader, TOML and JSON by the standard library; texts that take too long are refused. TOML is written
as sections of values in JSON's notation.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from shardwise.interop.launches.target import FrameworkOption, Options
from shardwise.values.errors import InputError

TRUE_WORDS, FALSE_WORDS = ["true", "yes", "y", "on", "1"], ["false", "no", "n", "off", "0"]
MAX_DEPTH = 40  # sections within sections: far above any configuration


def nest(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of options with dotted names.

    >>> nest({"bf16.enabled": True, "steps": 3})
    {'bf16': {'enabled': True}, 'steps': 3}
    """
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree


def flatten(tree: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """The options of a tree by dotted name. A section is an option where it is `known`, and holds nothing that is known within.

    Raises `InputError` for a tree that is too deep.

    >>> flatten({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, ["optimizer", "optimizer.type", "optimizer.params"])
    {'optimizer.type': 'AdamW', 'optimizer.params': {'lr': 0.0001}}
    """
    parts = (name.split(".") for name in known)
    sections = {".".join(part[:end]) for part in parts for end in range(1, len(part))}
    return dict(_leaves(tree, known, sections, "", 0))


def _leaves(
    tree: Mapping[str, Any], known: Collection[str], sections: Collection[str], prefix: str, depth: int
) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise InputError(
            f"{prefix[:80]}: more than {MAX_DEPTH} sections within one another; a configuration is required"
        )
    for key, value in tree.items():
        name = f"{prefix}{key}"
        whole = name in known and (name not in sections or not value)
        if isinstance(value, Mapping) and not whole:
            yield from _leaves(value, known, sections, f"{name}.", depth + 1)
        else:
            yield name, value


def normalize_values(options: Mapping[str, Any], table: Mapping[str, FrameworkOption]) -> dict[str, Any]:
    """Options with values as their table has them, where a framework takes other spellings too: a yes or no in words, a number or
    a name in quotes, a name in capitals."""
    return {name: _normalize_value(value, table[name]) if name in table else value for name, value in options.items()}


def _normalize_value(value: Any, option: FrameworkOption) -> Any:
    text = str(value)
    if option.kind == "bool" and text.lower() in TRUE_WORDS + FALSE_WORDS:
        return text.lower() in TRUE_WORDS
    if option.kind == "str" and isinstance(value, (bool, int)):
        text = text if not isinstance(value, bool) else ("yes" if value else "no")
        return text
    if (
        option.kind == "int"
        and isinstance(value, (str, float))
        and text.removesuffix(".0").isdecimal()
        and len(text) < 20
    ):
        return int(text.removesuffix(".0"))
    alike = [one for one in option.choices if one.lower() == text.lower()]
    return alike[0] if alike and isinstance(value, str) else value


def parse_json(text: str, what: str) -> dict[str, Any]:
    """The object that a JSON text holds. Raises `InputError` for another text, and for a key that is given twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        _require_unique([name for name, _ in pairs], what)
        return found

    def no_number(word: str) -> Any:
        raise InputError(f"{what}: found {word}; a finite number is required")

    try:
        return _require_sections(json.loads(text, object_pairs_hook=once, parse_constant=no_number), what)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what}: not valid JSON: {str(error)[:200]}") from None


def format_json(options: Mapping[str, Any]) -> str:
    """Options with dotted names as JSON."""
    return json.dumps(nest(options), indent=2) + "\n"


def _require_unique(names: list[str], what: str) -> None:
    """Raise `InputError` for a key that is given twice: the second would hide the first."""
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise InputError(f"{what}: {twice[0][:80]!r} is given twice; each key once is required")


def _require_sections(found: object, what: str) -> dict[str, Any]:
    """What was read, where it is a section whose names are texts."""
    if not isinstance(found, dict):
        raise InputError(f"{what}: found {type(found).__name__}; options by name are required")
    return {str(name): value for name, value in found.items()}


def format_toml(options: Options) -> str:
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


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """The options of a file. Raises `InputError` for what is not TOML."""
    try:
        return flatten(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{what}: not valid TOML: {error}") from None


MAX_YAML_CHARACTERS = 200_000  # PyYAML takes seconds for as many
MAX_YAML_BRACKETS = 2_000  # and minutes for as many as there is room for
MAX_YAML_VALUES = (
    100_000  # far above any launch; what aliases of aliases, or of themselves, make of a text is counted too
)


def parse_yaml(text: str, what: str) -> dict[str, Any]:
    """The sections of a text. Raises `InputError` for a text of another kind, and where a name is there twice."""
    yaml = _load_pyyaml()
    if len(text) > MAX_YAML_CHARACTERS:
        raise InputError(
            f"{what}: {len(text):,} characters; a YAML file of at most {MAX_YAML_CHARACTERS:,} is required"
        )
    if text.count("[") + text.count("{") > MAX_YAML_BRACKETS:
        raise InputError(f"{what}: more than {MAX_YAML_BRACKETS:,} brackets; a launch is required")
    try:
        found = yaml.load(text, Loader=_unique_key_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise InputError(
            f"{what}: not valid YAML: {where}{getattr(error, 'problem', None) or 'cannot be read'}"
        ) from None
    except (RecursionError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"{what}: not readable as YAML: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise InputError(f"{what}: found {type(found).__name__}; options by name are required")
    _require_few(found, what)
    return {str(name): value for name, value in found.items()}


def _require_few(values: Any, what: str) -> None:
    """Raise `InputError` for more values, all of those inside others counted, than a launch has."""
    left, count = [values], 0
    while left:
        one = left.pop()
        inner = list(one.values()) if isinstance(one, Mapping) else one if isinstance(one, (list, tuple, set)) else []
        count += len(inner)
        if count > MAX_YAML_VALUES:
            raise InputError(f"{what}: more than {MAX_YAML_VALUES:,} values; a launch is required")
        left.extend(inner)


def _load_pyyaml() -> Any:
    """PyYAML, which whoever neither reads nor writes YAML does not wait for."""
    return import_module("yaml")


def _unique_key_loader() -> Any:
    """PyYAML's safe loader, which refuses a name that is there twice in place of taking the last."""
    yaml = _load_pyyaml()
    loader: Any = type("Loader", (yaml.SafeLoader,), {})

    def mapping(own: Any, node: Any) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in counts.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} is given twice; each key once is required", node.start_mark
                )
        own.flatten_mapping(node)
        return dict(own.construct_mapping(node, deep=True))

    loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return loader


def format_yaml(options: Options) -> str:
    """Options with dotted names as YAML, in their order."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    text: str = _load_pyyaml().safe_dump(nest(plain), sort_keys=False, width=120, allow_unicode=True)
    return text


def find_yaml(files: Mapping[str, str], required: str) -> tuple[str, str]:
    """Name and text of the YAML file among some files. Raises `InputError` where there is none, or more than one."""
    found = [(name, text) for name, text in files.items() if name.endswith((".yaml", ".yml"))]
    if len(found) != 1:
        raise InputError(f"read: found {len(found)} YAML files in {', '.join(files)}; {required} is required")
    return found[0]
