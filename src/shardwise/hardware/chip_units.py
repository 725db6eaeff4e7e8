"""Compute units of a chip: how many, what each computes in a cycle, clocks, registers, on-chip memories, each with its source.

A chip's peak is units × FLOPs of a unit in a cycle × clock. `derive_peaks` compares that with the peak that the catalogue prints.
To add the units of a chip, add a table to `catalog/chip_units.toml`; a value without a source stays out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources

from shardwise.hardware.chips import Chip
from shardwise.hardware.toml_tables import TableReader, TomlTable
from shardwise.values import raise_problems
from shardwise.values.dtypes import BYTES_PER_ELEMENT

UNITS_FILE = resources.files("shardwise.hardware").joinpath("catalog", "chip_units.toml")
COUNT_KEYS = ("count", "matrix_units", "vector_lanes")
CLOCK_KEYS = ("matrix_clock_hz", "vector_clock_hz")
MEMORY_KEYS = ("registers_bytes", "scratchpad_bytes", "tensor_memory_bytes", "l2_bytes", "l3_bytes")
VECTOR_DTYPE = "fp32"  # of a chip's vector units, outside the units of matrices
# Largest difference of a derived and a printed peak that is rounding: data sheets print three digits or two ("2.5 PFLOP/s").
ROUNDING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipUnits:
    """Units of one chip by the vendor's word (`unit`: SM, CU, TensorCore), and what each has.

    `matrix_units` and `vector_lanes` (fp32) of one unit. `flops_per_cycle` of one unit in its matrix units, dense, by format,
    and `vector_flops_per_cycle` of one unit in fp32; a fused multiply-add counts as two. `matrix_clock_hz` and `vector_clock_hz`
    are the clocks of the printed peaks. `registers_bytes`, `scratchpad_bytes` (shared memory, LDS or VMEM) and
    `tensor_memory_bytes` of one unit; `l2_bytes` and `l3_bytes` of the chip. A value without a source is None.

    >>> units = load_chip_units("h100")
    >>> units.count, units.unit, units.total("vector_lanes")
    (132, 'SM', 16896)
    """

    unit: str
    count: int
    matrix_units: int | None = None
    vector_lanes: int | None = None
    flops_per_cycle: Mapping[str, float] = field(default_factory=dict)
    vector_flops_per_cycle: float | None = None
    matrix_clock_hz: float | None = None
    vector_clock_hz: float | None = None
    registers_bytes: float | None = None
    scratchpad_bytes: float | None = None
    tensor_memory_bytes: float | None = None
    l2_bytes: float | None = None
    l3_bytes: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def total(self, name: str) -> float | int | None:
        """Return the sum over all units of a value that one unit has, or None without a source."""
        value: float | int | None = getattr(self, name)
        return None if value is None else self.count * value


UNIT_KEYS = tuple(f.name for f in fields(ChipUnits))


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedPeak:
    """Peak of a number format from the units of a chip, in FLOP/s, and the `printed` one, or None where none is in the catalogue.

    `clock_hz` is the clock that the vendor states, or None; `implied_clock_hz` the one at which the units reach the printed peak.
    """

    dtype: str
    unit: str
    count: int
    flops_per_cycle: float
    clock_hz: float | None
    printed: float | None

    @property
    def flops_per_s(self) -> float | None:
        """Units × FLOPs of a unit in a cycle × clock; None without a clock."""
        return None if self.clock_hz is None else self.count * self.flops_per_cycle * self.clock_hz

    @property
    def implied_clock_hz(self) -> float | None:
        return None if self.printed is None else self.printed / (self.count * self.flops_per_cycle)

    @property
    def difference(self) -> float | None:
        """Printed peak over the derived one, less 1; None where either is missing."""
        derived = self.flops_per_s
        return None if derived is None or self.printed is None else self.printed / derived - 1.0

    @property
    def disagrees(self) -> bool:
        """Return True if the printed peak differs by more than rounding."""
        return self.difference is not None and abs(self.difference) > ROUNDING


@lru_cache(maxsize=1)
def _load_unit_tables() -> Mapping[str, TomlTable]:
    tables = tomllib.loads(UNITS_FILE.read_text(encoding="utf-8"))
    sources = tables.pop("sources")
    return {
        name: {**table, "sources": {key: sources[source] for key, source in table["sources"].items()}}
        for name, table in tables.items()
    }


def load_chip_units(chip: str) -> ChipUnits | None:
    """Return the units of a chip of the catalogue, or None where none have a source.

    >>> load_chip_units("tpu-v5p").matrix_units, load_chip_units("h800")
    (4, None)
    """
    table = _load_unit_tables().get(chip)
    return None if table is None else read_chip_units(table, f"units of {chip}")


def read_chip_units(table: TomlTable, where: str) -> ChipUnits:
    """Return the units of a table. Raises `InputError` with all problems."""
    reader = TableReader(where, table, UNIT_KEYS)
    values: dict[str, int | float] = {key: reader.size(key) for key in COUNT_KEYS if key in table or key == "count"}
    values |= {key: reader.quantity(key) for key in (*CLOCK_KEYS, *MEMORY_KEYS) if key in table}
    if "vector_flops_per_cycle" in table:
        values["vector_flops_per_cycle"] = reader.quantity("vector_flops_per_cycle", "")
    flops = TableReader(
        f"{where}: flops_per_cycle", table.get("flops_per_cycle", {}), tuple(BYTES_PER_ELEMENT), reader.problems
    )
    flops_per_cycle = {dtype: flops.quantity(dtype, "") for dtype in flops.table if dtype in BYTES_PER_ELEMENT}
    unit, sources = reader.text("unit"), reader.text_table("sources")
    raise_problems(reader.problems)
    return ChipUnits(unit=unit, flops_per_cycle=flops_per_cycle, sources=sources, **values)  # type: ignore[arg-type]


def derive_peaks(chip: Chip, units: ChipUnits) -> Iterator[DerivedPeak]:
    """Yield the peak of each number format that the units say, then that of the vector units, each beside the printed one.

    >>> from shardwise.hardware.chips import load_chip
    >>> peaks = {peak.dtype: peak for peak in derive_peaks(load_chip("tpu-v3"), load_chip_units("tpu-v3"))}
    >>> f"{peaks['bf16'].flops_per_s / 1e12:.1f} TFLOP/s derived", peaks["bf16"].disagrees
    ('123.2 TFLOP/s derived', True)
    """
    for dtype, flops in units.flops_per_cycle.items():
        yield DerivedPeak(
            dtype=dtype, unit=units.unit, count=units.count, flops_per_cycle=flops, clock_hz=units.matrix_clock_hz,
            printed=chip.peak_flops_per_s.get(dtype),
        )  # fmt: skip
    if units.vector_flops_per_cycle is not None:
        yield DerivedPeak(
            dtype=VECTOR_DTYPE, unit=units.unit, count=units.count, flops_per_cycle=units.vector_flops_per_cycle,
            clock_hz=units.vector_clock_hz, printed=chip.peak_flops_per_s.get(VECTOR_DTYPE),
        )  # fmt: skip


def flops_per_usd(chip: Chip) -> Mapping[str, float]:
    """Return the FLOPs that a dollar buys at each printed peak, by number format; empty without a price.

    >>> from shardwise.hardware.chips import load_chip
    >>> f"{flops_per_usd(load_chip('h100'))['bf16']:.3g}"
    '7.24e+17'
    """
    if chip.price_usd_per_hour is None:
        return {}
    seconds_per_usd = 3600.0 / chip.price_usd_per_hour
    return {dtype: peak * seconds_per_usd for dtype, peak in chip.peak_flops_per_s.items()}
