"""Functions of scalars that Triton lacks, for use inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

SMALL_TANH = tl.constexpr(0.1)  # below it the series is exact to float32: its next term is 62/2835 x^9 = 2e-11


@triton.jit
def tanh(x):
    """Return tanh x of float32 values: a series near zero, where 1 - exp(-2|x|) cancels."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    share = tl.exp(-2.0 * tl.abs(x))
    ratio = (1.0 - share) / (1.0 + share)
    return tl.where(tl.abs(x) < SMALL_TANH, series, tl.where(x < 0, -ratio, ratio))
