"""Inputs of a term of an estimate: the numbers that its rule read, and the derived expressions behind them.

An `InputRecorder` copies a record (a dataclass or a named tuple) and notes each number that is read from the copy, with
the meaning and the symbol of its `Annotated` type. `Expressions` reads elements and FLOPs from the derivation of a
layout's scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, get_type_hints

from shardwise.layout import ShardingScheme
from shardwise.model import Role, is_layer
from shardwise.price.stage_contents import HostOffload
from shardwise.price.unit_cost import UnitPricer
from shardwise.price.unit_values import UnitValues
from shardwise.step.collectives import COUNT_PREFIX
from shardwise.values import ZERO, LocalDim, Polynomial
from shardwise.values.symbolic import ElementPairs, Symbol

Record = TypeVar("Record")
# Units of numbers by the suffix of their names.
UNITS_BY_SUFFIX: Mapping[str, str] = {"bytes_per_s": "B/s", "_bytes": "B", "_s": "s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TermInput:
    """A symbol, its meaning, its value and its unit ("": a count)."""

    symbol: str
    meaning: str
    value: float
    unit: str = ""


class _RecordedField(NamedTuple):
    """A field by name and type; `key` is the record's index among several, and the key of a mapping's item."""

    name: str
    type: Any
    key: str

    def item(self, key: str) -> _RecordedField:
        return self._replace(key=f"{self.key}, {key}" if self.key else key)

    def input(self, value: float) -> TermInput:
        meaning, symbol = (*getattr(self.type, "__metadata__", (self.name,)), self.name)[:2]
        unit = next((unit for ending, unit in UNITS_BY_SUFFIX.items() if self.name.endswith(ending)), "")
        return TermInput(
            symbol=f"{symbol}({self.key})" if self.key else symbol, meaning=meaning, value=float(value), unit=unit
        )


class InputRecorder:
    """Copies records and collects in `inputs`, by symbol, each number read from a field, of nested records and mappings too.

    `Annotated` in a field's type gives the meaning of its number, and its symbol if that is not the field's name.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, TermInput] = {}

    def copy(self, record: Record, *, input_properties: Collection[str] = (), key: str = "") -> Record:
        """Return a copy of a record that notes the numbers read from it; `key` is the record's index among several.

        Its methods and properties read the copy too, except that the `input_properties` cached properties count as fields.
        """
        kind = type(record)
        types = get_type_hints(kind, include_extras=True)
        types |= {
            name: get_type_hints(getattr(kind, name).func, include_extras=True)["return"] for name in input_properties
        }
        recorded_fields = {
            name: _RecordedField(name, types[name], key) for name in (*_names(record), *input_properties)
        }
        values = {name: self.wrap(getattr(record, name), field) for name, field in recorded_fields.items()}

        # A subclass made here intercepts every attribute, so methods of the record read the notes as well. Cached
        # properties are returned as they are, without running: their own inputs are not noted.
        def read_attribute(copied: Any, name: str) -> Any:
            if name in recorded_fields:
                return self.note(values[name], recorded_fields[name])
            return super(recording_type, copied).__getattribute__(name)

        recording_type: Any = type(kind.__name__, (kind,), {"__getattribute__": read_attribute})
        field_values = {name: values[name] for name in _names(record)}
        copied: Record = (
            recording_type(*field_values.values()) if isinstance(record, tuple) else recording_type(**field_values)
        )
        return copied

    def wrap(self, value: Any, field: _RecordedField) -> Any:
        """Return a recording copy of a record or a mapping in a field; anything else unchanged."""
        if isinstance(value, Mapping):
            return _RecordedMapping(
                value, lambda item, key: self.note(self.wrap(item, field.item(key)), field.item(key))
            )
        return self.copy(value, key=field.key) if is_dataclass(value) or hasattr(value, "_fields") else value

    def note(self, value: Any, field: _RecordedField) -> Any:
        """Note a number; return the value unchanged."""
        if isinstance(value, (int, float)):
            read = field.input(value)
            self.inputs[read.symbol] = read
        return value


