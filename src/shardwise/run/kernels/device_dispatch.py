"""Dispatch by a tensor's device, counts on the host, and the dtype of sums."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on a device for which PyTorch has its fused GPU kernels.

    >>> import torch
    >>> on_gpu(torch.zeros(1))
    False
    """
    return x.is_cuda


def on_host(counts: Tensor, even_total: int) -> list[int]:
    """Copy counts [n] to the host, which waits for them; for a tensor without data, return even shares of a total.

    >>> import torch
    >>> on_host(torch.tensor([1, 6]), 8), on_host(torch.empty(3, device="meta"), 8)
    ([1, 6], [2, 3, 3])
    """
    if not counts.is_meta:
        host_counts: list[int] = counts.tolist()
        return host_counts
    ends = [even_total * number // len(counts) for number in range(len(counts) + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics: float32, or float64 where the model is in it."""
    return torch.promote_types(dtype, torch.float32)
