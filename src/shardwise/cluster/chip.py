"""One accelerator: its compute, memory and links, each value with its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from shardwise.errors import MissingValueError, require

MOST = 1e21  # of any quantity of one chip; a thousand times an exaflop
OPTIONAL = (
    "power_w", "host_shape", "pcie_bytes_per_s", "dcn_bytes_per_s_per_host", "vmem_bytes", "vmem_bytes_per_s",
    "matrix_unit", "price_usd_per_hour", "price_date", "fp8_matmul_fraction",
)  # fmt: skip


PLATFORMS: Mapping[str, str] = {"NVIDIA": "GPU", "AMD": "GPU", "Google": "TPU"}  # what accelerators of a vendor are
HALF = ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Dense peaks, memory and their sustained fractions, all of one chip unless the name says "per_host".

    `peak_flops_per_s`: FLOP/s without the factor 2 of sparsity, by number format; `memory_bytes`: capacity in bytes ("16 GiB" is
    binary, "80 GB" decimal; sources print GB for both); `memory_bytes_per_s`: its bandwidth, decimal.
    `matmul_fraction` and `memory_fraction` are the shares of the peaks that micro-benchmarks reach; 1.0 where the catalogue has
    no measurement, and the estimate is then a lower bound. `fp8_matmul_fraction` is that of fp8, where it was measured.
    `runtime_bytes` is memory that tensors cannot use. `host_shape`: chips on one host, along the axes of a torus;
    `pcie_bytes_per_s`: one chip to its host, one direction; `dcn_bytes_per_s_per_host`: a host to other hosts over the
    data-centre network, all its cards in one direction; `vmem_bytes`: on-chip memory that software manages, `vmem_bytes_per_s`:
    from it to the matrix unit; `matrix_unit`: side of the systolic array; `price_usd_per_hour` was read on `price_date`. A
    value without a source is None, and `known` raises for it. `base`: the catalogue's chip that the values start from, itself
    for a chip of the catalogue. `sources` has the source of each value. Raises `InputError` for impossible numbers.

    >>> from shardwise.cluster.chips import load_chip
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
    base: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(list(self._problems()))

    def _problems(self) -> Iterator[str]:
        """Numbers that are impossible for a chip."""
        chip = f"chip {self.name}"
        if not self.peak_flops_per_s:
            yield f"{chip}: peak_flops_per_s is empty; the dense peak of one number format or more is required"
        quantities = {f"peak_flops_per_s.{dtype}": peak for dtype, peak in self.peak_flops_per_s.items()}
        quantities |= {f.name: getattr(self, f.name) for f in fields(self) if _is_quantity(f.name)}
        for name, value in quantities.items():
            low = value is not None and (value < 0 if name == "runtime_bytes" else value <= 0)
            if value is not None and (low or not value <= MOST):
                yield f"{chip}: {name} is {value:g}; a positive number of at most {MOST:g} is required"
        for name in ("matmul_fraction", "fp8_matmul_fraction", "memory_fraction"):
            part = getattr(self, name)
            if part is not None and not 0 < part <= 1:
                yield f"{chip}: {name} is {part:g}; a part of the peak, above 0 and at most 1, is required"
        if self.host_shape is not None and not (
            isinstance(self.host_shape, tuple) and self.host_shape and min(self.host_shape) >= 1
        ):
            yield f"{chip}: host_shape is {self.host_shape}; numbers of chips of at least 1 are required, such as 4, 2"

    @property
    def platform(self) -> str | None:
        """ "GPU" or "TPU"; None for a host, whose catalogue entry has no peak of a 16-bit format, and for an unknown vendor."""
        return PLATFORMS.get(self.vendor) if not self.peak_flops_per_s.keys().isdisjoint(HALF) else None

    @property
    def catalogued(self) -> str:
        """The name of the chip's entry in the catalogue, under which its measurements are found."""
        return self.base or self.name

    @property
    def devices_per_host(self) -> int | None:
        """Chips of one host; None without a source."""
        return math.prod(self.host_shape) if self.host_shape else None

    def known(self, name: str) -> float | int | str | tuple[int, ...]:
        """An optional value by name. Raises `MissingValueError` that names it where it has no source."""
        value: float | int | str | tuple[int, ...] | None = getattr(self, name)
        if value is None:
            raise MissingValueError(f"chip {self.name}: no sourced {name}")
        return value

    def peak(self, dtype: str) -> float:
        """Dense peak of a number format, in FLOP/s. Raises `MissingValueError` where the catalogue has none."""
        try:
            return self.peak_flops_per_s[dtype]
        except KeyError:
            known = ", ".join(self.peak_flops_per_s)
            fix = "; choose --precision fp32, or for a kernel --dtype fp32" if "fp32" in self.peak_flops_per_s else ""
            raise MissingValueError(f"chip {self.name}: no sourced {dtype} peak; it has {known}{fix}") from None

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Rate that matrix products sustain, in FLOP/s. Raises `MissingValueError` without a sourced peak of the format."""
        own = self.fp8_matmul_fraction if dtype == "fp8" else None
        return self.peak(dtype) * (self.matmul_fraction if own is None else own)

    def sustained_bytes_per_s(self) -> float:
        """Bandwidth that memory sustains, in bytes/s."""
        return self.memory_bytes_per_s * self.memory_fraction


def _is_quantity(name: str) -> bool:
    return name.endswith(("_bytes", "_bytes_per_s", "_per_host", "_w", "_unit", "_per_hour"))
