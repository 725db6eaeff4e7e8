"""JSON Schemas of payloads, made of their types.

What a verb prints with `--json` has a type beside the function that makes it: a `TypedDict`, whose key `schema` is a literal with
the payload's name and version. Parts of it that are values are written as their dataclasses: `asdict` keeps every field.
"""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Told(TypedDict):
    """A sentence for each thing that is wrong, and the exit code."""

    problems: list[str]
    exit_code: int


class ErrorPayload(TypedDict):
    """Stands on the error stream in place of a payload (`values.errors.format_problems`); here, for every command loads that."""

    schema: Literal["shardwise.error/1"]
    error: Told


def json_schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a payload's type. Fields of values are required even where they have a default: all are printed.

    >>> from typing import Literal
    >>> Size = TypedDict("Size", {"schema": Literal["example.size/1"], "num_bytes": float})
    >>> found = json_schema(Size)
    >>> found["title"], found["required"], found["properties"]["num_bytes"]["type"]
    ('example.size/1', ['schema', 'num_bytes'], 'number')
    """
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class AsPrinted(GenerateJsonSchema):
        def field_is_required(self, field: Any, total: bool) -> bool:
            return field["type"] != "typed-dict-field" or super().field_is_required(field, total)

    found = TypeAdapter(kind).json_schema(schema_generator=AsPrinted)
    return {"$schema": DIALECT, **found, "title": found["properties"]["schema"]["const"]}