class _RecordedMapping(Mapping[Any, Any]):
    """A mapping whose items are a function of each item and its key."""

    def __init__(self, mapping: Mapping[Any, Any], item: Callable[[Any, str], Any]) -> None:
        self.mapping, self.item = mapping, item

    def __getitem__(self, key: Any) -> Any:
        return self.item(self.mapping[key], key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.mapping)

    def __len__(self) -> int:
        return len(self.mapping)


def read_numbers(record: tuple[Any, ...]) -> tuple[TermInput, ...]:
    """Return every number of a named tuple."""
    recorder = InputRecorder()
    copied = recorder.copy(record)
    for name in _names(record):
        getattr(copied, name)
    return tuple(recorder.inputs.values())


def _names(record: Any) -> tuple[str, ...]:
    return getattr(record, "_fields", None) or tuple(field.name for field in fields(record))


SYMBOL_MEANINGS: Mapping[str, str] = {
    "B": "sequences of a micro-batch", "T": "tokens of a sequence", "D": "model width", "F": "hidden width",
    "K": "key-value heads", "G": "query heads of a key-value head", "H": "width of a head", "V": "vocabulary",
    "E": "experts", "k": "experts that a token takes", "M": "hidden width of an expert",
    "S": "hidden width of the shared expert", "Q": "width of the queries' latent", "C": "width of the keys' and values' latent",
    "I": "plain part of a head", "R": "rotary part of a head", "U": "width of a value", "J": "two hidden states",
    "ep": "part of expert parallelism that is borrowed from fsdp",
    "P": "rows of a table of positions", "span": "share of the square of scores that is computed", "r": "rank of an adapter",
    "y": "rank of the adapter of experts' gate and up", "u": "a single number", "d": "model width", "h": "width of a norm's gate",
    "b": "two latents of queries", "a": "layers", "p": "width of a layer's embedding",
    "t": "rows of the table of layers' embeddings",
    **dict.fromkeys(("dp", "fsdp", "cp", "tp", "pp"), "degree of the axis"),
    "tp_kv": "part of tp that splits key-value heads", "tp_rep": "part of tp that shares a key-value head",
}  # fmt: skip
PAIRS_MEANING = "square of a side of a matrix; 0 where the side is longer than the optimizer allows"
FULLEST_MEANING = "share of the fullest device"  # of a dim that axes split: its symbol has both

# What of a unit's `State` is not all that has gradients.
PARTIAL_STATE = {
    "apart": "elements of no matrices",
    "factors": "numbers of rows and columns",
    "kept": "elements cast for products",
}


class UnitExpression(NamedTuple):
    """Elements or FLOPs of one unit on one device, counted once."""

    unit: str
    meaning: str
    polynomial: Polynomial


