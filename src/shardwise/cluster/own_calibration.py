"""What was measured on a cluster of one's own: the `[calibration]` table of its file, read and written (docs/calibrating.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from shardwise.cluster.calibration import APART, CONSTANTS, HIGHEST_CLOCK, LOWEST_CLOCK, SPREAD_OF, Calibration
from shardwise.cluster.chip import Chip
from shardwise.cluster.chips import clock_under, load_chip
from shardwise.cluster.reader import TableReader
from shardwise.cluster.stacks import calibration_of, stack_named, stack_names
from shardwise.errors import InputError

KEYS = tuple(field.name for field in fields(Calibration))


def read_calibration(reader: TableReader, chip: Chip | None, base: str | None) -> Calibration | None:
    """The calibration of a file; None where something is wrong with it, which the reader then knows.

    `base`: the catalogue's chip that the file's starts from. What is left out is as published runs say about that chip under
    the stack, and the clock as the chip's power limit says.
    """
    given = reader.table["calibration"]
    if not isinstance(given, Mapping):
        reader.wrong("calibration", "a table with a stack and constants")
        return None
    before, where = len(reader.problems), f"{reader.where}: calibration"
    table = TableReader(where, given, KEYS, reader.problems)
    constants = _constants(table)
    spread = _spread(table)
    clock = (
        table.within("clock", LOWEST_CLOCK, HIGHEST_CLOCK, "a part of the usual clock") if "clock" in given else None
    )
    flags = {name: table.flag(name) for name in ("fused_attention", "synchronises") if name in given}
    source, notes = table.text("source", reader.where), table.texts("spread_notes")
    shipped = _shipped(table, chip, base)
    if len(reader.problems) > before or shipped is None or chip is None:
        return None
    return Calibration(
        stack=shipped.stack, constants={**shipped.constants, **constants}, spread={**shipped.spread, **spread},
        spread_notes=notes, clock=usual_clock(chip, base) if clock is None else clock, source=source,
        **{"fused_attention": shipped.fused_attention, "synchronises": shipped.synchronises, **flags},
    )  # fmt: skip


def usual_clock(chip: Chip, base: str | None) -> float:
    """The clock of a chip over that of the catalogue's that it starts from."""
    return clock_under(chip, load_chip(base)) if base is not None else 1.0


def _shipped(table: TableReader, chip: Chip | None, base: str | None) -> Calibration | None:
    """What published runs say about the chip under the stack that the table names."""
    try:
        return calibration_of(base or (chip.name if chip else ""), stack_named(table.table.get("stack", "")))
    except (InputError, TypeError):  # no such name, or no text
        table.wrong("stack", f"one of {', '.join(stack_names())}")
        return None


def _constants(table: TableReader) -> dict[str, float]:
    given = table.table.get("constants", {})
    if not isinstance(given, Mapping):
        table.wrong("constants", f"a table of {', '.join(CONSTANTS)}")
        return {}
    known = {**CONSTANTS, **APART}
    inner = TableReader(f"{table.where}.constants", given, tuple(known), table.problems)
    return {
        name: inner.within(name, known[name].low, known[name].high, known[name].meaning)
        for name in given
        if name in known
    }


def _spread(table: TableReader) -> dict[str, tuple[float, float]]:
    given = table.table.get("spread", {})
    if not isinstance(given, Mapping):
        table.wrong("spread", f"a table of {', '.join(SPREAD_OF)}")
        return {}
    inner = TableReader(f"{table.where}.spread", given, SPREAD_OF, table.problems)
    found = {}
    for kind in (kind for kind in given if kind in SPREAD_OF):
        pair = given[kind]
        if (
            isinstance(pair, list)
            and len(pair) == 2
            and all(_is_number(one) for one in pair)
            and 0 < pair[0] <= 1 <= pair[1]
        ):
            found[kind] = (float(pair[0]), float(pair[1]))
        else:
            inner.wrong(kind, "two factors around 1, such as [0.9, 1.15],")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e6


def calibration_entries(calibration: Calibration) -> Iterator[tuple[str, Any]]:
    """The keys and values of the table, the constants last."""
    last = ("spread", "spread_notes", "constants")
    for name in (*(key for key in KEYS if key not in last), *last):
        value = getattr(calibration, name)
        if name != "spread_notes" or value:
            yield name, {key: list(pair) for key, pair in value.items()} if name == "spread" else value
