"""Parse dataclasses from plain data (JSON), with one line for each field that is wrong."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from shardwise.values.errors import InputError

Value = TypeVar("Value")


def known_fields(kind: type, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of a payload that are fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    return {key: value for key, value in payload.items() if key in names}


def parse_dataclass(kind: type[Value], payload: Any, label: str) -> Value:
    """Return a dataclass value from plain data. Raises `InputError` with one line for each field that is wrong."""
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
