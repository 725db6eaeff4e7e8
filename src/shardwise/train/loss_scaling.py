"""Dynamic loss scaling: gradients of a larger loss do not underflow in fp16, and a step whose gradients overflow is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.train.recipe import Recipe

LEAST = 1.0  # below it gradients are smaller than those of the loss itself: no scale is what is missing


class LossScaler:
    """The factor of the loss, the same on all ranks, for they see the same norm of all gradients.

    It falls with each step whose gradients are not finite, which is left out, and rises after so many in a row that were.
    Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2; PyTorch, torch.amp.GradScaler, for the default values.
    Differs: where GradScaler looks at each gradient, this looks at their norm, which is not finite if any of them is not.

    >>> scaler = LossScaler(Recipe(steps=8, loss_scale=4.0, loss_scale_interval=2))
    >>> [scaler.seen(is_finite=one) or scaler.scale for one in (False, True, True, True)]
    [2.0, 2.0, 4.0, 4.0]
    >>> scaler.num_skipped
    1
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.scale = recipe, recipe.loss_scale
        self.num_clean = 0  # steps since the scale was another one
        self.num_skipped = 0

    def seen(self, *, is_finite: bool) -> None:
        """A step's gradients have been reduced. Raises `InputError` where no scale makes them finite."""
        if is_finite:
            self.num_clean += 1
            if self.num_clean == self.recipe.loss_scale_interval:
                self.scale, self.num_clean = self.scale * self.recipe.loss_scale_growth, 0
            return
        self.scale, self.num_clean, self.num_skipped = (
            self.scale * self.recipe.loss_scale_backoff,
            0,
            self.num_skipped + 1,
        )
        if self.scale < LEAST:
            last = self.scale / self.recipe.loss_scale_backoff
            raise InputError(
                f"loss scaling: found gradients that are not finite at a scale of {last:g}; "
                "finite ones are required: a lower --learning-rate or a longer --warmup, from the last checkpoint with --resume"
            )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "num_clean": self.num_clean, "num_skipped": self.num_skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.scale = float(state["scale"])
        self.num_clean, self.num_skipped = int(state["num_clean"]), int(state["num_skipped"])
