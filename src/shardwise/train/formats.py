"""A precision recipe in PyTorch's formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.precision import Precision

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Formats of a run: `weights` that products take, their `gradients`, the copy that these are `accumulated` in (None: none),
    the one that they are `reduced` in, and the `state`: of the weights that the optimizer updates, and of its moments."""

    weights: torch.dtype
    gradients: torch.dtype
    accumulated: torch.dtype | None
    reduced: torch.dtype
    state: torch.dtype

    @property
    def has_master(self) -> bool:
        """The optimizer updates a copy of the weights."""
        return self.state != self.weights

    @property
    def held(self) -> torch.dtype:
        """The format in which gradients rest between micro-batches."""
        return self.accumulated or self.gradients


def formats_of(precision: Precision) -> Formats:
    """The formats of a recipe that runs (`planning.runnable`)."""
    accumulated = precision.accumulated_gradients
    return Formats(
        weights=DTYPES[precision.weights], gradients=DTYPES[precision.gradients],
        accumulated=DTYPES[accumulated] if accumulated else None, reduced=DTYPES[precision.gradient_reduction],
        state=DTYPES[precision.master or precision.weights],
    )  # fmt: skip
