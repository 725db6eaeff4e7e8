"""A precision recipe in PyTorch's formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.engine.torch.narrow import Narrow, narrow_of
from shardwise.precision import Precision

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# FP8 at rest. E4M3 for gradients of weights and first moments: nanotron, src/nanotron/fp8/constants. Squares of gradients need
# the range of E5M2: in E4M3 those of gradients below a five-hundredth of the largest would be 0, by whose root an update divides.
AT_REST = {**DTYPES, "fp8": torch.float8_e4m3fn}
SQUARES_AT_REST = {**DTYPES, "fp8": torch.float8_e5m2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Formats of a run: `weights` as they rest, and as the model of `activations` uses them; `tiled`: what those that products
    take rest in instead, in tiles; their `gradients`, the copy that these are `accumulated` in (None: none), the one that they
    are `reduced` in, and the one that rests for the `update` (None: none); the `state` that the optimizer updates, its `moments`
    and those of squares. What is in FP8 has a scale for each parameter, and moments in fp16 beside such have one too."""

    weights: torch.dtype
    activations: torch.dtype
    gradients: torch.dtype
    accumulated: torch.dtype | None
    reduced: torch.dtype
    state: torch.dtype
    moments: torch.dtype
    squares: torch.dtype
    update: torch.dtype | None
    tiled: Narrow | None = None

    @property
    def has_master(self) -> bool:
        """The optimizer updates a copy of the weights."""
        return self.state != self.weights

    @property
    def scales_loss(self) -> bool:
        """Gradients are made or added up in fp16, in which those of the loss itself underflow."""
        return torch.float16 in (self.activations, self.held)

    @property
    def scales_moments(self) -> bool:
        """Moments have a scale for each parameter, beside those in FP8 also those in fp16. Source: FP8-LM (arXiv 2310.18313),
        section 2.2."""
        return 1 in (self.moments.itemsize, self.squares.itemsize)

    @property
    def held(self) -> torch.dtype:
        """The format in which gradients rest between micro-batches."""
        return self.accumulated or self.gradients


def formats_of(precision: Precision) -> Formats:
    """The formats of a recipe that runs (`planning.runnable`)."""
    accumulated, update = precision.accumulated_gradients, precision.update_gradients
    is_tiled = precision.weights not in DTYPES
    weights = precision.activations if is_tiled else precision.weights
    return Formats(
        weights=DTYPES[weights], activations=DTYPES[precision.activations], gradients=AT_REST[precision.gradients],
        accumulated=DTYPES[accumulated] if accumulated else None, reduced=AT_REST[precision.gradient_reduction],
        state=DTYPES[precision.master or weights], moments=AT_REST[precision.moments],
        squares=SQUARES_AT_REST[precision.second_moment or precision.moments], update=DTYPES[update] if update else None,
        tiled=narrow_of(precision) if is_tiled else None,
    )  # fmt: skip
