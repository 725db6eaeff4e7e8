"""JSON Schemas of payloads, made of their types.

What a verb prints with `--json` has a type beside the function that makes it: a `TypedDict`, whose key `schema` is a literal with
the payload's name and version. Parts of it that are values are written as their dataclasses: `asdict` keeps every field.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_type_hints

from typing_extensions import TypedDict

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Told(TypedDict):
    """A sentence for each thing that is wrong, and the exit code."""

    problems: list[str]
    exit_code: int


class ErrorPayload(TypedDict):
    """What stands on the error stream in place of a payload (`errors.told`); here, for every command loads that."""

    schema: Literal["shardwise.error/1"]
    error: Told


class Fields:
    """A shape with the fields of several dataclasses, named tuples and typed dicts; the later ones take the place of the earlier.

    For payloads that put more beside the fields of a value: `Annotated[dict[str, Any], Fields(StepTime, More)]`.
    """

    def __init__(self, first: type, *others: type) -> None:
        self.kinds = (first, *others)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        shape = TypedDict(self.kinds[0].__name__, self._hints())  # type: ignore[misc]
        shape.__doc__ = self.kinds[0].__doc__
        return handler.generate_schema(shape)

    def _hints(self) -> dict[str, Any]:
        hints: dict[str, Any] = {}
        for kind in self.kinds:
            found = get_type_hints(kind, include_extras=True)
            hints |= {one.name: found[one.name] for one in fields(kind)} if is_dataclass(kind) else found
        return hints


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
