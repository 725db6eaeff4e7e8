"""JSON of rooflines of kernels and blocks, as `shardwise roofline --json` prints it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.book_formulas.rooflines.blocks import BlockRoofline
from shardwise.book_formulas.rooflines.kernels import KernelComparison, KernelRoofline
from shardwise.hardware import Chip
from shardwise.model import ModelFacts

SCHEMA = "shardwise.roofline/2"
BLOCK_SCHEMA = "shardwise.roofline-block/2"


class StagePayload(TypedDict):
    """One of the transfers, or the arithmetic: an amount of bytes or FLOPs at a rate."""

    name: str
    amount: float
    rate: float
    seconds: float


class PaddingPayload(TypedDict):
    """The kernel padded to the side of the matrix unit; `efficiency` is the useful share of its FLOPs."""

    matrix_unit: int
    efficiency: float
    flops: float
    math_s: float
    time_s: float
    no_overlap_s: float


class LinkPayload(TypedDict):
    """Links of the chip, and how many FLOPs each byte over them must go with."""

    bytes_per_s: float
    critical_intensity: float


# `from` is a word of Python, so the keys are a table.
KernelKeys = TypedDict(
    "KernelKeys",
    {
        "schema": Literal["shardwise.roofline/2"], "kernel": str, "label": str, "sizes": dict[str, float], "shapes": str,
        "chip": str, "dtype": str, "weights": str, "from": str, "options": list[str], "peak_flops_per_s": float,
        "memory_bytes_per_s": float, "flops": float, "read_bytes": float, "written_bytes": float, "moved_bytes": float,
        "intensity": float, "critical_intensity": float, "math_s": float, "memory_s": float, "time_s": float,
        "no_overlap_s": float, "bound": str, "attainable_flops_per_s": float, "stages": list[StagePayload],
        "critical_letters": list[str], "critical_size": float | None, "padding": PaddingPayload | None,
        "links": dict[str, LinkPayload],
    },
)  # fmt: skip
ComparedKernels = TypedDict("ComparedKernels", {"with": list[KernelKeys]})


class KernelsPayload(KernelKeys, ComparedKernels):
    """A kernel on one chip, with others beside it under `with`."""


class OperationPayload(TypedDict):
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


class PhasePayload(TypedDict):
    """A pass of a block, kernel after kernel."""

    flops: float
    time_s: float
    compute_bound_s: float
    memory_bound_s: float


class BlockPayload(TypedDict):
    """Every operation of a model's block on one chip, in order; `sizes` are B sequences of T tokens."""

    schema: Literal["shardwise.roofline-block/2"]
    model: ModelFacts
    sizes: dict[str, int]
    chip: str
    dtype: str
    peak_flops_per_s: float
    memory_bytes_per_s: float
    critical_intensity: float
    operations: list[OperationPayload]
    phases: dict[str, PhasePayload]


def kernels_payload(comparison: KernelComparison) -> dict[str, Any]:
    """Return the first kernel's payload, with those of the others under `with`."""
    first, *compared = (
        kernel_payload(roofline, comparison.chip, comparison.origin, comparison.links)
        for roofline in comparison.rooflines
    )
    return {**first, "with": compared}


def kernel_payload(roofline: KernelRoofline, chip: Chip, origin: str, links: Mapping[str, float]) -> dict[str, Any]:
    """Return the payload of a kernel in bytes, FLOPs and seconds; `critical_size` is null if no size is enough.

    `memory_s` is that of the slowest transfer; `padding` is null if the matrix unit's side has no source."""
    cost, bounds, critical = roofline.cost, roofline.bounds, roofline.critical_size
    return {
        "schema": SCHEMA, "kernel": roofline.form.name, "label": roofline.label, "sizes": roofline.sizes,
        "shapes": roofline.shapes, "chip": chip.name, "dtype": roofline.dtype, "weights": roofline.weights, "from": origin,
        "options": list(roofline.options),
        "peak_flops_per_s": roofline.flops_per_s, "memory_bytes_per_s": roofline.bytes_per_s,
        "flops": cost.flops, "read_bytes": cost.read_bytes, "written_bytes": cost.written_bytes,
        "moved_bytes": cost.moved_bytes, "intensity": cost.intensity, "critical_intensity": roofline.critical_intensity,
        "math_s": roofline.math_s, "memory_s": roofline.memory_s,
        "time_s": bounds.lower_s, "no_overlap_s": bounds.upper_s,
        "bound": roofline.bound, "attainable_flops_per_s": roofline.attainable_flops_per_s,
        "stages": [
            {"name": stage.name, "amount": stage.amount, "rate": stage.rate, "seconds": stage.seconds}
            for stage in roofline.staging.stages
        ],
        "critical_letters": list(roofline.critical_letters),
        "critical_size": critical if math.isfinite(critical) else None,
        "padding": _padding_payload(roofline),
        "links": {
            name: {"bytes_per_s": rate, "critical_intensity": roofline.flops_per_s / rate} for name, rate in links.items()
        },
    }  # fmt: skip


def _padding_payload(roofline: KernelRoofline) -> dict[str, Any] | None:
    efficiency, bounds = roofline.padding_efficiency, roofline.padded_bounds
    if efficiency is None or bounds is None:
        return None
    padded = roofline.cost.flops / efficiency
    return {
        "matrix_unit": roofline.matrix_unit, "efficiency": efficiency, "flops": padded, "math_s": padded / roofline.flops_per_s,
        "time_s": bounds.lower_s, "no_overlap_s": bounds.upper_s,
    }  # fmt: skip


def block_payload(roofline: BlockRoofline) -> dict[str, Any]:
    """Return the payload of a block: every operation in order, and seconds and FLOPs of the phases."""
    return {
        "schema": BLOCK_SCHEMA, "model": ModelFacts.of(roofline.architecture),
        "sizes": {"B": roofline.num_seqs, "T": roofline.seq_len},
        "chip": roofline.chip.name, "dtype": roofline.dtype, "peak_flops_per_s": roofline.flops_per_s,
        "memory_bytes_per_s": roofline.bytes_per_s, "critical_intensity": roofline.critical_intensity,
        "operations": [
            {
                "phase": kernel.phase, "name": kernel.name, "num_operations": kernel.num_operations, "flops": kernel.flops,
                "moved_bytes": kernel.moved_bytes, "intensity": kernel.intensity, "math_s": kernel.math_s,
                "memory_s": kernel.memory_s, "time_s": kernel.seconds, "bound": kernel.bound,
            }
            for kernel in roofline.operations
        ],
        "phases": {
            phase: {
                "flops": roofline.total_flops(phase), "time_s": roofline.total_s(phase),
                "compute_bound_s": roofline.total_s(phase, "compute"), "memory_bound_s": roofline.total_s(phase, "memory"),
            }
            for phase in roofline.phases
        },
    }  # fmt: skip
