"""Chips by name, from the catalogue's tables; adding a chip touches one data file (docs/extending.md)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from shardwise.cluster.calibration import LOWEST_CLOCK
from shardwise.cluster.chip import OPTIONAL, Chip
from shardwise.cluster.reader import Entry, TableReader, shown
from shardwise.dtypes import BYTES_PER_ELEMENT
from shardwise.errors import InputError, require
from shardwise.names import did_you_mean

CATALOGUE: Traversable = resources.files("shardwise.cluster").joinpath("catalog")
LOCAL = "local"
LOCAL_IS = "local:N is a cluster of N processes that share the catalogue's generic host"
CHIP_KEYS = tuple(f.name for f in fields(Chip) if f.name not in ("name", "base"))


@lru_cache(maxsize=1)
def _chips() -> Mapping[str, Entry]:
    """Every chip's table, with the names of its sources replaced by the sources."""
    entries: dict[str, Entry] = {}
    for file in sorted(CATALOGUE.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
            known = tables.pop("sources")
            for name, table in tables.items():
                entries[name] = {**table, "sources": {field: known[key] for field, key in table["sources"].items()}}
    return entries


def chip_names() -> tuple[str, ...]:
    """Names of the chips in the catalogue."""
    return tuple(_chips())


def catalogue_entry(name: str) -> Entry:
    """A chip's table in the catalogue. Raises `InputError` that lists the names."""
    if name == LOCAL:
        raise InputError(f"chip: found {name!r}; {LOCAL_IS}, whose values are those of the chip 'cpu'")
    if name not in _chips():
        raise InputError(
            f"chip: found {name!r}{did_you_mean(name, chip_names())}; the catalogue has {', '.join(chip_names())}"
        )
    return _chips()[name]


@cache
def load_chip(name: str) -> Chip:
    """A chip of the catalogue by name: dense peaks in FLOP/s, memory in bytes, bandwidths in bytes/s.

    The source of each value is in `sources`. Raises `InputError` that lists the names of the catalogue.

    >>> chip = load_chip("h100")
    >>> f"{chip.peak('bf16') / 1e12:.0f} TFLOP/s, {chip.memory_bytes / 1e9:.0f} GB at {chip.memory_bytes_per_s / 1e12:.2f} TB/s"
    '989 TFLOP/s, 80 GB at 3.35 TB/s'
    """
    entry = catalogue_entry(name)
    chip = read_chip(name, {key: entry[key] for key in entry if key not in ("torus", "tiers")}, f"chip {name}")
    return replace(chip, base=name)


def usual_clock(chip: Chip) -> float:
    """The sustained clock of a chip over that of the catalogue's chip that it starts from."""
    return clock_under(chip, load_chip(chip.base)) if chip.base is not None else 1.0


def clock_under(chip: Chip, usual: Chip) -> float:
    """Sustained clock under a power limit over that of the usual chip; 1 without a limit, or where a power is not known.

    The clock goes with the third root of the power (power is about frequency times voltage squared, and both move together):
    0.89 at 500 of 700 W. Source: torchtitan's 500 W H100s sustain 0.86 of the 700 W part.
    """
    if not chip.power_w or not usual.power_w:
        return 1.0
    clock = float((chip.power_w / usual.power_w) ** (1 / 3))
    return min(max(clock, LOWEST_CLOCK), 1.0)


def read_chip(name: Any, table: Entry, where: str, base: Chip | None = None) -> Chip:
    """A chip from a table of its fields; fields that are left out are the base's. Raises `InputError` with all problems."""
    reader = TableReader(where, table, CHIP_KEYS)
    if not isinstance(name, str):
        reader.problems.append(f"{where}: name: found {shown(name)}; a text is required")
    readers: dict[str, Callable[[str], Any]] = {
        "host_shape": reader.sizes, "matrix_unit": reader.size, "price_date": reader.text,
        "matmul_fraction": reader.fraction, "fp8_matmul_fraction": reader.fraction, "memory_fraction": reader.fraction,
        "runtime_bytes": reader.at_least_0,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for key in ("memory_bytes", "memory_bytes_per_s", "runtime_bytes", *OPTIONAL, "matmul_fraction", "memory_fraction"):
        if key in table or (base is None and key in ("memory_bytes", "memory_bytes_per_s")):
            values[key] = readers.get(key, reader.quantity)(key)
    if base is None:
        values["vendor"] = reader.text("vendor", "")
    if "peak_flops_per_s" in table or base is None:
        peaks = _peaks(reader)
        values["peak_flops_per_s"] = {**base.peak_flops_per_s, **peaks} if base else peaks
    sources = {key: where.removesuffix(": chip") for key in values if key != "vendor"}
    sources |= reader.texts("sources")
    require(reader.problems)
    try:
        if base is None:
            return Chip(name=name, sources=sources, **values)
        return replace(base, name=name, sources={**base.sources, **sources}, **values)
    except InputError as error:
        raise InputError(*(f"{where}: {problem.partition(': ')[2]}" for problem in error.problems)) from None


def _peaks(reader: TableReader) -> dict[str, float]:
    given = reader.table.get("peak_flops_per_s")
    if not isinstance(given, Mapping):
        reader.wrong("peak_flops_per_s", 'dense peaks by number format, such as { bf16 = "989 TFLOP/s" }')
        return {}
    peaks = TableReader(f"{reader.where}: peak_flops_per_s", given, tuple(BYTES_PER_ELEMENT), reader.problems)
    return {dtype: peaks.quantity(dtype, "FLOP/s") for dtype in given if dtype in BYTES_PER_ELEMENT}
