"""What `--json` prints against its published JSON Schema, with no key more than the schema has."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema

from shardwise.present.json_schemas import PAYLOADS, json_schemas


@cache
def validators() -> dict[str, jsonschema.Draft202012Validator]:
    """A validator for each payload by the payload's name, which takes no key that the schema does not have."""
    schemas = {name: schema for verb in PAYLOADS for name, schema in json_schemas(verb).items()}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    return {name: jsonschema.Draft202012Validator(closed(schema)) for name, schema in schemas.items()}


def closed(schema: Any) -> Any:
    """The schema without room for keys that it does not name."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed_schema = {key: closed(value) for key, value in schema.items()}
    return (
        {**closed_schema, "additionalProperties": False}
        if "properties" in schema and "type" in schema
        else closed_schema
    )


def require_valid(payload: Any) -> None:
    """Fail with every place at which a payload is not as its schema says."""
    errors = validators()[payload["schema"]].iter_errors(payload)
    assert not [f"{error.json_path}: {error.message[:300]}" for error in errors]
