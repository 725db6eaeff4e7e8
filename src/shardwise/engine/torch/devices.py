"""Which kernels a tensor's device has."""

from __future__ import annotations

from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is where PyTorch has its fused kernels for GPUs.

    >>> import torch
    >>> on_gpu(torch.zeros(1))
    False
    """
    return x.is_cuda
