"""Reads values out of a table of a file: each problem says what was found and what is required, all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.values.errors import InputError, did_you_mean
from shardwise.values.units import EXAMPLE_QUANTITIES, lacks_unit, parse_quantity, unit_from_name

TomlTable = Mapping[str, Any]


class TableReader:
    """Reads the values of one table of a file and collects what is wrong with them.

    What is wrong is read as some other value of its kind; whoever reads looks at `problems` before use.
    """

    def __init__(self, where: str, table: TomlTable, keys: Sequence[str], problems: list[str] | None = None) -> None:
        self.where, self.table = where, table
        self.problems = [] if problems is None else problems
        for key in table:
            if key not in keys:
                self.problems.append(
                    f"{where}: found {short_repr(key)}{did_you_mean(key, keys)}; the keys are {', '.join(keys)}"
                )

    def add_problem(self, key: str, required: str) -> None:
        """Record that a value is not what is required."""
        found = f"found {short_repr(self.table[key])}" if key in self.table else "missing"
        self.problems.append(f"{self.where}: {key}: {found}; {required} is required")

    def quantity(self, key: str, unit: str | None = None, *, any_size: bool = False) -> float:
        """A number or a text such as "96 GB", above 0; its unit is the one that `key` says unless it is given.

        `any_size`: of something smaller than a chip or a network, so that a bare number is no forgotten unit.
        """
        unit = unit_from_name(key) if unit is None else unit
        example = f'8e10 or "{EXAMPLE_QUANTITIES[unit]}"' if unit else "8"
        value = self._number(
            key, lambda value: 0 < value <= MAX_QUANTITY, f"a number above 0, such as {example},", unit
        )
        return value if any_size else self._with_unit(key, value, unit)

    def non_negative(self, key: str) -> float:
        """A number or a text such as "1.5 GB", or 0."""
        required = 'a number of at least 0, such as 1.5e9 or "1.5 GB",'
        return self._with_unit(
            key, self._number(key, lambda value: 0 <= value <= MAX_QUANTITY, required), unit_from_name(key)
        )

    def _with_unit(self, key: str, value: float, unit: str) -> float:
        if lacks_unit(self.table.get(key), value, unit):
            self.add_problem(key, f'a unit, such as "{EXAMPLE_QUANTITIES[unit]}",')
        return value

    def fraction(self, key: str) -> float:
        """A part of a peak; 1 when it is left out."""
        return (
            self._number(key, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
            if key in self.table
            else 1.0
        )

    def number_between(self, key: str, low: float, high: float, what: str) -> float:
        """A number without a unit between two others; `what` it is."""
        return self._number(key, lambda value: low <= value <= high, f"{what}, of {low:g} to {high:g},", "")

    def latency(self, key: str, *, optional: bool = True) -> float:
        """Seconds; 0 when they are left out, unless they must not be."""
        if optional and key not in self.table:
            return 0.0
        return self._number(key, lambda value: 0 <= value <= 1, "a number of seconds from 0 to 1, such as 2.7e-6,")

    def _number(self, key: str, allowed: Callable[[float], bool], required: str, unit: str | None = None) -> float:
        try:
            value = parse_quantity(self.table[key], unit=unit_from_name(key) if unit is None else unit)
        except (KeyError, InputError, OverflowError, ValueError):  # missing, not a number, or one of too many digits
            value = math.nan
        if not allowed(value):
            self.add_problem(key, required)
        return value

    def size(self, key: str) -> int:
        """A whole number of at least 1."""
        return (self.sizes(key, (self.table[key],)) if key in self.table else self.sizes(key))[0]

    def sizes(self, key: str, given: Any = None) -> tuple[int, ...]:
        """A list of whole numbers of at least 1."""
        alone = given is not None
        given = given if alone else self.table.get(key)
        if not isinstance(given, (list, tuple)) or not given or not all(_is_size(size) for size in given):
            self.add_problem(key, f"{'a whole number' if alone else 'a list of whole numbers'} of 1 to {MAX_DEVICES:,}")
            return (1,)
        return tuple(given)

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty."""
        value = self.table.get(key, default)
        if not isinstance(value, str) or (not value and value is not default):
            self.add_problem(key, "a text")
            return ""
        return value

    def flag(self, key: str) -> bool:
        """true or false; false when it is left out."""
        value = self.table.get(key, False)
        if not isinstance(value, bool):
            self.add_problem(key, "true or false")
        return value is True

    def text_table(self, key: str) -> dict[str, str]:
        """A table of texts; empty when it is left out."""
        value = self.table.get(key, {})
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
            self.add_problem(key, "a table of texts")
            return {}
        return dict(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_DEVICES


def short_repr(value: Any) -> str:
    """A value in an error: short, on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = "a number of very many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


MAX_QUANTITY = 1e21  # of any quantity of one chip; a thousand times an exaflop

MAX_DEVICES = 10**7
