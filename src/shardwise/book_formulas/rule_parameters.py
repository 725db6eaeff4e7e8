"""Parameters of a rule with their units, and parsing of their values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from shardwise.model import Architecture, load_model
from shardwise.values import (
    InputError,
    describe_unknown,
    format_quantity,
    format_seconds,
    parse_duration,
    parse_quantity,
)
from shardwise.values.units import EXAMPLE_QUANTITIES, lacks_unit, unit_from_name

# Units that the end of a name says, beside those of bytes and rates.
UNIT_OF_ENDING: Mapping[str, str] = {"seconds": "s", "_s": "s", "flops": "FLOPs", "intensity": "FLOPs/byte"}
WRITTEN_UNITS: Mapping[str, str] = {"FLOPs": "FLOP", "FLOPs/byte": ""}  # units as quantities have them


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleParameter:
    """A parameter of a rule; `hint` is its type."""

    name: str
    hint: Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def default_text(self) -> str:
        """Default as a command line writes it; "" if there is none."""
        if self.required or self.default is None:
            return ""
        return str(self.default).lower() if isinstance(self.default, bool) else f"{self.default}"

    @property
    def unit(self) -> str:
        """Unit that the name says; "" for a count and for anything but a number."""
        return unit_of_name(self.name) if self.kind in (float, int) else ""

    @property
    def kind(self) -> Any:
        """Type of its values, one of `VALUE_PARSERS`; `Literal` for a choice."""
        if get_origin(self.hint) is Literal:
            return Literal
        return next(kind for kind in VALUE_PARSERS if kind in (self.hint, *get_args(self.hint)))

    @property
    def choices(self) -> tuple[str, ...]:
        """Names to choose from; empty for other kinds."""
        if self.kind is bool:
            return ("false", "true")
        return get_args(self.hint) if self.kind is Literal else ()

    @property
    def example(self) -> str:
        """An example of its value."""
        if self.choices:
            return self.choices[0]
        return {Architecture: "llama-3-8b", str: "1f1b"}.get(self.kind) or _example(self.unit)


def _example(unit: str) -> str:
    return (
        "12ms"
        if unit == "s"
        else EXAMPLE_QUANTITIES[WRITTEN_UNITS.get(unit, unit)].partition(" or ")[0].replace(" ", "")
    )


def unit_of_name(name: str) -> str:
    """Return the unit that a name says, "" if none.

    >>> unit_of_name("memory_bytes"), unit_of_name("bytes_per_s"), unit_of_name("forward_s"), unit_of_name("d_model")
    ('B', 'B/s', 's', '')
    """
    return unit_from_name(name) or next((unit for ending, unit in UNIT_OF_ENDING.items() if name.endswith(ending)), "")


def quantity_text(value: float | bool, unit: str) -> str:
    """Format a number with its unit, as people read it.

    >>> quantity_text(459e12, "FLOP/s"), quantity_text(4194304.0, "tokens"), quantity_text(True, "")
    ('459 TFLOP/s', '4,194,304 tokens', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if math.isinf(value):
        return "infinite"
    if unit == "s":
        return format_seconds(value)
    if unit in ("B", "B/s", "FLOP/s"):
        return format_quantity(value, unit, digits=4)
    digits = f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"
    return f"{digits} {unit}".rstrip()


def parse_value(parameter: RuleParameter, argument: Any) -> Any:
    """Parse a value or a text with a unit. Raises `InputError` if it is not of the parameter's kind.

    >>> parse_value(RuleParameter(name="memory_bytes", hint=float), "80 GB")
    80000000000.0
    >>> parse_value(RuleParameter(name="tokens", hint=float), "4Ki")
    4096.0
    """
    return VALUE_PARSERS[parameter.kind](parameter, argument)


def _parse_number(parameter: RuleParameter, argument: Any) -> float:
    name, unit = parameter.name, parameter.unit
    if unit == "s" and isinstance(argument, str) and argument.strip()[-1:].isalpha():
        return parse_duration(argument, label=name)
    number = parse_quantity(argument, label=name, unit=WRITTEN_UNITS.get(unit, "" if unit == "s" else unit))
    if number < 0:
        raise InputError(f"{name}: found {argument!r}; a number of at least 0 is required, such as {parameter.example}")
    if isinstance(argument, str) and unit.endswith("/s") and lacks_unit(argument, number, unit):
        raise InputError(
            f"{name}: found {argument!r}, which is {number:g} {unit}; a unit is required, such as {EXAMPLE_QUANTITIES[unit]}"
        )
    return number


def _parse_whole(parameter: RuleParameter, argument: Any) -> int:
    number = _parse_number(parameter, argument)
    if number != int(number):
        raise InputError(f"{parameter.name}: found {argument!r}; a whole number is required")
    return int(number)


def _parse_choice(parameter: RuleParameter, argument: Any) -> Any:
    text = str(argument).lower() if parameter.kind is bool else argument
    if text not in parameter.choices:
        raise InputError(f"{parameter.name}: {describe_unknown(argument, parameter.choices)}")
    return text == "true" if parameter.kind is bool else text


def _parse_model(parameter: RuleParameter, argument: Any) -> Architecture:
    return argument if isinstance(argument, Architecture) else load_model(argument)


# What reads a value of each kind.
VALUE_PARSERS: Mapping[Any, Callable[[RuleParameter, Any], Any]] = {
    float: _parse_number, int: _parse_whole, bool: _parse_choice, str: lambda parameter, argument: str(argument),
    Literal: _parse_choice, Architecture: _parse_model,
}  # fmt: skip
