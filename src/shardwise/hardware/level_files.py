"""`[[levels]]` of a cluster's file: switches, ports and cables of each level, from the inside out (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from shardwise.hardware.network.switch_levels import SwitchLevel, level_problems
from shardwise.hardware.toml_tables import TableReader

LEVEL_KEYS = tuple(field.name for field in fields(SwitchLevel))
CABLE_COUNTS = ("links_per_device", "links_per_unit")


def read_levels(reader: TableReader) -> tuple[SwitchLevel, ...]:
    """Return the levels of a file, from the inside out; empty if any is wrong, and the reader then has the problems."""
    raw = reader.table["levels"]
    if not isinstance(raw, list) or not raw or not all(isinstance(level, Mapping) for level in raw):
        reader.add_problem(
            "levels",
            'a list of tables such as { name = "leaf", size = 32, num_switches = 8, radix = 64, port_bytes_per_s = "50 GB/s", '
            "links_per_device = 1 }",
        )
        return ()
    num_problems = len(reader.problems)
    levels = tuple(_read_level(reader, number, table) for number, table in enumerate(raw))
    if len(reader.problems) == num_problems:
        reader.problems += [f"{reader.where}: {problem}" for problem in level_problems(levels)]
    return levels if len(reader.problems) == num_problems else ()


def _read_level(reader: TableReader, number: int, table: Mapping[str, Any]) -> SwitchLevel:
    level = TableReader(f"{reader.where}: levels[{number}]", table, LEVEL_KEYS, reader.problems)
    cables: dict[str, Any] = {key: level.size(key) for key in CABLE_COUNTS if key in table}
    if "oversubscription" in table:
        cables["oversubscription"] = level.quantity("oversubscription", "")
    return SwitchLevel(
        name=level.text("name"), size=level.size("size"), num_switches=level.size("num_switches"), radix=level.size("radix"),
        port_bytes_per_s=level.quantity("port_bytes_per_s"), reduces=level.flag("reduces"), fraction=level.fraction("fraction"),
        hop_latency_s=level.latency("hop_latency_s"), base_latency_s=level.latency("base_latency_s"), **cables,
    )  # fmt: skip


def level_entries(level: SwitchLevel) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a level that differ from what is taken for a key that is left out."""
    for field in fields(level):
        value = getattr(level, field.name)
        if field.default is MISSING or value != field.default:
            yield field.name, value
