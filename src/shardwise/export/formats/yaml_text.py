"""YAML: sections of options, and back. Read by PyYAML's safe loader; nothing of it is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Options
from shardwise.export.formats.trees import nested

MOST_CHARACTERS = 200_000  # PyYAML takes seconds for as many
MOST_BRACKETS = 2_000  # and minutes for as many as there is room for
MOST_VALUES = 100_000  # far above any launch; what aliases of aliases, or of themselves, make of a text is counted too


def yaml_tree(text: str, what: str) -> dict[str, Any]:
    """The sections of a text. Raises `InputError` for a text of another kind, and where a name is there twice."""
    yaml = _yaml()
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{what}: {len(text):,} characters; a YAML file of at most {MOST_CHARACTERS:,} is required")
    if text.count("[") + text.count("{") > MOST_BRACKETS:
        raise InputError(f"{what}: more than {MOST_BRACKETS:,} brackets; a launch is required")
    try:
        found = yaml.load(text, Loader=_loader())
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
        if count > MOST_VALUES:
            raise InputError(f"{what}: more than {MOST_VALUES:,} values; a launch is required")
        left.extend(inner)


def _yaml() -> Any:
    """PyYAML, which whoever neither reads nor writes YAML does not wait for."""
    return import_module("yaml")


def _loader() -> Any:
    """PyYAML's safe loader, which refuses a name that is there twice in place of taking the last."""
    yaml = _yaml()
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


def yaml_text(options: Options) -> str:
    """Options with dotted names as YAML, in their order."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    text: str = _yaml().safe_dump(nested(plain), sort_keys=False, width=120, allow_unicode=True)
    return text


def only_yaml(files: Mapping[str, str], required: str) -> tuple[str, str]:
    """Name and text of the YAML file among some files. Raises `InputError` where there is none, or more than one."""
    found = [(name, text) for name, text in files.items() if name.endswith((".yaml", ".yml"))]
    if len(found) != 1:
        raise InputError(f"read: found {len(found)} YAML files in {', '.join(files)}; {required} is required")
    return found[0]
