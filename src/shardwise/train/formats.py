"""A precision recipe in PyTorch's formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.errors import require
from shardwise.precision import PRECISIONS, Precision

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
    """The formats of a recipe. Raises `InputError` for one that the engine does not run, with those that it does."""
    problems = list(_problems(precision))
    if problems:
        runs = ", ".join(name for name, one in PRECISIONS.items() if not list(_problems(one)))
        require([f"precision {precision.name}: {problem}; one of {runs} runs" for problem in problems])
    accumulated = precision.accumulated_gradients
    return Formats(
        weights=DTYPES[precision.weights], gradients=DTYPES[precision.gradients],
        accumulated=DTYPES[accumulated] if accumulated else None, reduced=DTYPES[precision.gradient_reduction],
        state=DTYPES[precision.master or precision.weights],
    )  # fmt: skip


def _problems(precision: Precision) -> list[str]:
    """What a recipe has that does not run."""
    formats = (
        precision.weights, precision.gradients, precision.gradient_reduction, precision.master or precision.weights,
        precision.accumulated_gradients or precision.gradients, precision.activations,
    )  # fmt: skip
    found = [
        f"{name} is planned, and not yet runnable" for name in sorted({name for name in formats if name not in DTYPES})
    ]
    state = precision.master or precision.weights
    if precision.matmul:
        found.append(f"products in {precision.matmul} are planned, and not yet runnable")
    if precision.activations != precision.weights:
        found.append(
            f"weights in {precision.weights} under activations in {precision.activations} are not yet runnable"
        )
    if precision.moments != state or precision.second_moment not in (None, state):
        found.append(f"moments in another format than the {state} of what is updated are not yet runnable")
    if precision.update_gradients:
        found.append("a copy of the gradients that rests with the moments is not yet runnable")
    return found
