"""JSON of rooflines of kernels and blocks, as `shardwise roofline --json` prints it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from shardwise.book_formulas.rooflines.blocks import BlockRoofline
from shardwise.book_formulas.rooflines.kernels import KernelComparison, KernelRoofline
from shardwise.book_formulas.rules import TransferStage
from shardwise.model import ModelFacts
from shardwise.values import Flat, Key, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRecord(Payload):
    """The kernel padded to the side of the matrix unit; `efficiency` is the useful share of its FLOPs."""

    matrix_unit: int
    efficiency: float
    flops: float
    math_s: float
    time_s: float
    no_overlap_s: float

    @classmethod
    def of(cls, roofline: KernelRoofline) -> PaddingRecord | None:
        """Return the record of a padded kernel; None if the matrix unit's side has no source."""
        efficiency, bounds = roofline.padding_efficiency, roofline.padded_bounds
        if efficiency is None or bounds is None:
            return None
        padded = roofline.cost.flops / efficiency
        return cls.from_attributes(
            roofline, efficiency=efficiency, flops=padded, math_s=padded / roofline.flops_per_s, time_s=bounds.lower_s,
            no_overlap_s=bounds.upper_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipLinkRecord(Payload):
    """Links of the chip, and how many FLOPs each byte over them must go with."""

    bytes_per_s: float
    critical_intensity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord(Payload):
    """A kernel on one chip. `critical_size` is null if no size is enough, `memory_s` is that of the slowest transfer."""

    SCHEMA = "shardwise.roofline/2"
    kernel: str
    label: str
    sizes: Mapping[str, float]
    shapes: str
    chip: str
    dtype: str
    weights: str
    origin: Annotated[str, Key("from")]
    options: Sequence[str]
    peak_flops_per_s: float
    memory_bytes_per_s: float
    flops: float
    read_bytes: float
    written_bytes: float
    moved_bytes: float
    intensity: float
    critical_intensity: float
    math_s: float
    memory_s: float
    time_s: float
    no_overlap_s: float
    bound: str
    attainable_flops_per_s: float
    stages: Sequence[TransferStage]
    critical_letters: Sequence[str]
    critical_size: float | None
    padding: PaddingRecord | None
    links: Mapping[str, ChipLinkRecord]

    @classmethod
    def of(cls, roofline: KernelRoofline, comparison: KernelComparison) -> KernelRecord:
        """Return the record of a kernel of a comparison."""
        flops_per_s, critical = roofline.flops_per_s, roofline.critical_size
        return cls.from_attributes(
            roofline, roofline.cost, kernel=roofline.form.name, chip=comparison.chip.name, origin=comparison.origin,
            peak_flops_per_s=flops_per_s, memory_bytes_per_s=roofline.bytes_per_s, time_s=roofline.bounds.lower_s,
            no_overlap_s=roofline.bounds.upper_s,
            stages=roofline.staging.stages,
            critical_size=critical if math.isfinite(critical) else None, padding=PaddingRecord.of(roofline),
            links={
                name: ChipLinkRecord(bytes_per_s=rate, critical_intensity=flops_per_s / rate)
                for name, rate in comparison.links.items()
            },
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsRecord(Payload):
    """Kernels on one chip: the first one, and the others under `with`."""

    SCHEMA = KernelRecord.SCHEMA
    first: Annotated[KernelRecord, Flat]
    compared: Annotated[Sequence[KernelRecord], Key("with")]

    @classmethod
    def of(cls, comparison: KernelComparison) -> KernelsRecord:
        """Return the record of compared kernels."""
        first, *compared = (KernelRecord.of(roofline, comparison) for roofline in comparison.rooflines)
        return cls(first=first, compared=compared)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord(Payload):
    """An operation of a block."""

    phase: str
    name: str
    num_operations: int
    flops: float
    moved_bytes: float
    intensity: float
    math_s: float
    memory_s: float
    time_s: float
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord(Payload):
    """A pass of a block, kernel after kernel."""

    flops: float
    time_s: float
    compute_bound_s: float
    memory_bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord(Payload):
    """Every operation of a model's block on one chip, in order; `sizes` are B sequences of T tokens."""

    SCHEMA = "shardwise.roofline-block/2"
    model: ModelFacts
    sizes: Mapping[str, int]
    chip: str
    dtype: str
    peak_flops_per_s: float
    memory_bytes_per_s: float
    critical_intensity: float
    operations: Sequence[OperationRecord]
    phases: Mapping[str, PhaseRecord]

    @classmethod
    def of(cls, roofline: BlockRoofline) -> BlockRecord:
        """Return the record of a block."""
        return cls.from_attributes(
            roofline, model=ModelFacts.of(roofline.architecture), sizes={"B": roofline.num_seqs, "T": roofline.seq_len},
            chip=roofline.chip.name, peak_flops_per_s=roofline.flops_per_s, memory_bytes_per_s=roofline.bytes_per_s,
            operations=[
                OperationRecord.from_attributes(operation, time_s=operation.seconds) for operation in roofline.operations
            ],
            phases={
                phase: PhaseRecord(
                    flops=roofline.total_flops(phase), time_s=roofline.total_s(phase),
                    compute_bound_s=roofline.total_s(phase, "compute"), memory_bound_s=roofline.total_s(phase, "memory"),
                )
                for phase in roofline.phases
            },
        )  # fmt: skip
