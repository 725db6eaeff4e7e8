"""Every value of a software stack, with its source: the values of its table, and the constants of its predictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.hardware import CONSTANTS, get_stack, load_chip
from shardwise.hardware.published_constants import constants_with_sources
from shardwise.values import SourcedValue

OWN = "hardware/catalog/stacks.toml"


class StackConstant(NamedTuple):
    """A constant of a stack or of a chip: its value, one standard deviation around it, its meaning, its source."""

    owner: str
    name: str
    value: float
    low: float
    high: float
    meaning: str
    source: str


def stack_constants(name: str, chip: str | None) -> Iterator[StackConstant]:
    """The four constants of a stack, and with a chip its eight."""
    known = constants_with_sources(load_chip(chip).name if chip else "", get_stack(name))
    for owner in ("stack", "chip") if chip else ("stack",):
        for constant, one in CONSTANTS.items():
            if one.owner == owner:
                value, deviation, source = known[constant]
                low, high = (float(one.from_unbounded(one.to_unbounded(value) + side * deviation)) for side in (-1, 1))
                yield StackConstant(owner, constant, value, low, high, one.meaning, source)


def stack_values(name: str, chip: str | None = None) -> list[SourcedValue]:
    """The stack of the table, what it supports, and its constants; each with its meaning and uncertainty."""
    stack = get_stack(name)
    facts = ("kind", "unfused_attention", "overlaps_tp", "casts")
    values: list[SourcedValue] = [(fact, getattr(stack, fact), OWN) for fact in facts]
    values.append(("precision", stack.precision, stack.precision_source or OWN))
    values += [
        (f"runs.{key}", value if isinstance(value, bool) else list(value), stack.abilities.source)
        for key, value in stack.abilities.items()
    ]
    for one in stack_constants(name, chip):
        about = f"{one.meaning}; {one.low:.3g} to {one.high:.3g} within a standard deviation; {one.source}"
        values.append((f"{one.owner}.{one.name}", one.value, about))
    return values
