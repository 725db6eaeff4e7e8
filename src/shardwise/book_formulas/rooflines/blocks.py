"""Every operation of a model's block on one chip: its compute, its memory traffic, and which of them binds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwise.book_formulas.rules import critical_intensity
from shardwise.hardware import Chip
from shardwise.layout import Layout, atomic_degrees, layout_degrees, make_sharding_scheme
from shardwise.model import DEFAULT_OPTIMIZER, Architecture
from shardwise.price.roofline import chip_rates
from shardwise.price.unit_cost import UnitPricer
from shardwise.price.unit_values import unit_values
from shardwise.step import Kernel
from shardwise.values import get_precision

PHASES = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """One kernel of a block. FLOPs are of matrix products and attention: elementwise ones have none and memory binds them."""

    phase: str
    name: str
    num_operations: int
    flops: float
    moved_bytes: float
    math_s: float
    memory_s: float

    @property
    def intensity(self) -> float:
        return self.flops / self.moved_bytes

    @property
    def seconds(self) -> float:
        """Seconds with compute and traffic overlapped."""
        return max(self.math_s, self.memory_s)

    @property
    def bound(self) -> str:
        return "compute" if self.math_s >= self.memory_s else "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRoofline:
    """The kernels of one transformer block on one chip, forward and backward, in order; without recomputation.

    `flops_per_s` and `bytes_per_s` are the vendor's dense peak and bandwidth; a kernel takes the longer of compute and traffic.
    `links` are the bytes/s of the chip's links, which no kernel of a block uses.

    >>> import shardwise as sw
    >>> block = sw.roofline("llama-3-8b", "h100", T=8192)
    >>> round(block.critical_intensity), block.total_s("backward") > block.total_s("forward")
    (295, True)
    """

    architecture: Architecture
    chip: Chip
    links: Mapping[str, float] = field(default_factory=dict)
    num_seqs: int
    seq_len: int
    dtype: str
    flops_per_s: float
    bytes_per_s: float
    operations: tuple[OperationTime, ...]

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.architecture.name

    @property
    def phases(self) -> tuple[str, ...]:
        """Passes of the block, in order."""
        return tuple(dict.fromkeys(operation.phase for operation in self.operations))

    @property
    def critical_intensity(self) -> float:
        """FLOPs per byte from which a kernel is bound by compute."""
        return critical_intensity(self.flops_per_s, self.bytes_per_s)

    def total_s(self, phase: str, bound: str | None = None) -> float:
        """Return the seconds of a phase ("forward" or "backward"), kernel after kernel; with `bound`, only of kernels bound by
        that."""
        kernels = (kernel for kernel in self.operations if kernel.phase == phase and bound in (None, kernel.bound))
        return sum(kernel.seconds for kernel in kernels)

    def total_flops(self, phase: str) -> float:
        """Return the FLOPs of matrix products and attention of a phase."""
        return sum(operation.flops for operation in self.operations if operation.phase == phase)


def block_roofline(
    architecture: Architecture, chip: Chip, num_seqs: int, seq_len: int, layout: Layout | None = None,
    links: Mapping[str, float] | None = None,
) -> BlockRoofline:  # fmt: skip
    """Return the roofline of a block with `num_seqs` sequences in bf16: the kernels of its derived program on one device.

    `layout` shards it (None: nothing is sharded); nothing is recomputed. Attention is causal and flash; for a model with
    windows on some layers it is the mean of its layers. Neighbouring elementwise operations are one kernel. Peak and bandwidth
    are the vendor's."""
    sharded = replace(layout or Layout(), micro_batch_seqs=num_seqs, recompute="none", recompute_layers=None)
    degrees = atomic_degrees(architecture, layout_degrees(sharded))
    pricer = UnitPricer(chip_rates(chip, None), get_precision("bf16"))
    values = unit_values(architecture, seq_len, degrees, sharded.cp_variant)
    dtype = pricer.precision.activations
    peak = chip.peak(dtype)

    def operation_time(kernel: Kernel) -> OperationTime:
        flops, moved_bytes = float(kernel.flops.evaluate(values)), float(pricer.kernel_bytes(kernel, parts, values))
        return OperationTime(
            phase=kernel.phase, name=_name(kernel), num_operations=len(kernel.outputs) if kernel.kind == "map" else 1,
            flops=flops, moved_bytes=moved_bytes, math_s=flops / peak, memory_s=moved_bytes / chip.memory_bytes_per_s,
        )  # fmt: skip

    scheme = make_sharding_scheme(
        sharded, architecture.structure, optimizer=DEFAULT_OPTIMIZER, shares_amax=pricer.precision.shares_amax
    )
    parts = pricer.parts(scheme, "block")
    operations = [operation_time(kernel) for kernel in parts.kernels if kernel.phase in PHASES]
    return BlockRoofline(
        architecture=architecture, chip=chip, links=links or {}, num_seqs=num_seqs, seq_len=seq_len, dtype=dtype,
        flops_per_s=peak, bytes_per_s=chip.memory_bytes_per_s, operations=tuple(operations),
    )  # fmt: skip


def _name(kernel: Kernel) -> str:
    """Name a product by its operands, attention by its results, anything else by its last result."""
    if kernel.kind == "contract":
        return " · ".join(_plain(kernel.inputs))
    return ", ".join(_plain(kernel.outputs if kernel.kind == "scan" else kernel.outputs[-1:]))


def _plain(names: tuple[str, ...]) -> Iterator[str]:
    """Names without the number that tells apart the gradients from several uses."""
    return (name.partition("#")[0] for name in names)
