"""Fused kernels of attention, forward and backward, and the choice between those that a device has.

Letters: B, K, G, T, H as in `model/decoder.py`, S keys. Kernels by name take queries [B, K·G, T, H], keys and values
[B, K, S, H]; the log-sum-exp is natural, of scaled scores. `mask` is added to the scores, [T, S] or [B, 1, T, S].

On a GPU there are two kernels without a mask in 16 bits, PyTorch's flash attention and cuDNN's. Which is faster depends on
the GPU, the width of a head and the releases (Shah et al. 2024, FlashAttention-3, figures 5 and 6, have cuDNN's ahead of
FlashAttention-2 on Hopper; heads of 64 on an H200 ran flash attention's backward pass at 207 TFLOP/s, with PyTorch 2.11). So
both run once on random tensors of the shape at hand, forward and backward. cuDNN's is taken where its results agree with
flash attention's and it is faster by more than `LEAST_GAIN`; a kernel that raises or differs is never taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.run.kernels import device_dispatch

aten = torch.ops.aten
QkvGradients = tuple[Tensor, Tensor, Tensor]
# PyTorch's memory-efficient attention on a GPU pads log-sum-exps to a multiple of LSE_PADDING queries, and needs rows of the mask
# aligned to MASK_ALIGNMENT elements (attention.cu, pad_bias in attention.cpp).
LSE_PADDING, MASK_ALIGNMENT = 32, 16
MAX_FLASH_WIDTH, MAX_CUDNN_WIDTH = 256, 128  # elements of a head (sdp_utils.cpp)
CUDNN_CAPABILITY = (9, 0)  # Hopper; before it cuDNN's kernels are flash attention's
LEAST_GAIN = 0.05  # so that noise does not decide, and runs on equal machines choose alike
MAX_PROBED_TOKENS, PROBE_REPETITIONS = 4096, 3
# Largest difference of results in bf16, relative in the norm: two orders of summation differ by a few roundings of 2^-8.
AGREEMENT = 2e-2


class BackwardInputs(NamedTuple):
    """Tensors that a backward kernel reads: dy, queries and output [B, K·G, T, H], keys and values [B, K, S, H], and the
    log-sum-exp [B, K·G, T]. Output and log-sum-exp are those over all keys that a query sees, here or on other ranks."""

    dy: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor

    def block(self, rows: slice, keys: slice) -> BackwardInputs:
        """Return those of some queries and keys, as views."""
        dy, query, out, lse = (tensor[:, :, rows] for tensor in (self.dy, self.query, self.out, self.lse))
        return BackwardInputs(dy, query, self.key[:, :, keys], self.value[:, :, keys], out, lse)


class AttentionBackend(NamedTuple):
    """Kernels without a mask: forward (query, key, value, causal, scale) -> (output, log-sum-exp), and backward (inputs, causal,
    scale) -> gradients."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[BackwardInputs, bool, float], QkvGradients]


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    outputs: tuple[Any, ...] = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return outputs[0], outputs[1]


def _flash_backward(inputs: BackwardInputs, causal: bool, scale: float) -> QkvGradients:
    dy, query, key, value, out, lse = inputs
    lengths, unused = (query.shape[2], key.shape[2]), _dropout_seed(query)
    gradients: QkvGradients = aten._scaled_dot_product_flash_attention_backward(
        dy, query, key, value, out, lse.contiguous(), None, None, *lengths, 0.0, causal, unused, unused, scale=scale
    )
    return gradients


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    outputs: tuple[Any, ...] = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    out, lse = outputs[:2]
    return out, lse.squeeze(-1) if lse.dim() == query.dim() else lse  # [B, K·G, T, 1] in most releases


def _cudnn_backward(inputs: BackwardInputs, causal: bool, scale: float) -> QkvGradients:
    dy, query, key, value, out, lse = inputs
    lengths, unused = (query.shape[2], key.shape[2]), _dropout_seed(query)
    gradients: QkvGradients = aten._scaled_dot_product_cudnn_attention_backward(
        dy, query, key, value, out, lse[..., None].contiguous(), unused, unused, None, None, None, *lengths, 0.0, causal,
        scale=scale,
    )  # fmt: skip
    return gradients


def _dropout_seed(query: Tensor) -> Tensor:
    """Return the seed of a dropout that does not take place."""
    return torch.zeros((), dtype=torch.int64, device=query.device)


FLASH = AttentionBackend("flash attention", _flash_forward, _flash_backward)
CUDNN = AttentionBackend("cuDNN", _cudnn_forward, _cudnn_backward)
_CHOSEN: dict[tuple[Any, ...], AttentionBackend] = {}  # by device and shape


def chosen_backends() -> dict[str, str]:
    """Return the name of the kernel by width of a head and dtype, of all choices that this process has made."""
    return {f"heads of {width} in {dtype}": chosen.name for (_, dtype, width, *_), chosen in _CHOSEN.items()}


def choose_backend(query: Tensor, key: Tensor, causal: bool) -> AttentionBackend:
    """Return the fastest kernel without a mask for queries and keys on a GPU; the first call with a shape measures."""
    is_square = query.shape[2] == key.shape[2]  # else the two kernels align a causal mask to different corners
    if (
        not query.is_cuda
        or query.shape[-1] > MAX_CUDNN_WIDTH
        or (causal and not is_square)
        or not _has_cudnn(query.device)
    ):
        return FLASH
    dtype, (_, num_heads, length, width) = str(query.dtype).removeprefix("torch."), query.shape
    shape = (
        query.device,
        dtype,
        width,
        num_heads,
        key.shape[1],
        min(length, MAX_PROBED_TOKENS),
        key.shape[2] == length,
        causal,
    )
    if shape not in _CHOSEN:
        _CHOSEN[shape] = fastest_agreeing(FLASH, [CUDNN], *_probe_inputs(query, key), causal, _elapsed_s)
    return _CHOSEN[shape]


