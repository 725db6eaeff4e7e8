"""Which kernels the device of a tensor has, what it tells the host, and the dtype in which sums are made."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is where PyTorch has its fused kernels for GPUs.

    >>> import torch
    >>> on_gpu(torch.zeros(1))
    False
    """
    return x.is_cuda


def on_host(counts: Tensor, even_total: int) -> list[int]:
    """The numbers [n] of a tensor on the host, which waits for them; of a tensor without data even shares of a total.

    >>> import torch
    >>> on_host(torch.tensor([1, 6]), 8), on_host(torch.empty(3, device="meta"), 8)
    ([1, 6], [2, 3, 3])
    """
    if not counts.is_meta:
        found: list[int] = counts.tolist()
        return found
    ends = [even_total * number // len(counts) for number in range(len(counts) + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The format of statistics: float32, or float64 where the model is in it."""
    return torch.promote_types(dtype, torch.float32)
