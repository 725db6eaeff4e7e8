"""RMSNorm and LayerNorm of rows with the residual sum before them, forward and backward, each in one pass.

With x' = x + r where there is a residual r, and the statistics over a row of W elements:

- RMSNorm: y = x' s w with s = 1 / sqrt(mean of x'² + epsilon) (Zhang and Sennrich 2019).
- LayerNorm: y = (x' - m) s w with the mean m and s = 1 / sqrt(variance + epsilon) (Ba et al. 2016). The bias is added
  elsewhere.
- Backward, with n the normalised row and g = dy w: dx = s (g - n mean(g n)), for LayerNorm also minus s mean(g); dw =
  sum of dy n over the rows; where the sum x' goes on as the residual stream, its own gradient is added to dx.

A program has one row at a time; in the backward pass it walks several rows and keeps their part of dw in registers.
Bytes of N elements of b bytes: forward 2 N b, with a residual 4 N b (two reads, two writes, where a sum and a norm of
their own move 5 N b); backward 3 N b, with a residual's gradient 4 N b. FLOPs: about 4 N and 8 N. References:
`run.kernels.norms`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 8192  # elements of a row that one program keeps in registers without spilling, in the backward pass too
ELEMENTS_PER_THREAD, THREADS_PER_WARP, MAX_WARPS = 16, 32, 32
# Of the backward pass: half of the warps that a multiprocessor holds hide the latency of loads, and the parts of dw are few.
WARPS_PER_MULTIPROCESSOR, MIN_PROGRAMS_PER_MULTIPROCESSOR = 32, 2


@triton.jit
def normalise_row(
    x, residual, weight, total, mean, inverse, row, width, epsilon,
    IS_LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the norm of a row in float32, after adding the residual to it, and write the sum and the statistics."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    offsets = row * width + columns
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        values = values.to(total.dtype.element_ty)  # the norm reads what the residual stream keeps
        tl.store(total + offsets, values, mask=inside)
        values = values.to(tl.float32)
    if IS_LAYER:
        average = tl.sum(values) / width
        tl.store(mean + row, average)
        values = tl.where(inside, values - average, 0.0)
    factor = tl.rsqrt(tl.sum(values * values) / width + epsilon)
    tl.store(inverse + row, factor)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    return values * factor * scale


@triton.jit
def norm_forward_kernel(
    x, residual, weight, total, out, mean, inverse, width, epsilon,
    IS_LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise a row, after adding the residual to it, and write the sum, the result and the statistics."""
    row = tl.program_id(0).to(tl.int64)
    result = normalise_row(
        x, residual, weight, total, mean, inverse, row, width, epsilon, IS_LAYER, HAS_RESIDUAL, BLOCK
    )
    columns = tl.arange(0, BLOCK)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def norm_backward_kernel(
    dy, x, weight, mean, inverse, dtotal, dx, dweight_parts, num_rows, width,
    IS_LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NEEDS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of some rows, and their part of the weight's gradient."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * width + columns
        gradient = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(inverse + row)
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        if IS_LAYER:
            values = tl.where(inside, values - tl.load(mean + row), 0.0)
        normalised = values * factor
        if NEEDS_WEIGHT:
            dweight += gradient * normalised
        gradient *= scale
        result = gradient - normalised * (tl.sum(gradient * normalised) / width)
        if IS_LAYER:
            result -= tl.sum(gradient) / width
        result *= factor
        if HAS_RESIDUAL:
            result += tl.load(dtotal + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offsets, result.to(dx.dtype.element_ty), mask=inside)
    if NEEDS_WEIGHT:
        tl.store(dweight_parts + tl.cast(program, tl.int64) * width + columns, dweight, mask=inside)


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, *, is_layer: bool, into: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x + residual (x itself without one), its norm, and the mean and inverse deviation of each row [rows, 1].

    The last dims of contiguous x are those of the weight. The mean is empty for RMSNorm. The sum is written to `into`,
    which may be an operand.
    """
    width = weight.numel()
    num_rows = x.numel() // width
    total = x if residual is None else torch.empty_like(x) if into is None else into
    out, inverse = torch.empty_like(x), x.new_empty((num_rows, 1), dtype=torch.float32)
    mean = torch.empty_like(inverse) if is_layer else inverse.new_empty(0)
    if num_rows:
        norm_forward_kernel[(num_rows,)](
            x, x if residual is None else residual, weight, total, out, mean, inverse, width, epsilon, IS_LAYER=is_layer,
            HAS_RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(width), num_warps=num_warps_of(width),
        )  # fmt: skip
    return total, out, mean, inverse


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, Tensor],
    dtotal: Tensor | None,
    *,
    is_layer: bool,
    needs_weight: bool,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x (with `dtotal` added) and of the weight.

    `statistics` are mean and inverse deviation of each row; RMSNorm reads no mean. The gradient of x is written
    to `into`, which may be `dtotal` or `dy`.
    """
    (mean, inverse), width, dx = statistics, weight.numel(), torch.empty_like(x) if into is None else into
    num_rows, num_programs = x.numel() // width, _num_programs(x, weight)
    parts = inverse.new_empty((num_programs if needs_weight else 0, width))
    if num_rows:
        norm_backward_kernel[(num_programs,)](
            dy, x, weight, mean, inverse, dy if dtotal is None else dtotal, dx, parts, num_rows, width,
            IS_LAYER=is_layer, HAS_RESIDUAL=dtotal is not None, NEEDS_WEIGHT=needs_weight,
            BLOCK=triton.next_power_of_2(width), num_warps=num_warps_of(width),
        )  # fmt: skip
    return dx, parts.sum(dim=0).to(weight.dtype).view(weight.shape) if needs_weight else None


def num_warps_of(width: int) -> int:
    return min(max(int(triton.next_power_of_2(width)) // (ELEMENTS_PER_THREAD * THREADS_PER_WARP), 1), MAX_WARPS)


def _num_programs(x: Tensor, weight: Tensor) -> int:
    """Return how many programs share the rows of a backward pass."""
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    by_warps = WARPS_PER_MULTIPROCESSOR // num_warps_of(weight.numel())
    return min(x.numel() // weight.numel(), max(by_warps, MIN_PROGRAMS_PER_MULTIPROCESSOR) * multiprocessors)
