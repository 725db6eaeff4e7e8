"""Chips: compute, memory and links of one accelerator, each value with its source, and the catalogue's chips by name.

To add a chip, add a table to a data file, `catalog/chips/*.toml` (docs/extending.md).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from shardwise.hardware.calibration_constants import HIGHEST_CLOCK, LOWEST_CLOCK
from shardwise.hardware.toml_tables import MAX_QUANTITY, TableReader, TomlTable
from shardwise.values import InputError, MissingValueError, argument_label, did_you_mean, raise_problems, short_repr
from shardwise.values.dtypes import BYTES_PER_ELEMENT

OPTIONAL_FIELDS = (
    "power_w", "host_shape", "pcie_bytes_per_s", "dcn_bytes_per_s_per_host", "vmem_bytes", "vmem_bytes_per_s",
    "matrix_unit", "price_usd_per_hour", "price_date", "fp8_matmul_fraction", "attention_fraction", "usable_bytes",
)  # fmt: skip


PLATFORMS: Mapping[str, str] = {"NVIDIA": "GPU", "AMD": "GPU", "Google": "TPU"}  # kind of accelerator by vendor
HALF_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Dense peaks, memory and their sustained fractions, all of one chip unless the name says "per_host".

    `peak_flops_per_s`: FLOP/s without the factor 2 of sparsity, by number format; `memory_bytes`: capacity in bytes ("16 GiB" is
    binary, "80 GB" decimal; sources print GB for both); `memory_bytes_per_s`: its bandwidth, decimal.
    `matmul_fraction` and `memory_fraction` are the shares of the peaks that micro-benchmarks reach; 1.0 where the catalogue has
    no measurement, and the estimate is then a lower bound. `fp8_matmul_fraction` is that of fp8, where it was measured, and
    `attention_fraction` that of fused attention over the bf16 peak.
    `usable_bytes` is the memory that a program sees on the catalogue's chip (`capacity_bytes`), which is not the nominal one;
    of it `runtime_bytes` is what tensors cannot use. `host_shape`: chips on one host, along the axes of a torus;
    `pcie_bytes_per_s`: one chip to its host, one direction; `dcn_bytes_per_s_per_host`: a host to other hosts over the
    data-centre network, all its cards in one direction; `vmem_bytes`: on-chip memory that software manages, `vmem_bytes_per_s`:
    from it to the matrix unit; `matrix_unit`: side of the systolic array; `price_usd_per_hour` was read on `price_date`. A
    value without a source is None, and `require_value` raises for it. `base`: the catalogue's chip that the values start from,
    itself for a chip of the catalogue. `sources` has the source of each value. Raises `InputError` for impossible numbers.

    >>> from shardwise.hardware.chips import load_chip
    >>> chip = load_chip("tpu-v5e")
    >>> chip.peak("bf16"), chip.matrix_unit, chip.platform
    (197000000000000.0, 128, 'TPU')
    """

    name: str
    vendor: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    runtime_bytes: float = 0.0
    matmul_fraction: float = 1.0
    memory_fraction: float = 1.0
    power_w: float | None = None
    host_shape: tuple[int, ...] | None = None
    pcie_bytes_per_s: float | None = None
    dcn_bytes_per_s_per_host: float | None = None
    vmem_bytes: float | None = None
    vmem_bytes_per_s: float | None = None
    matrix_unit: int | None = None
    price_usd_per_hour: float | None = None
    price_date: str | None = None
    fp8_matmul_fraction: float | None = None
    attention_fraction: float | None = None
    usable_bytes: float | None = None
    base: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_problems(list(self._problems()))

    def _problems(self) -> Iterator[str]:
        chip = f"chip {self.name}"
        if not self.peak_flops_per_s:
            yield f"{chip}: peak_flops_per_s is empty; the dense peak of one number format or more is required"
        quantities = {f"peak_flops_per_s.{dtype}": peak for dtype, peak in self.peak_flops_per_s.items()}
        quantities |= {f.name: getattr(self, f.name) for f in fields(self) if _is_quantity(f.name)}
        for name, value in quantities.items():
            is_too_low = value is not None and (value < 0 if name == "runtime_bytes" else value <= 0)
            if value is not None and (is_too_low or not value <= MAX_QUANTITY):
                yield f"{chip}: {name} is {value:g}; a positive number of at most {MAX_QUANTITY:g} is required"
        for name in ("matmul_fraction", "fp8_matmul_fraction", "attention_fraction", "memory_fraction"):
            fraction = getattr(self, name)
            if fraction is not None and not 0 < fraction <= 1:
                yield f"{chip}: {name} is {fraction:g}; a part of the peak, above 0 and at most 1, is required"
        if self.host_shape is not None and not (
            isinstance(self.host_shape, tuple) and self.host_shape and min(self.host_shape) >= 1
        ):
            yield f"{chip}: host_shape is {self.host_shape}; numbers of chips of at least 1 are required, such as 4, 2"

    @property
    def platform(self) -> str | None:
        """ "GPU" or "TPU"; None for a host, whose catalogue entry has no peak of a 16-bit format, and for an unknown vendor."""
        return PLATFORMS.get(self.vendor) if not self.peak_flops_per_s.keys().isdisjoint(HALF_DTYPES) else None

    @property
    def capacity_bytes(self) -> float:
        """Bytes of memory that a program sees: `usable_bytes`, or the nominal memory without it.

        The catalogue's `usable_bytes` belong to the catalogue's memory: a chip whose `memory_bytes` were set to another value
        has these.
        """
        if self.usable_bytes is None:
            return self.memory_bytes
        nominal = load_chip(self.base) if self.base is not None else self
        is_other_memory = self.memory_bytes != nominal.memory_bytes and self.usable_bytes == nominal.usable_bytes
        return self.memory_bytes if is_other_memory else self.usable_bytes

    @property
    def catalog_name(self) -> str:
        """Name of the chip's entry in the catalogue, which its measurements are filed under."""
        return self.base or self.name

    @property
    def devices_per_host(self) -> int | None:
        """Chips of one host, or None without a source."""
        return math.prod(self.host_shape) if self.host_shape else None

    def require_value(self, name: str) -> float | int | str | tuple[int, ...]:
        """Return an optional value by name. Raises `MissingValueError` that names it if it has no source."""
        value: float | int | str | tuple[int, ...] | None = getattr(self, name)
        if value is None:
            raise MissingValueError(f"chip {self.name}: no sourced {name}")
        return value

    def peak(self, dtype: str) -> float:
        """Return the dense peak of a number format, in FLOP/s. Raises `MissingValueError` if the catalogue has none."""
        try:
            return self.peak_flops_per_s[dtype]
        except KeyError:
            dtypes = ", ".join(self.peak_flops_per_s)
            precision, kernel_dtype = argument_label("precision", "--precision"), argument_label("dtype", "--dtype")
            format_with_peak = next((name for name in ("fp16", "fp32") if name in self.peak_flops_per_s), None)
            if "bf16" in self.peak_flops_per_s and format_with_peak == "fp16":
                format_with_peak = "bf16"
            fix = (
                f"; choose {precision} {format_with_peak}, or for a kernel {kernel_dtype} {format_with_peak}"
                if format_with_peak
                else ""
            )
            raise MissingValueError(f"chip {self.name}: no sourced {dtype} peak; it has {dtypes}{fix}") from None

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Return the FLOP/s that matmuls sustain. Raises `MissingValueError` without a sourced peak of the format."""
        measured = self.fp8_matmul_fraction if dtype == "fp8" else None
        return self.peak(dtype) * (self.matmul_fraction if measured is None else measured)


def _is_quantity(name: str) -> bool:
    return name.endswith(("_bytes", "_bytes_per_s", "_per_host", "_w", "_unit", "_per_hour"))


# Architectures of GPUs, oldest first, with the catalogue's chips of each.
GPU_GENERATIONS: Mapping[str, tuple[str, ...]] = {
    "volta": ("v100",), "ampere": ("a100-40gb", "a100-80gb", "a100-80gb-pcie"), "hopper": ("h100", "h100-pcie", "h200", "h800"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
}  # fmt: skip

CHIP_CATALOG: Traversable = resources.files("shardwise.hardware").joinpath("catalog", "chips")
LOCAL = "local"
LOCAL_NOTE = "local:N is a cluster of N processes that share the catalogue's generic host"
CHIP_KEYS = tuple(f.name for f in fields(Chip) if f.name not in ("name", "base"))


@lru_cache(maxsize=1)
def _load_chip_tables() -> Mapping[str, TomlTable]:
    """Load every chip's table, with the names of its sources replaced by the sources."""
    entries: dict[str, TomlTable] = {}
    for file in sorted(CHIP_CATALOG.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
            sources = tables.pop("sources")
            for name, table in tables.items():
                entries[name] = {**table, "sources": {field: sources[key] for field, key in table["sources"].items()}}
    return entries


def chip_names() -> tuple[str, ...]:
    """Return the names of the chips in the catalogue."""
    return tuple(_load_chip_tables())


def chip_generation(name: str) -> str:
    """Return the architecture of a GPU of the catalogue, "tpu" for all TPUs, and the name of any other chip.

    >>> chip_generation("gb200"), chip_generation("tpu-v5p"), chip_generation("mi300x")
    ('blackwell', 'tpu', 'mi300x')
    """
    if name in chip_names() and load_chip(name).platform == "TPU":
        return "tpu"
    return next((generation for generation, chips in GPU_GENERATIONS.items() if name in chips), name)


def get_catalog_entry(name: str) -> TomlTable:
    """Return a chip's table in the catalogue. Raises `InputError` that lists the names."""
    if name == LOCAL:
        raise InputError(f"chip: found {name!r}; {LOCAL_NOTE}, whose values are those of the chip 'cpu'")
    if name not in _load_chip_tables():
        raise InputError(
            f"chip: found {name!r}{did_you_mean(name, chip_names())}; the catalogue has {', '.join(chip_names())}"
        )
    return _load_chip_tables()[name]


@cache
def load_chip(name: str) -> Chip:
    """Return a chip of the catalogue by name: dense peaks in FLOP/s, memory in bytes, bandwidths in bytes/s.

    The source of each value is in `sources`. Raises `InputError` that lists the names of the catalogue.

    >>> chip = load_chip("h100")
    >>> f"{chip.peak('bf16') / 1e12:.0f} TFLOP/s, {chip.memory_bytes / 1e9:.0f} GB at {chip.memory_bytes_per_s / 1e12:.2f} TB/s"
    '989 TFLOP/s, 80 GB at 3.35 TB/s'
    """
    entry = get_catalog_entry(name)
    chip = read_chip(name, {key: entry[key] for key in entry if key not in ("torus", "tiers")}, f"chip {name}")
    return replace(chip, base=name)


def relative_clock(chip: Chip) -> float:
    """Return the sustained clock of a chip over that of the catalogue's chip that it starts from."""
    return clock_at_power(chip, load_chip(chip.base)) if chip.base is not None else 1.0


def clock_at_power(chip: Chip, reference: Chip) -> float:
    """Return the sustained clock under a power limit over that of the reference chip; 1 if a power is unknown.

    The clock scales with the cube root of the power (power is about frequency times voltage squared, and both move together):
    0.89 at 500 of 700 W. Source: torchtitan's 500 W H100s sustain 0.86 of the 700 W part.
    """
    if not chip.power_w or not reference.power_w:
        return 1.0
    clock = float((chip.power_w / reference.power_w) ** (1 / 3))
    return min(max(clock, LOWEST_CLOCK), 1.0)


def clock_of_similar_chip(chip: Chip, reference: Chip) -> float:
    """Return the share of its peak that a chip sustains, over that of a similar reference chip; 1 if a power is unknown.

    A peak is printed for the boost clock, and what power allows of it follows the power per peak FLOP/s, by the cube root as in
    `clock_at_power`. Measured beside it: A100 on PCIe 0.93 of the SXM part, by the rule 0.91; H100 0.88 of an A100 (fitted), by
    the rule 0.82.

    >>> round(clock_of_similar_chip(load_chip("gb300"), load_chip("gb200")), 3)  # 1,400 W and 1,200 W for the same peak
    1.053
    """
    peak, reference_peak = _half_precision_peak(chip), _half_precision_peak(reference)
    if not (chip.power_w and reference.power_w and peak and reference_peak):
        return 1.0
    clock = ((chip.power_w / peak) / (reference.power_w / reference_peak)) ** (1 / 3)
    return float(min(max(clock, LOWEST_CLOCK), HIGHEST_CLOCK))


def _half_precision_peak(chip: Chip) -> float | None:
    return next((chip.peak_flops_per_s[name] for name in HALF_DTYPES if name in chip.peak_flops_per_s), None)


def read_chip(name: Any, table: TomlTable, where: str, base: Chip | None = None) -> Chip:
    """Return a chip from a table of its fields; missing fields are the base's. Raises `InputError` with all problems."""
    reader = TableReader(where, table, CHIP_KEYS)
    if not isinstance(name, str):
        reader.problems.append(f"{where}: name: found {short_repr(name)}; a text is required")
    readers: dict[str, Callable[[str], Any]] = {
        "host_shape": reader.sizes, "matrix_unit": reader.size, "price_date": reader.text,
        "matmul_fraction": reader.fraction, "fp8_matmul_fraction": reader.fraction, "attention_fraction": reader.fraction,
        "memory_fraction": reader.fraction,
        "runtime_bytes": reader.non_negative,
    }  # fmt: skip
    values: dict[str, Any] = {}
    required = ("memory_bytes", "memory_bytes_per_s")
    for key in (*required, "runtime_bytes", *OPTIONAL_FIELDS, "matmul_fraction", "memory_fraction"):
        if key in table or (base is None and key in required):
            values[key] = readers.get(key, reader.quantity)(key)
    if base is None:
        values["vendor"] = reader.text("vendor", "")
    if "peak_flops_per_s" in table or base is None:
        peaks = _read_peaks(reader)
        values["peak_flops_per_s"] = {**base.peak_flops_per_s, **peaks} if base else peaks
    sources = {key: where.removesuffix(": chip") for key in values if key != "vendor"}
    sources |= reader.text_table("sources")
    raise_problems(reader.problems)
    try:
        if base is None:
            return Chip(name=name, sources=sources, **values)
        return replace(base, name=name, sources={**base.sources, **sources}, **values)
    except InputError as error:
        raise InputError(*(f"{where}: {problem.partition(': ')[2]}" for problem in error.problems)) from None


def _read_peaks(reader: TableReader) -> dict[str, float]:
    raw = reader.table.get("peak_flops_per_s")
    if not isinstance(raw, Mapping):
        reader.add_problem("peak_flops_per_s", 'dense peaks by number format, such as { bf16 = "989 TFLOP/s" }')
        return {}
    peaks = TableReader(f"{reader.where}: peak_flops_per_s", raw, tuple(BYTES_PER_ELEMENT), reader.problems)
    return {dtype: peaks.quantity(dtype, "FLOP/s") for dtype in raw if dtype in BYTES_PER_ELEMENT}
