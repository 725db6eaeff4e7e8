"""Payload types that merge the fields of several classes; dataclasses parsed from plain data (JSON), with one line for each
field that is wrong.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from typing_extensions import TypedDict

from shardwise.values.errors import InputError
from shardwise.values.payload import printed_types


class MergedFields:
    """Shape with the fields of several dataclasses, named tuples and typed dicts; later ones replace fields of earlier ones, and
    types by key those of all.

    For payloads that add keys to the fields of a value: `Annotated[dict[str, Any], MergedFields(Torus, kind=str)]`.
    """

    def __init__(self, first: type, *later: type, **types_by_key: Any) -> None:
        self.kinds, self.types_by_key = (first, *later), types_by_key

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        types = {key: hint for kind in self.kinds for key, hint in printed_types(kind).items()}
        merged_type = TypedDict(self.kinds[0].__name__, types | self.types_by_key)  # type: ignore[misc]
        merged_type.__doc__ = self.kinds[0].__doc__
        return handler.generate_schema(merged_type)


Value = TypeVar("Value")


def known_fields(kind: type, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of a payload that are fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    return {key: value for key, value in payload.items() if key in names}


def parse_dataclass(kind: type[Value], payload: Any, label: str) -> Value:
    """Return a dataclass value from plain data. Raises `InputError` with one line for each field that is wrong."""
    from pydantic import TypeAdapter, ValidationError  # planning and help load without it

    try:
        return TypeAdapter(kind).validate_python(payload)
    except ValidationError as error:
        lines = [
            f"{label}: {'.'.join(map(str, e['loc'])) or 'value'}: found {short_repr(e['input'])}; {e['msg']}"
            for e in error.errors()
        ]
        raise InputError(*lines) from None


def short_repr(value: Any) -> str:
    """Return a `repr` of at most 80 characters, for errors."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
