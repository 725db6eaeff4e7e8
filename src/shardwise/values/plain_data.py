"""Dataclass values from plain data (JSON), with one line for each field that is wrong."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from shardwise.values.errors import InputError

Value = TypeVar("Value")


def known_fields(kind: type, payload: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {key: value for key, value in payload.items() if key in names}


def parse_dataclass(kind: type[Value], payload: Any, what: str) -> Value:
    """A dataclass value from plain data. Raises `InputError` with one line for each field that is wrong."""
    try:
        return TypeAdapter(kind).validate_python(payload)
    except ValidationError as error:
        lines = [
            f"{what}: {'.'.join(map(str, e['loc'])) or 'value'}: found {short_repr(e['input'])}; {e['msg']}"
            for e in error.errors()
        ]
        raise InputError(*lines) from None


def short_repr(value: Any) -> str:
    """A value in an error: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
