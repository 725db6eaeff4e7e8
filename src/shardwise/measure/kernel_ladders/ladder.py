"""A ladder of kernels as a value: what each rung computes with, moves and teaches. PyTorch and Triton are loaded when a rung
runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from shardwise.run.triton_kernels.traffic import SECTOR_BYTES

ITEM_BYTES = 2  # of bf16 or fp16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to compute a ladder's function.

    `run` takes the ladder's operands and returns its results. `loaded_bytes` and `stored_bytes` are what its kernels ask of
    memory, before caches; `num_launches` how many kernels it launches. `lesson`: what the rung changes against the one before.
    `num_rows`: how many of the ladder's rows it computes, the first ones; None: all. `loaded_sectors`: the sectors of 32 bytes
    that the loads of its warps touch, a lane for each element; None where it is not counted. `executed_flops`: what its lanes go
    through, those of lanes that are masked off too; None: the ladder's FLOPs.
    """

    name: str
    lesson: str
    run: Callable[..., Any]
    loaded_bytes: float
    stored_bytes: float
    num_launches: int = 1
    uses_triton: bool = True
    num_rows: int | None = None
    loaded_sectors: int | None = None
    executed_flops: float | None = None

    @property
    def sector_use(self) -> float | None:
        """Share of the bytes in loaded sectors that its lanes asked for."""
        return self.loaded_bytes / (self.loaded_sectors * SECTOR_BYTES) if self.loaded_sectors else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """Cost of a ladder whose rungs compute more and more rows: `fixed_bytes` move whatever the number of rows, and the rest
    of its FLOPs and bytes is that of `num_rows`."""

    num_rows: int
    fixed_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """A function computed in several ways.

    `make_operands(device)` returns its tensors; `reference` computes the results in float64 from them. `flops` are those of its
    formula, the same for all rungs; `product_flops` says that tensor cores have them. `least_bytes`: operands read and results
    written once. `row_cost`: its rungs compute parts of its rows. `benchmark`: the line of `calibrate --bench` that the fastest
    of its rungs measures, without seconds.
    """

    name: str
    title: str
    sizes: str
    rungs: Sequence[Rung]
    make_operands: Callable[[str], tuple[Any, ...]]
    reference: Callable[..., Any]
    flops: float
    least_bytes: float
    product_flops: bool = False
    row_cost: RowCost | None = None
    benchmark: Mapping[str, Any] | None = None

    def work(self, rung: Rung) -> tuple[float, float]:
        """Return the FLOPs of a rung, and the bytes that each way of computing its rows moves."""
        if self.row_cost is None or rung.num_rows is None:
            return self.flops, self.least_bytes
        share = rung.num_rows / self.row_cost.num_rows
        fixed = self.row_cost.fixed_bytes
        return self.flops * share, fixed + (self.least_bytes - fixed) * share

    def knee_rows(self, flops_per_s: float, bytes_per_s: float) -> float | None:
        """Return the rows at which computing takes as long as memory; None where rungs compute the same, or memory always
        takes longer."""
        if self.row_cost is None:
            return None
        row_flops_s = self.flops / self.row_cost.num_rows / flops_per_s
        row_bytes_s = (self.least_bytes - self.row_cost.fixed_bytes) / self.row_cost.num_rows / bytes_per_s
        excess_s = row_flops_s - row_bytes_s
        return self.row_cost.fixed_bytes / bytes_per_s / excess_s if excess_s > 0 else None


def triton_call(module: str, function: str, *parameters: Any) -> Callable[..., Any]:
    """Return a launcher of a Triton module, which is loaded at the first call."""

    def run(*operands: Any) -> Any:
        return getattr(import_module(f"shardwise.measure.kernel_ladders.{module}"), function)(*operands, *parameters)

    return run


def normal_operands(*shapes: tuple[int, ...], scale: float = 1.0) -> Callable[[str], tuple[Any, ...]]:
    """Return a function that makes normal operands of these shapes in bf16 on a GPU, in fp16 elsewhere: Triton's interpreter
    multiplies no bf16."""

    def make(device: str) -> tuple[Any, ...]:
        import torch

        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        generator = torch.Generator().manual_seed(0)
        return tuple((scale * torch.randn(shape, generator=generator)).to(device, dtype) for shape in shapes)

    return make
