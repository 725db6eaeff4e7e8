"""Which numbers a value was computed from: a record whose numbers are noted as they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, get_type_hints

Record = TypeVar("Record")
UNITS: Mapping[str, str] = {"bytes_per_s": "B/s", "_bytes": "B", "_s": "s"}  # by how the name of a number ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A symbol, its meaning, its value and its unit ("": a count)."""

    symbol: str
    meaning: str
    value: float
    unit: str = ""


class _Field(NamedTuple):
    """A field by its name and type; `key` is the record's index among several, and the key of a mapping's item."""

    name: str
    type: Any
    key: str

    def item(self, key: str) -> _Field:
        return self._replace(key=f"{self.key}, {key}" if self.key else key)

    def input(self, value: float) -> Input:
        meaning, symbol = (*getattr(self.type, "__metadata__", (self.name,)), self.name)[:2]
        unit = next((unit for ending, unit in UNITS.items() if self.name.endswith(ending)), "")
        return Input(
            symbol=f"{symbol}({self.key})" if self.key else symbol, meaning=meaning, value=float(value), unit=unit
        )


class Recorder:
    """Makes copies of records (dataclasses and named tuples) and has in `inputs`, by symbol, each number that was taken from a
    field of one, of a record in one or of a mapping in one.

    `Annotated` in a field's type says what its number means, and which symbol it has if not the field's name.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Input] = {}

    def copy(self, record: Record, *, given: Collection[str] = (), key: str = "") -> Record:
        """A copy whose methods and properties read the copy too, but for the cached properties that are `given`: these count as
        fields. `key` is the record's index among several."""
        kind = type(record)
        types = get_type_hints(kind, include_extras=True)
        types |= {name: get_type_hints(getattr(kind, name).func, include_extras=True)["return"] for name in given}
        known = {name: _Field(name, types[name], key) for name in (*_names(record), *given)}
        values = {name: self.within(getattr(record, name), field) for name, field in known.items()}

        def taken(copied: Any, name: str) -> Any:
            return (
                self.noted(values[name], known[name]) if name in known else super(made, copied).__getattribute__(name)
            )

        made: Any = type(kind.__name__, (kind,), {"__getattribute__": taken})
        own = {name: values[name] for name in _names(record)}
        copied: Record = made(*own.values()) if isinstance(record, tuple) else made(**own)
        return copied

    def within(self, value: Any, field: _Field) -> Any:
        """A copy of a record or a mapping in a field; anything else unchanged."""
        if isinstance(value, Mapping):
            return _Items(value, lambda item, key: self.noted(self.within(item, field.item(key)), field.item(key)))
        return self.copy(value, key=field.key) if is_dataclass(value) or hasattr(value, "_fields") else value

    def noted(self, value: Any, field: _Field) -> Any:
        """The same; a number is noted."""
        if isinstance(value, (int, float)):
            read = field.input(value)
            self.inputs[read.symbol] = read
        return value


class _Items(Mapping[Any, Any]):
    """A mapping whose items are given by a function of each item and its key."""

    def __init__(self, of: Mapping[Any, Any], item: Callable[[Any, str], Any]) -> None:
        self.of, self.item = of, item

    def __getitem__(self, key: Any) -> Any:
        return self.item(self.of[key], key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.of)

    def __len__(self) -> int:
        return len(self.of)


def numbers(record: tuple[Any, ...]) -> tuple[Input, ...]:
    """Every number of a named tuple."""
    recorder = Recorder()
    copied = recorder.copy(record)
    for name in _names(record):
        getattr(copied, name)
    return tuple(recorder.inputs.values())


def _names(record: Any) -> tuple[str, ...]:
    return getattr(record, "_fields", None) or tuple(field.name for field in fields(record))
