"""Typed reads of a table of a TOML file: each problem says what was found and what is required, all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.values import InputError, did_you_mean, parse_quantity, short_repr
from shardwise.values.units import EXAMPLE_QUANTITIES, lacks_unit, unit_from_name

TomlTable = Mapping[str, Any]


class TableReader:
    """Reader of one table of a file, which collects the problems of its values.

    A wrong value is read as some valid value of its type; callers check `problems` before use.
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
        """Record that a value is missing or is not what is required."""
        value_text = f"found {short_repr(self.table[key])}" if key in self.table else "missing"
        self.problems.append(f"{self.where}: {key}: {value_text}; {required} is required")

    def quantity(self, key: str, unit: str | None = None, *, any_size: bool = False) -> float:
        """Read a number or a text such as "96 GB", above 0, in the unit that `key` implies unless one is given.

        `any_size`: the quantity may be smaller than a chip's or a network's, so that a bare number does not count as a
        forgotten unit.
        """
        unit = unit_from_name(key) if unit is None else unit
        example = f'8e10 or "{EXAMPLE_QUANTITIES[unit]}"' if unit else "8"
        value = self._number(
            key, lambda value: 0 < value <= MAX_QUANTITY, f"a number above 0, such as {example},", unit
        )
        return value if any_size else self._with_unit(key, value, unit)

    def non_negative(self, key: str) -> float:
        """Read a number or a text such as "1.5 GB", or 0."""
        required = 'a number of at least 0, such as 1.5e9 or "1.5 GB",'
        return self._with_unit(
            key, self._number(key, lambda value: 0 <= value <= MAX_QUANTITY, required), unit_from_name(key)
        )

    def _with_unit(self, key: str, value: float, unit: str) -> float:
        if lacks_unit(self.table.get(key), value, unit):
            self.add_problem(key, f'a unit, such as "{EXAMPLE_QUANTITIES[unit]}",')
        return value

    def fraction(self, key: str) -> float:
        """Read a fraction of a peak; 1 if it is missing."""
        return (
            self._number(key, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
            if key in self.table
            else 1.0
        )

    def number_between(self, key: str, low: float, high: float, meaning: str) -> float:
        """Read a number without a unit between two others; `meaning` names it in problems."""
        return self._number(key, lambda value: low <= value <= high, f"{meaning}, of {low:g} to {high:g},", "")

    def latency(self, key: str, *, optional: bool = True) -> float:
        """Read seconds; 0 if they are missing and `optional`."""
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
        """Read a whole number of at least 1."""
        return (self.sizes(key, (self.table[key],)) if key in self.table else self.sizes(key))[0]

    def sizes(self, key: str, raw: Any = None) -> tuple[int, ...]:
        """Read a list of whole numbers of at least 1."""
        is_single = raw is not None
        raw = raw if is_single else self.table.get(key)
        if not isinstance(raw, (list, tuple)) or not raw or not all(_is_size(size) for size in raw):
            self.add_problem(
                key, f"{'a whole number' if is_single else 'a list of whole numbers'} of 1 to {MAX_DEVICES:,}"
            )
            return (1,)
        return tuple(raw)

    def text(self, key: str, default: str | None = None) -> str:
        """Read a text that is not empty."""
        value = self.table.get(key, default)
        if not isinstance(value, str) or (not value and value is not default):
            self.add_problem(key, "a text")
            return ""
        return value

    def flag(self, key: str) -> bool:
        """Read true or false; False if it is missing."""
        value = self.table.get(key, False)
        if not isinstance(value, bool):
            self.add_problem(key, "true or false")
        return value is True

    def text_table(self, key: str) -> dict[str, str]:
        """Read a table of texts; empty if it is missing."""
        value = self.table.get(key, {})
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
            self.add_problem(key, "a table of texts")
            return {}
        return dict(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_DEVICES


MAX_QUANTITY = 1e21  # of any quantity of one chip; a thousand times an exaflop
MAX_DEVICES = 10**7
