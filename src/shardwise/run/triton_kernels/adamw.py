"""AdamW over flat arrays in one pass: clipping, both moments, decay, the master weight, and its copy in 16 bits.

With the gradient g times the factor c of clipping, at step t (Loshchilov and Hutter 2019, algorithm 2; the decay is
apart from the moments): m' = b1 m + (1 - b1) c g; v' = b2 v + (1 - b2) (c g)²; w' = w - lr (m' / (1 - b1^t) /
(sqrt(v' / (1 - b2^t)) + epsilon) + decay w). Computed in float32; moments may be stored in 16 bits, and the weight's
update reads them before they are rounded.

The factor, and whether the step is allowed, are two numbers on the device (`control`), so that the host does not wait
for the norm. Bytes of N elements: each of g, w, m and v read once, w, m and v written once, and the copy: 28 N with
gradients and copy in bf16 and the rest in float32, where separate kernels for conversion, clipping, update and copy
move 48 N. FLOPs: about 14 N. Reference: `run.kernels.optimizers.FormulaOptimizer` of `model.optimizers.adamw`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 1024, 4  # 8 elements a thread: whole 16 bytes of 16-bit elements


class AdamWSettings(NamedTuple):
    """Hyperparameters of a step; `correction` and `square_correction` are 1 - b1^t and 1 - b2^t."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    correction: float
    square_correction: float


@triton.jit
def adamw_kernel(
    weight, gradient, average, squares, copy, control, size, learning_rate, beta1, beta2, rest1, rest2, epsilon,
    weight_decay, correction, square_correction, HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of elements, if the second number of `control` is 1; it is 0 otherwise."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    factor, allowed = tl.load(control), tl.load(control + 1)
    stored = index < size * allowed.to(tl.int64)  # none where it is 0
    g = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32) * factor
    m = beta1 * tl.load(average + index, mask=inside, other=0.0).to(tl.float32) + rest1 * g
    v = beta2 * tl.load(squares + index, mask=inside, other=0.0).to(tl.float32) + rest2 * (g * g)
    w = tl.load(weight + index, mask=inside, other=0.0).to(tl.float32)
    direction = (m / correction) / (tl.sqrt(v / square_correction) + epsilon)
    w -= learning_rate * (direction + weight_decay * w)
    tl.store(average + index, m.to(average.dtype.element_ty), mask=stored)
    tl.store(squares + index, v.to(squares.dtype.element_ty), mask=stored)
    tl.store(weight + index, w.to(weight.dtype.element_ty), mask=stored)
    if HAS_COPY:
        tl.store(copy + index, w.to(copy.dtype.element_ty), mask=stored)


def update(
    weight: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], copy: Tensor | None, control: Tensor,
    settings: AdamWSettings,
) -> None:  # fmt: skip
    """Update contiguous tensors [n] in place. `control` [2]: the factor of the gradient, and 0 for no update; `copy` [n]
    takes the new weight in its dtype."""
    size = weight.numel()
    if size:
        adamw_kernel[(triton.cdiv(size, BLOCK),)](
            weight, gradient, *moments, weight if copy is None else copy, control, size, settings.learning_rate,
            settings.beta1, settings.beta2, 1.0 - settings.beta1, 1.0 - settings.beta2, settings.epsilon,
            settings.weight_decay, settings.correction, settings.square_correction, HAS_COPY=copy is not None,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
