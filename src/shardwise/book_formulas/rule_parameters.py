"""What a rule takes: parameters with their units, and what a text for one stands for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from shardwise.model.architecture import Architecture
from shardwise.values.errors import InputError, describe_unknown
from shardwise.values.units import (
    EXAMPLE_QUANTITIES,
    format_quantity,
    format_seconds,
    lacks_unit,
    parse_duration,
    parse_quantity,
    unit_from_name,
)

# Units that the end of a name says, beside those of bytes and rates.
UNIT_OF_ENDING: Mapping[str, str] = {"seconds": "s", "_s": "s", "flops": "FLOPs", "intensity": "FLOPs/byte"}
WRITTEN_UNITS: Mapping[str, str] = {"FLOPs": "FLOP", "FLOPs/byte": ""}  # units as quantities have them


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleParameter:
    """What a rule takes: `hint` is its type, `default` what it is where it is left out."""

    name: str
    hint: Any
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def default_text(self) -> str:
        """The default as it is written on a command line; "" where there is none."""
        if self.required or self.default is None:
            return ""
        return str(self.default).lower() if isinstance(self.default, bool) else f"{self.default}"

    @property
    def unit(self) -> str:
        """The unit that the name says; "" for a count and for anything but a number."""
        return unit_of_name(self.name) if self.kind in (float, int) else ""

    @property
    def kind(self) -> Any:
        """The type of its values, one of `VALUE_PARSERS`; `Literal` for a choice."""
        if get_origin(self.hint) is Literal:
            return Literal
        return next(kind for kind in VALUE_PARSERS if kind in (self.hint, *get_args(self.hint)))

    @property
    def choices(self) -> tuple[str, ...]:
        """What it may be, where that is a choice of names."""
        if self.kind is bool:
            return ("false", "true")
        return get_args(self.hint) if self.kind is Literal else ()

    @property
    def example(self) -> str:
        """What may stand for it."""
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
    """The unit that a name says, "" where it says none.

    >>> unit_of_name("memory_bytes"), unit_of_name("bytes_per_s"), unit_of_name("forward_s"), unit_of_name("d_model")
    ('B', 'B/s', 's', '')
    """
    return unit_from_name(name) or next((unit for ending, unit in UNIT_OF_ENDING.items() if name.endswith(ending)), "")


def quantity_text(value: float | bool, unit: str) -> str:
    """A number with its unit, as people read it.

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


def parse_value(parameter: RuleParameter, given: Any) -> Any:
    """What a value or a text stands for. Raises `InputError` for what is not of the parameter's kind.

    >>> parse_value(RuleParameter(name="memory_bytes", hint=float), "80 GB")
    80000000000.0
    >>> parse_value(RuleParameter(name="tokens", hint=float), "4Ki")
    4096.0
    """
    return VALUE_PARSERS[parameter.kind](parameter, given)


def _parse_number(parameter: RuleParameter, given: Any) -> float:
    what, unit = parameter.name, parameter.unit
    if unit == "s" and isinstance(given, str) and given.strip()[-1:].isalpha():
        return parse_duration(given, what=what)
    value = parse_quantity(given, what=what, unit=WRITTEN_UNITS.get(unit, "" if unit == "s" else unit))
    if value < 0:
        raise InputError(f"{what}: found {given!r}; a number of at least 0 is required, such as {parameter.example}")
    if isinstance(given, str) and unit.endswith("/s") and lacks_unit(given, value, unit):
        raise InputError(
            f"{what}: found {given!r}, which is {value:g} {unit}; a unit is required, such as {EXAMPLE_QUANTITIES[unit]}"
        )
    return value


def _parse_whole(parameter: RuleParameter, given: Any) -> int:
    value = _parse_number(parameter, given)
    if value != int(value):
        raise InputError(f"{parameter.name}: found {given!r}; a whole number is required")
    return int(value)


def _parse_choice(parameter: RuleParameter, given: Any) -> Any:
    text = str(given).lower() if parameter.kind is bool else given
    if text not in parameter.choices:
        raise InputError(f"{parameter.name}: {describe_unknown(given, parameter.choices)}")
    return text == "true" if parameter.kind is bool else text


def _parse_model(parameter: RuleParameter, given: Any) -> Architecture:
    from shardwise.model.load import load_model

    return given if isinstance(given, Architecture) else load_model(given)


# What reads a value of each kind.
VALUE_PARSERS: Mapping[Any, Callable[[RuleParameter, Any], Any]] = {
    float: _parse_number, int: _parse_whole, bool: _parse_choice, str: lambda parameter, given: str(given),
    Literal: _parse_choice, Architecture: _parse_model,
}  # fmt: skip