def _has_cudnn(device: torch.device) -> bool:
    has_library: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and torch.cuda.get_device_capability(device) >= CUDNN_CAPABILITY


def _probe_inputs(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, keys and values of one sequence, laid out in memory as those of the engine: [B, T, heads, H]."""
    lengths = (min(tensor.shape[2], MAX_PROBED_TOKENS) for tensor in (query, key, key))
    with torch.random.fork_rng([query.device]):  # the run's own random numbers stay as they were
        query, key, value = (
            torch.randn(1, length, tensor.shape[1], tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
            for tensor, length in zip((query, key, key), lengths, strict=True)
        )
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def fastest_agreeing(
    reference: AttentionBackend, rivals: Sequence[AttentionBackend], query: Tensor, key: Tensor, value: Tensor, causal: bool,
    elapsed_s: Callable[[Callable[[], Any]], float],
) -> AttentionBackend:  # fmt: skip
    """Return the rival that is fastest, forward and backward, of those whose results agree with the reference's; the reference
    where none gains `LEAST_GAIN`. `elapsed_s` runs a function and returns its seconds."""
    scale = query.shape[-1] ** -0.5

    def run(backend: AttentionBackend) -> tuple[Tensor, ...]:
        out, lse = backend.forward(query, key, value, causal, scale)
        return out, lse, *backend.backward(BackwardInputs(query, query, key, value, out, lse), causal, scale)

    expected, fastest = run(reference), reference
    least_s = min(elapsed_s(lambda: run(reference)) for _ in range(PROBE_REPETITIONS)) * (1.0 - LEAST_GAIN)
    for rival in rivals:
        try:
            if not all(map(_agree, run(rival), expected)):
                continue
            seconds = min(elapsed_s(lambda rival=rival: run(rival)) for _ in range(PROBE_REPETITIONS))  # type: ignore[misc]
        except RuntimeError:  # what PyTorch raises for a shape or a release that a kernel does not take
            continue
        if seconds < least_s:
            fastest, least_s = rival, seconds
    return fastest


def _agree(computed: Tensor, expected: Tensor) -> bool:
    difference = (computed[..., : expected.shape[-1]].float() - expected.float()).norm()
    return bool(difference <= AGREEMENT * expected.float().norm()) and math.isfinite(float(difference))


def _elapsed_s(function: Callable[[], Any]) -> float:
    """Return the seconds of a function's kernels on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def fused_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, causal: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return output [B, K·G, T, H] and log-sum-exp [B, K·G, T], whose T a GPU kernel pads.

    `causal`: a query sees the keys up to its own (None: where there is no mask).
    """
    causal = mask is None if causal is None else causal
    if not device_dispatch.on_gpu(query):
        on_cpu: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return on_cpu
    if _has_flash(query, mask):
        return choose_backend(query, key, causal).forward(query, key, value, causal, scale)
    key, value = repeat_kv_heads(query, key), repeat_kv_heads(query, value)
    efficient: tuple[Any, ...] = aten._scaled_dot_product_efficient_attention(
        query, key, value, _expand_mask(mask, query), True, 0.0, causal, scale=scale
    )
    return efficient[0], efficient[1]


def fused_backward(
    inputs: BackwardInputs, mask: Tensor | None, scale: float, *, causal: bool | None = None
) -> QkvGradients:
    """Return the gradients of queries, keys and values."""
    dy, query, key, value, out, lse = inputs
    causal = mask is None if causal is None else causal
    if not device_dispatch.on_gpu(query):
        on_cpu: QkvGradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, query, key, value, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scale
        )
        return on_cpu
    if _has_flash(query, mask):
        return choose_backend(query, key, causal).backward(inputs, causal, scale)
    groups, unused = query.shape[1] // key.shape[1], torch.empty(0, dtype=torch.int64, device=query.device)
    needs_gradient = [True, True, True, False]
    heads = repeat_kv_heads(query, key), repeat_kv_heads(query, value)
    lse = F.pad(lse, (0, -lse.shape[-1] % LSE_PADDING), value=float("inf")).contiguous()
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dy, query, *heads, _expand_mask(mask, query), out, lse, unused, unused, 0.0, needs_gradient, causal, scale=scale
    )
    return dq, sum_query_heads(dk, groups), sum_query_heads(dv, groups)


def _has_flash(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether PyTorch's flash attention on a GPU takes these (sdp_utils.cpp): 16 bits, heads of at most 256."""
    return mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= MAX_FLASH_WIDTH


def _expand_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask for every sequence and head, with aligned rows."""
    if mask is None:
        return None
    rows = F.pad(mask, (0, -mask.shape[-1] % MASK_ALIGNMENT))[..., : mask.shape[-1]]
    return rows.expand(len(query), query.shape[1], *mask.shape[-2:])


def repeat_kv_heads(query: Tensor, key: Tensor) -> Tensor:
    """Return keys or values repeated for each query head of their group."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def sum_query_heads(x: Tensor, groups: int) -> Tensor:
    """Sum [B, K·G, S, H] over the query heads of each key-value head."""
    return torch.unflatten(x, 1, (-1, groups)).sum(dim=2)
