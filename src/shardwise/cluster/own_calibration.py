"""Measurements of a user's own cluster: the `[calibration]` table of its file, read and written (docs/calibrating.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from shardwise.cluster.calibration import APART, CONSTANTS, HIGHEST_CLOCK, LOWEST_CLOCK, SPREAD_OF, Calibration
from shardwise.cluster.chip import Chip
from shardwise.cluster.chips import usual_clock
from shardwise.cluster.reader import TableReader
from shardwise.cluster.stacks import calibration_of, stack_named, stack_names
from shardwise.errors import InputError
from shardwise.loss import LOSSES

KEYS = tuple(field.name for field in fields(Calibration))


def read_calibration(reader: TableReader, chip: Chip | None) -> Calibration | None:
    """The calibration of a file; None where something is wrong with it, which the reader then knows.

    What is left out is as published runs say about the chip of the catalogue that the file's starts from under the stack, and
    the clock as the chip's power limit says.
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
    source, notes, loss = table.text("source", reader.where), table.texts("spread_notes"), _loss(table)
    shipped = _shipped(table, chip)
    if len(reader.problems) > before or shipped is None or chip is None:
        return None
    return Calibration(
        stack=shipped.stack, constants={**shipped.constants, **constants}, spread={**shipped.spread, **spread},
        spread_notes=notes, clock=usual_clock(chip) if clock is None else clock, source=source, loss=loss or shipped.loss,
        **{"fused_attention": shipped.fused_attention, "synchronises": shipped.synchronises, **flags},
    )  # fmt: skip


def _shipped(table: TableReader, chip: Chip | None) -> Calibration | None:
    """The calibration from published runs for the chip under the stack that the table names."""
    try:
        return calibration_of(chip.catalogued if chip else "", stack_named(table.table.get("stack", "")))
    except (InputError, TypeError):  # no such name, or not text
        table.wrong("stack", f"one of {', '.join(stack_names())}")
        return None


def _loss(table: TableReader) -> str | None:
    """The kind of cross-entropy that a table names."""
    named = table.table.get("loss")
    if named is not None and named not in LOSSES:
        table.wrong("loss", f"one of {', '.join(LOSSES)}")
        return None
    return named


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
    for name in (*(key for key in KEYS if key not in last and getattr(calibration, key) is not None), *last):
        value = getattr(calibration, name)
        if name != "spread_notes" or value:
            yield name, {key: list(pair) for key, pair in value.items()} if name == "spread" else value
