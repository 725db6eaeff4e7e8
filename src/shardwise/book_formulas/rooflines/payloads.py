"""Rooflines of kernels and blocks as plain data: what `shardwise roofline --json` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.book_formulas.rooflines.blocks import BlockRoofline
from shardwise.book_formulas.rooflines.kernels import KernelRoofline
from shardwise.hardware.chips import Chip
from shardwise.model.architecture import Architecture
from shardwise.model.payload import ModelPayload, model_payload

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
    model: ModelPayload
    sizes: dict[str, int]
    chip: str
    dtype: str
    peak_flops_per_s: float
    memory_bytes_per_s: float
    critical_intensity: float
    operations: list[OperationPayload]
    phases: dict[str, PhasePayload]


def kernels_payload(
    found: Sequence[KernelRoofline], chip: Chip, origin: str, links: Mapping[str, float]
) -> dict[str, Any]:
    """The first kernel's payload, with those of the others under `with`."""
    first, *others = (kernel_payload(kernel, chip, origin, links) for kernel in found)
    return {**first, "with": others}


def kernel_label(found: KernelRoofline) -> str:
    """The kernel with its sizes, and its weights' format where it is another one."""
    sizes = ", ".join(f"{letter} = {size:,.0f}" for letter, size in found.sizes.items())
    return f"{found.form.name} {sizes}" + (f", {found.weights} weights" if found.weights != found.dtype else "")


def kernel_payload(found: KernelRoofline, chip: Chip, origin: str, links: Mapping[str, float]) -> dict[str, Any]:
    """What the report says, in bytes, FLOPs and seconds; `critical_size` is null where no size is enough.

    `memory_s` is that of the slowest transfer; `padding` is null where the matrix unit's side has no source.
    """
    cost, bounds, critical = found.cost, found.bounds, found.critical_size
    return {
        "schema": SCHEMA, "kernel": found.form.name, "label": kernel_label(found), "sizes": found.sizes,
        "shapes": found.form.text.format(**{letter: f"{size:,.0f}" for letter, size in found.sizes.items()}),
        "chip": chip.name, "dtype": found.dtype, "weights": found.weights, "from": origin, "options": _options(found),
        "peak_flops_per_s": found.flops_per_s, "memory_bytes_per_s": found.bytes_per_s,
        "flops": cost.flops, "read_bytes": cost.read_bytes, "written_bytes": cost.written_bytes,
        "moved_bytes": cost.moved_bytes, "intensity": cost.intensity, "critical_intensity": found.critical_intensity,
        "math_s": cost.math_s(found.flops_per_s), "memory_s": cost.moved_bytes / found.bytes_per_s,
        "time_s": bounds.lower_s, "no_overlap_s": bounds.upper_s,
        "bound": found.bound, "attainable_flops_per_s": found.attainable_flops_per_s,
        "stages": [
            {"name": stage.name, "amount": stage.amount, "rate": stage.rate, "seconds": stage.seconds}
            for stage in found.staging.stages
        ],
        "critical_letters": list(found.critical_letters),
        "critical_size": critical if math.isfinite(critical) else None,
        "padding": _padding_payload(found),
        "links": {
            name: {"bytes_per_s": rate, "critical_intensity": found.flops_per_s / rate} for name, rate in links.items()
        },
    }  # fmt: skip


def _options(found: KernelRoofline) -> list[str]:
    if not found.form.attention:
        return []
    return ["causal" if found.causal else "full", "flash" if found.fused else "unfused"]


def _padding_payload(found: KernelRoofline) -> dict[str, Any] | None:
    efficiency, bounds = found.padding_efficiency, found.padded_bounds
    if efficiency is None or bounds is None:
        return None
    padded = found.cost.flops / efficiency
    return {
        "matrix_unit": found.matrix_unit, "efficiency": efficiency, "flops": padded, "math_s": padded / found.flops_per_s,
        "time_s": bounds.lower_s, "no_overlap_s": bounds.upper_s,
    }  # fmt: skip


def block_payload(found: BlockRoofline, model: Architecture, chip: Chip) -> dict[str, Any]:
    """Every operation of the block in order, and seconds and FLOPs of the phases."""
    return {
        "schema": BLOCK_SCHEMA, "model": model_payload(model), "sizes": {"B": found.num_seqs, "T": found.seq_len},
        "chip": chip.name, "dtype": found.dtype, "peak_flops_per_s": found.flops_per_s,
        "memory_bytes_per_s": found.bytes_per_s, "critical_intensity": found.critical_intensity,
        "operations": [
            {
                "phase": one.phase, "name": one.name, "num_operations": one.num_operations, "flops": one.flops,
                "moved_bytes": one.moved_bytes, "intensity": one.intensity, "math_s": one.math_s,
                "memory_s": one.memory_s, "time_s": one.seconds, "bound": one.bound,
            }
            for one in found.operations
        ],
        "phases": {
            phase: {
                "flops": found.total_flops(phase), "time_s": found.total_s(phase),
                "compute_bound_s": found.total_s(phase, "compute"), "memory_bound_s": found.total_s(phase, "memory"),
            }
            for phase in dict.fromkeys(one.phase for one in found.operations)
        },
    }  # fmt: skip
