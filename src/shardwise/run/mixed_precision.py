"""A precision recipe as PyTorch dtypes, and dynamic loss scaling for gradients that underflow in fp16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.run.kernels.matmul import ProductFormats, product_formats
from shardwise.run.recipe import TrainingRecipe
from shardwise.values import InputError, Precision

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Stored FP8 is E4M3 for weight gradients and first moments: nanotron, src/nanotron/fp8/constants. Squared gradients need
# the range of E5M2: in E4M3 those of gradients below a five-hundredth of the largest would be 0, by whose root an update
# divides.
STORED_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn}
STORED_SQUARE_DTYPES = {**DTYPES, "fp8": torch.float8_e5m2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDtypes:
    """The dtypes of a run.

    `weights` as they are stored, and `activations` as the model computes. `tiled`: the tiled format in which weights of
    products are stored instead. `gradients` as backward passes write them; `accumulated`: the copy that they are added
    up in (None: no copy); `reduced`: the dtype of their reduction; `update`: the copy that the update reads (None: no
    copy). `state`: the weights that the optimizer updates; `moments` and `squares`: its first and second moments. A
    tensor in FP8 has a scale for each parameter, and so have moments in fp16 beside such.
    """

    weights: torch.dtype
    activations: torch.dtype
    gradients: torch.dtype
    accumulated: torch.dtype | None
    reduced: torch.dtype
    state: torch.dtype
    moments: torch.dtype
    squares: torch.dtype
    update: torch.dtype | None
    tiled: ProductFormats | None = None

    @property
    def has_master(self) -> bool:
        """True if the optimizer updates a copy of the weights."""
        return self.state != self.weights

    @property
    def scales_loss(self) -> bool:
        """True if the loss is scaled: gradients are computed or accumulated in fp16, in which small ones underflow."""
        return torch.float16 in (self.activations, self.stored_gradients)

    @property
    def scales_moments(self) -> bool:
        """True if moments have a scale for each parameter: in FP8, and then also those in fp16. Source: FP8-LM (arXiv
        2310.18313), section 2.2."""
        return 1 in (self.moments.itemsize, self.squares.itemsize)

    @property
    def stored_gradients(self) -> torch.dtype:
        """The dtype in which gradients are stored between micro-batches."""
        return self.accumulated or self.gradients


def training_dtypes(precision: Precision) -> TrainingDtypes:
    """Return the dtypes of a precision recipe that the engine can run (`layout.rules.engine`)."""
    accumulated, update = precision.accumulated_gradients, precision.update_gradients
    is_tiled = precision.weights not in DTYPES
    weights = precision.activations if is_tiled else precision.weights
    return TrainingDtypes(
        weights=DTYPES[weights], activations=DTYPES[precision.activations], gradients=STORED_DTYPES[precision.gradients],
        accumulated=DTYPES[accumulated] if accumulated else None, reduced=STORED_DTYPES[precision.gradient_reduction],
        state=DTYPES[precision.master or weights], moments=STORED_DTYPES[precision.moments],
        squares=STORED_SQUARE_DTYPES[precision.second_moment or precision.moments], update=DTYPES[update] if update else None,
        tiled=product_formats(precision) if is_tiled else None,
    )  # fmt: skip


MIN_LOSS_SCALE = 1.0  # no lower: gradients that overflow unscaled have another cause than the scale


class LossScaler:
    """The factor of the loss, the same on all ranks, since all see the same gradient norm.

    It falls with each step whose gradients are not finite, which is skipped, and rises after `loss_scale_interval`
    finite steps in a row. Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2; PyTorch,
    torch.amp.GradScaler, for the default values. Differs: GradScaler checks each gradient; this checks their norm,
    which is not finite if any gradient is not.

    >>> scaler = LossScaler(TrainingRecipe(steps=8, loss_scale=4.0, loss_scale_interval=2))
    >>> [scaler.update(is_finite=is_finite) or scaler.scale for is_finite in (False, True, True, True)]
    [2.0, 2.0, 4.0, 4.0]
    >>> scaler.num_skipped
    1
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        self.recipe, self.scale = recipe, recipe.loss_scale
        self.num_clean = 0  # finite steps since the scale last changed
        self.num_skipped = 0

    def update(self, *, is_finite: bool) -> None:
        """Adjust the scale after the gradients of a step are reduced. Raises `InputError` when no scale makes them
        finite."""
        if is_finite:
            self.num_clean += 1
            if self.num_clean == self.recipe.loss_scale_interval:
                self.scale, self.num_clean = self.scale * self.recipe.loss_scale_growth, 0
            return
        self.scale *= self.recipe.loss_scale_backoff
        self.num_clean, self.num_skipped = 0, self.num_skipped + 1
        if self.scale < MIN_LOSS_SCALE:
            last = self.scale / self.recipe.loss_scale_backoff
            raise InputError(
                f"loss scaling: found gradients that are not finite at a scale of {last:g}; "
                "finite ones are required: a lower --learning-rate or a longer --warmup, from the last checkpoint with --resume"
            )

    def state(self) -> dict[str, float]:
        """Return the values that a checkpoint keeps."""
        return {"scale": self.scale, "num_clean": self.num_clean, "num_skipped": self.num_skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the values of a checkpoint."""
        self.scale = float(state["scale"])
        self.num_clean, self.num_skipped = int(state["num_clean"]), int(state["num_skipped"])
