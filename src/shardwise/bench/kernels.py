"""Products, streaming and attention on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional

from shardwise.bench.clock import Timing, timed
from shardwise.errors import InputError
from shardwise.names import unknown

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


def measure(line: Mapping[str, Any], device: str) -> Timing:
    """Time what a line describes. Raises `InputError` for a format that this verb cannot run."""
    dtype = line.get("dtype", "bf16")
    if dtype not in DTYPES:
        raise InputError(f"bench: --dtype: {unknown(dtype, DTYPES)}")
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    run = MAKERS[line["bench"]](line, device, DTYPES[dtype])
    return timed(run, device)


def _matmul(line: Mapping[str, Any], device: str, dtype: torch.dtype) -> Callable[[], object]:
    """[m, k] times [k, n], into an array that is there."""
    left = torch.randn(line["m"], line["k"], device=device).to(dtype)
    right = torch.randn(line["k"], line["n"], device=device).to(dtype)
    out = torch.empty(line["m"], line["n"], device=device, dtype=dtype)
    return lambda: torch.mm(left, right, out=out)


def _memory(line: Mapping[str, Any], device: str, dtype: torch.dtype) -> Callable[[], object]:
    """A copy: half of the bytes are read, half are written."""
    source = torch.zeros(line["bytes"] // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _attention(line: Mapping[str, Any], device: str, dtype: torch.dtype) -> Callable[[], object]:
    """Fused attention of PyTorch, forward or backward alone."""
    shape = (line["batch"], line["heads"], line["seq_len"], line["head_dim"])
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_(line["backward"]) for _ in range(3))

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=line["causal"])

    if not line["backward"]:
        return forward
    out = forward()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


MAKERS: Mapping[str, Callable[[Mapping[str, Any], str, torch.dtype], Callable[[], object]]] = {
    "matmul": _matmul,
    "memory": _memory,
    "attention": _attention,
}


def describe(device: str) -> str:
    """The device and the software, for whoever reads the lines later."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}"


def device_of(asked: str) -> str:
    """The device that is asked for, or the best there is. Raises `InputError` where there is none."""
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise InputError("bench: --device cuda, but PyTorch finds no GPU; --device cpu measures this host")
    return asked if asked != "auto" else ("cuda" if has_gpu else "cpu")


def num_gpus() -> int:
    return torch.cuda.device_count()
