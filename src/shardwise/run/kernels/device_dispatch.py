"""Dispatch by a tensor's device, counts on the host, and the dtype of sums."""

from __future__ import annotations

import importlib.util
import itertools
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on a device for which PyTorch has its fused GPU kernels.

    >>> import torch
    >>> on_gpu(torch.zeros(1))
    False
    """
    return x.is_cuda


Capability = tuple[int, int]  # CUDA's compute capability, such as (9, 0) of an H100
# Compute capabilities of devices other than CUDA's, by type: tests add the CPU, to run what a GPU would.
EMULATED_CAPABILITIES: dict[str, Capability] = {}


def device_capability(device: torch.device) -> Capability | None:
    """Return the compute capability of a device; None: it is no GPU of NVIDIA.

    >>> device_capability(torch.device("cpu")) is None
    True
    """
    if device.type != "cuda":
        return EMULATED_CAPABILITIES.get(device.type)
    return _cuda_capability(device.index or 0) if torch.version.cuda else None


@cache
def _cuda_capability(index: int) -> Capability:
    return torch.cuda.get_device_capability(index)


# Devices whose tensors Triton's kernels take; tests add the CPU, where Triton's interpreter runs them.
TRITON_DEVICES = {"cuda"}
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_triton(*operands: Tensor, any_strides: bool = False) -> bool:
    """Return whether Triton's kernels take these operands: on a GPU, of at most 32 bits, with Triton installed; contiguous
    but for kernels that take `any_strides`.

    >>> import torch
    >>> has_triton(torch.zeros(1))
    False
    """
    if operands[0].device.type not in TRITON_DEVICES or not is_triton_installed():
        return False
    return all(operand.dtype in TRITON_DTYPES and (any_strides or operand.is_contiguous()) for operand in operands)


def kernel_library(device: str) -> str:
    """Return the library of the fused kernels on a device such as "cuda:0": "triton" with its version, or "pytorch".

    >>> kernel_library("cpu")
    'pytorch'
    """
    has_kernels = device.partition(":")[0] in TRITON_DEVICES and is_triton_installed()
    return f"triton {version('triton')}" if has_kernels else "pytorch"


@cache
def is_triton_installed() -> bool:
    """Return whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


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
