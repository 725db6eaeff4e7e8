"""Payloads: dataclasses that `--json` prints as they are, whose JSON schema has the same shape, and that are parsed from JSON.

A payload has the key `schema` first where its class has a `SCHEMA`, then its fields, then its properties marked `@printed`.
Markers in `Annotated` change a field: `Flat`, `Key`, `Hidden`, `OmitEmpty`; `MergedFields` is a type with the fields of several
classes. A later key with the name of an earlier one takes its place. Other dataclasses are written as they are, but for fields
with the metadata `OMIT_DEFAULT`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NotRequired,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from shardwise.values.errors import InputError
from shardwise.values.input_texts import short_repr


class Flat:
    """Marker of a field: the keys of its value are written in place of the field."""


class Hidden:
    """Marker of a field that is not written."""


class OmitEmpty:
    """Marker of a field whose key is written only where its value is not None, and no empty text or sequence."""


# Metadata of a dataclass's field whose key is written only where its value is not the default: added to a class whose payloads
# are to stay as they were.
OMIT_DEFAULT: Mapping[str, bool] = {"omit_default": True}


@dataclass(frozen=True, slots=True)
class Key:
    """Marker of a field that is written under another name, such as a keyword of Python: `Annotated[str, Key("from")]`."""

    name: str


Getter = TypeVar("Getter", bound=Callable[..., Any])


def printed(getter: Getter) -> Getter:
    """Mark a property of a payload as written: `@property`, and `@printed` below it."""
    getter.is_printed = True  # type: ignore[attr-defined]
    return getter


class Payload:
    """Base of dataclasses that `to_json` writes with more or other keys than their fields.

    For pydantic its type is that of the JSON, so a payload is written, not parsed.

    >>> @dataclass(frozen=True)
    ... class Transfer(Payload):
    ...     SCHEMA = "example.transfer/1"
    ...     num_bytes: float
    ...     seconds: float
    ...     @property
    ...     @printed
    ...     def bytes_per_s(self) -> float:
    ...         return self.num_bytes / self.seconds
    >>> to_json(Transfer(6.0, 2.0))
    {'schema': 'example.transfer/1', 'num_bytes': 6.0, 'seconds': 2.0, 'bytes_per_s': 3.0}
    """

    __slots__ = ()
    SCHEMA: ClassVar[str] = ""

    @classmethod
    def from_attributes(cls, *sources: Any, **values: Any) -> Self:
        """Return a payload with these values; other fields are attributes of that name, of the first source that has one.

        A field is None where no source has it and one of the sources is None. Raises `AttributeError` where none is.
        """
        for name in (field.name for field in fields(cls) if field.name not in values):  # type: ignore[arg-type]
            source = next((source for source in sources if hasattr(source, name)), None)
            if source is None and all(source is not None for source in sources):
                raise AttributeError(f"{cls.__name__}.{name}: no source has it")
            values[name] = getattr(source, name, None)
        return cls(**values)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        kind: Any = cls  # for mypy, a class with `__hash__` is not hashable itself
        return handler.generate_schema(_typed_dict(kind))


def to_json(value: Any) -> Any:
    """Return a value as JSON has it: payloads and other dataclasses as objects, tuples as arrays."""
    if is_dataclass(value):
        return dict(_items(value))
    if isinstance(value, Mapping):
        return {key: to_json(nested) for key, nested in value.items()}
    return [to_json(nested) for nested in value] if isinstance(value, (list, tuple)) else value


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    kind: Any = type(value)
    if schema := getattr(kind, "SCHEMA", ""):
        yield "schema", schema
    for member in _members(kind):
        nested: Any = getattr(value, member.attribute)
        if member.omits_default and nested == member.default:
            continue
        if member.is_flat:
            yield from to_json(nested._asdict() if hasattr(nested, "_asdict") else nested).items()  # of a named tuple
        elif not (member.omits_empty and (nested is None or (isinstance(nested, Sized) and not len(nested)))):
            yield member.key, to_json(nested)


class _Member(NamedTuple):
    """A field or property that is written."""

    attribute: str
    key: str
    type: Any
    is_flat: bool = False
    omits_empty: bool = False
    omits_default: bool = False
    default: Any = None


@cache
def _members(kind: Any) -> tuple[_Member, ...]:
    names = [field.name for field in fields(kind)]
    if not issubclass(kind, Payload):  # its annotations may name what is imported for type checkers only
        return tuple(
            _Member(f.name, f.name, Any, omits_default=_omits_default(f), default=f.default) for f in fields(kind)
        )
    hints = get_type_hints(kind, include_extras=True)
    members = []
    for name in names:
        hint = hints[name]
        markers = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        key = next((marker.name for marker in markers if isinstance(marker, Key)), name)
        if Hidden not in markers:
            members.append(_Member(name, key, hint, Flat in markers, OmitEmpty in markers))
    attributes = {name: attribute for base in reversed(kind.__mro__) for name, attribute in vars(base).items()}
    for name, attribute in attributes.items():
        getter = getattr(attribute, "fget", None) or getattr(attribute, "func", None)  # of a property, or a cached one
        if getattr(getter, "is_printed", False):
            members.append(_Member(name, name, get_type_hints(getter, include_extras=True)["return"]))
    return tuple(members)


def _omits_default(field: Field[Any]) -> bool:
    return bool(field.metadata.get("omit_default"))


@cache  # with one type for each class, the schema has one definition for it
def _typed_dict(kind: type) -> Any:
    typed_dict = TypedDict(kind.__name__, printed_types(kind))  # type: ignore[misc]
    flat_types = [get_args(member.type)[0] for member in _members(kind) if member.is_flat]
    typed_dict.__doc__ = "\n\n".join(map(_description, (kind, *flat_types)))
    return typed_dict


def _description(kind: type) -> str:
    """Return the docstring of a class without its example."""
    return (inspect.getdoc(kind) or "").partition("\n>>> ")[0].rstrip()


def printed_types(kind: Any) -> dict[str, Any]:
    """Return the types of what `to_json` writes of a class by key; those of its annotations for a named tuple or a typed dict."""
    if not issubclass(kind, Payload):
        hints = get_type_hints(kind, include_extras=True)
        if not is_dataclass(kind):
            return hints
        return {f.name: NotRequired[hints[f.name]] if _omits_default(f) else hints[f.name] for f in fields(kind)}
    types: dict[str, Any] = {"schema": Literal[kind.SCHEMA]} if kind.SCHEMA else {}
    for member in _members(kind):
        if member.is_flat:
            types |= printed_types(get_args(member.type)[0])
        else:
            types[member.key] = NotRequired[_without_none(member.type)] if member.omits_empty else member.type
    return types


def _without_none(hint: Any) -> Any:
    """Return the T of `Annotated[T, ...]` and of `Annotated[T | None, ...]`."""
    hint = get_args(hint)[0]
    return get_args(hint)[0] if NoneType in get_args(hint) else hint


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
            f"{label}: {'.'.join(map(str, e['loc'])) or 'value'}: found {short_repr(e['input'], 80)}; {e['msg']}"
            for e in error.errors()
        ]
        raise InputError(*lines) from None
