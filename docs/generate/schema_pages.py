"""The reference of what `--json` prints: the JSON Schema of every payload, and a page that lists their keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.present.json_schemas import PAYLOADS, json_schemas

HEAD = """# JSON schemas

With `--json` a verb prints one payload, whose key `schema` has its name and version. The version changes when a key is removed or
changes its meaning, and not when a key is added. These are [JSON Schemas](https://json-schema.org) of the 2020-12 dialect, made
from the types of the code; `sw.json_schemas("plan")` gives the same. Errors are payloads too, on the error stream:
`shardwise.error/1`.

`model` and `layout` have the same keys in every payload.

| verb | payloads |
|---|---|
"""
KEYS = "| key | type |\n|---|---|\n"


def schema_files() -> dict[str, str]:
    """The files of `reference/` by name: the page, and a JSON file for each payload."""
    by_verb = {verb: json_schemas(verb) for verb in PAYLOADS}
    schemas = {name: schema for verb_schemas in by_verb.values() for name, schema in verb_schemas.items()}
    rows = [
        f"| [`{verb}`](cli.md#{verb}) | {', '.join(map(_link, list(verb_schemas)[:-1]))} |"
        for verb, verb_schemas in by_verb.items()
    ]
    parts = [HEAD + "\n".join(rows), *("\n\n".join(_section(name, schemas[name])) for name in schemas)]
    files = {f"schemas/{_file(name)}.json": json.dumps(schema, indent=2) + "\n" for name, schema in schemas.items()}
    return {"schemas.md": "\n\n".join(parts) + "\n", **files}


def _section(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {name}"
    yield f"{schema.get('description', '')}"
    rows = (f"| `{key}` | {_words(value)} |" for key, value in schema["properties"].items())
    yield KEYS + "\n".join(rows)
    yield f"[{_file(name)}.json](schemas/{_file(name)}.json)"


def _words(schema: Mapping[str, Any]) -> str:
    """A type in words, its parts by name."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_words, schema["anyOf"])))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        parts = schema.get("prefixItems") or [schema.get("items", {})]
        return "array of " + " and ".join(dict.fromkeys(map(_words, parts)))
    if isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_words(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def _link(name: str) -> str:
    return f"[{name}](#{name.replace('.', '').replace('/', '')})"


def _file(name: str) -> str:
    return name.replace("/", "-")