class Expressions:
    """Reads expressions from the derivation of a layout's scheme; `values` are those of the symbols in each unit."""

    def __init__(
        self, pricer: UnitPricer, scheme: ShardingScheme, units: tuple[str, ...], values: UnitValues,
        host: HostOffload, *, mixed: bool,
    ) -> None:  # fmt: skip
        """Read from these units; `mixed`: some layers do not recompute though the others do."""
        self.pricer, self.scheme = pricer, scheme
        self.units, self.values, self.host, self.mixed = units, values, host, mixed

    def flops(self, phase: str) -> Iterator[UnitExpression]:
        """Yield the FLOPs of each unit in a phase."""
        for unit in self.units:
            kernels = self.pricer.parts(self.scheme, unit).kernels
            flops = sum((k.flops for k in kernels if k.phase == phase), start=ZERO)
            yield UnitExpression(unit, f"FLOPs of the {unit}", flops)

    def collectives(self, axis: str) -> Iterator[UnitExpression]:
        """Yield the elements of each collective that an axis is charged with, where it has more than one device."""
        for unit in (*self.units, "carry"):
            for collective in self.pricer.parts(self.scheme, unit).collectives:
                over = [a for a in collective.axes if self.values.base[a] > 1]
                if over and collective.time_term == axis:
                    label = f"{unit}, {collective.phase}: {collective.kind} over {'·'.join(over)}, elements"
                    yield UnitExpression(unit, label, collective.elements)

    def saved(self, *, logits: bool = False) -> Iterator[UnitExpression]:
        """Yield the tensors that each unit saves for the backward pass, by role and format: the logits, or the rest."""
        for name, scheme in self._saving_units():
            elements_by_label: dict[str, Polynomial] = {}
            unit = name.split()[0]
            for tensor in self.pricer.parts(scheme, unit).products.saved:
                if (tensor.role is Role.LOGITS) is logits:
                    label = f"{name}, elements kept as {tensor.role.name.lower()}{self.pricer.formats.saved_as(tensor).cast}"
                    elements_by_label[label] = elements_by_label.get(label, ZERO) + tensor.elements
            yield from (UnitExpression(unit, label, elements) for label, elements in elements_by_label.items())

    def _saving_units(self) -> Iterator[tuple[str, ShardingScheme]]:
        """Yield units with saved activations, each with the scheme that decides which."""
        for unit in self.units:
            yield unit, self.scheme
            if is_layer(unit) and self.mixed:
                yield f"{unit} without recomputation", self.scheme.with_recompute("none")

    def state(self, column: str) -> Iterator[UnitExpression]:
        """Yield the elements that a column of `StateCost` counts."""
        for unit in self.units:
            parts = self.pricer.parts(self.scheme, unit)
            widths = self.pricer.memory.state_widths(parts, self.scheme)[column]
            counted = [(name, getattr(parts.state, name)) for name, width in widths.items() if width]
            names_by_elements = {elements: name for name, elements in reversed(counted) if elements.monomials}
            for position, (elements, name) in enumerate(reversed(names_by_elements.items())):
                label = PARTIAL_STATE.get(name, "elements with gradients" if position else "elements")
                yield UnitExpression(unit, f"{label} of the {unit}", elements)

    def offloaded(self) -> Iterator[UnitExpression]:
        """Yield the elements that are copied to the host and back."""
        yield from self.saved() if self.host.activations else ()
        yield from self.state("optimizer_bytes") if self.host.optimizer else ()

    def value(self, expression: UnitExpression) -> float:
        """Evaluate an expression."""
        return float(expression.polynomial.evaluate(self.values.of(expression.unit)))

    def symbols(self, expressions: Iterable[UnitExpression]) -> tuple[TermInput, ...]:
        """Return every symbol of some expressions; of a dim that axes split also the dim and the axes.

        Where a kind of layer has another value for a symbol than a unit before it, the symbol is listed again for that kind.
        """
        inputs: dict[str, TermInput] = {}
        for unit, _, polynomial in expressions:
            values = self.values.of(unit)
            for symbol in (s for monomial in polynomial.monomials for s, _ in monomial.factors):
                for name in (*_symbol_parts(symbol), symbol):
                    read = TermInput(symbol=str(name), meaning=_symbol_meaning(name), value=float(values[name]))
                    if inputs.setdefault(read.symbol, read) != read:
                        inputs[f"{name} {unit}"] = replace(read, symbol=f"{name} of {unit}")
        return tuple(inputs.values())


def _symbol_parts(symbol: Symbol) -> tuple[str, ...]:
    if isinstance(symbol, ElementPairs):
        return (*symbol.dims, symbol)
    if isinstance(symbol, str):
        return (symbol,)
    return (*_symbol_parts(symbol.dim), *symbol.axes) if isinstance(symbol, LocalDim) else (*symbol.left, *symbol.right)


def _symbol_meaning(symbol: Symbol) -> str:
    if isinstance(symbol, ElementPairs):
        return PAIRS_MEANING
    name = str(symbol)
    if name.startswith("("):
        return FULLEST_MEANING
    return SYMBOL_MEANINGS.get(name) or f"units of the kind {name.removeprefix(COUNT_PREFIX)}"
