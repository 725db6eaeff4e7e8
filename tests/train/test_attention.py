"""Attention and its gradients: a softmax over what is seen, in blocks of queries that make no square of all positions."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train.formulas import NARROW, Largest, assert_near, gradients_of, random

from shardwise.model.numerics import Numerics
from shardwise.run.engine.rings import RingAttention
from shardwise.run.kernels import positions_and_masks as sight_module
from shardwise.run.kernels.attention import Attention, sink_gradient
from shardwise.run.kernels.positions_and_masks import AttentionMask

# Letters: B, T, K, G, H and U as in `model/decoder.py`.
B, T, K, G, H = 2, 70, 2, 3, 4
DOCUMENTS = torch.repeat_interleave(torch.arange(8), torch.tensor([3, 37, 20, 10, 33, 1, 30, 6])).view(B, T)
SIGHTS = {
    "causal": AttentionMask(),
    "window": AttentionMask(window=5),
    "wide window": AttentionMask(window=40),
    "documents": AttentionMask(documents=DOCUMENTS),
    "documents and window": AttentionMask(window=5, documents=DOCUMENTS),
}
BLOCKS = pytest.mark.parametrize("block", [32, 512])  # so that queries go in three blocks, two or one


def visible_by_hand(sight: AttentionMask) -> Tensor:
    """Return which keys each query sees, [B or 1, T, T]."""
    queries, keys = torch.arange(T)[:, None], torch.arange(T)
    visible = (keys <= queries) & (queries - keys < (sight.window or T))
    same = DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]
    return visible[None] if sight.documents is None else visible & same


def attention_by_hand(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sight: AttentionMask, scale: float, cap: float | None
) -> Tensor:
    """Softmax over scores [B, K, G, T, S], and where there are sinks over these too."""
    scores = torch.einsum("btkgh,bskh->bkgts", q, k) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible_by_hand(sight)[:, None, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, :, None, None].expand(len(q), -1, -1, T, 1)), dim=-1)
    return torch.einsum("bkgts,bsku->btkgu", scores.softmax(dim=-1)[..., :T], v)


def operands_of(width: int, groups: int = G, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return queries, keys, values, and the gradient of the result."""
    shapes = (B, T, K, groups, H), (B, T, K, H), (B, T, K, width), (B, T, K, groups, width)
    q, k, v, dy = (random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    return q, k, v, dy


def run(
    attention: Attention, sight: AttentionMask, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, *sinks: Tensor
) -> list[Tensor]:
    """Return attention's result, and the gradients of queries, keys, values and sinks."""
    out, lse = attention.forward(q, k, v, sight, *sinks)
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    gradients = attention.backward(q, k, v, sight, out, lse, dy, *sinks)
    return [out, *gradients, *(sink_gradient(dy, out, lse, sink) for sink in sinks)]


@BLOCKS
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("width", [H, H - 1])
@pytest.mark.parametrize("groups", [1, G])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_equals_a_softmax_over_visible_keys(
    has_sinks: bool, cap: float | None, groups: int, width: int, sight: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sight_module, "MIN_QUERY_BLOCK", block)
    q, k, v, dy = operands_of(width, groups)
    sinks, mask = [random(K, groups, seed=5)] if has_sinks else [], SIGHTS[sight]

    def by_hand(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attention_by_hand(q, k, v, sinks, mask, 0.6, cap)

    result, expected = gradients_of(by_hand, (q, k, v, *sinks), dy)
    for actual, reference in zip(run(Attention(0.6, cap), mask, q, k, v, dy, *sinks), (result, *expected), strict=True):
        assert_near(actual, reference)


@BLOCKS
@NARROW
@pytest.mark.parametrize("kind", ["fused", "capped", "sinks"])
def test_attention_in_narrow_formats_returns_them(
    kind: str, dtype: torch.dtype, tolerance: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the log-sum-exp, which is in float32."""
    monkeypatch.setattr(sight_module, "MIN_QUERY_BLOCK", block)
    q, k, v, dy = operands_of(H, dtype=dtype)
    sinks, cap = [random(K, G, dtype=dtype, seed=5)] if kind == "sinks" else [], 0.7 if kind == "capped" else None

    def exact(*operands: Tensor) -> Tensor:
        q, k, v, *sinks = (operand.double() for operand in operands)
        return attention_by_hand(q, k, v, sinks[0] if sinks else None, SIGHTS["window"], 0.5, cap)

    result, expected = gradients_of(exact, (q, k, v, *sinks), dy.double())
    results = run(Attention(0.5, cap), SIGHTS["window"], q, k, v, dy, *sinks)
    for actual, reference in zip(results, (result.to(dtype), *expected), strict=True):
        assert_near(actual, reference, 2 * tolerance)


def test_attention_equals_pytorch() -> None:
    q, k, v, dy = operands_of(H)

    def pytorchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return torch.unflatten(out.transpose(1, 2), 2, (K, G))

    result, expected = gradients_of(pytorchs, (q, k, v), dy)
    for actual, reference in zip(
        run(Attention.of(Numerics(), H), AttentionMask(), q, k, v, dy), (result, *expected), strict=True
    ):
        assert_near(actual, reference)


def test_scale_and_cap_come_from_the_numerics() -> None:
    assert Attention.of(Numerics(), 16) == Attention(0.25, None)
    assert Attention.of(Numerics(attention_scale=0.1, attention_cap=50.0), 16) == Attention(0.1, 50.0)


class Kernels(TorchDispatchMode):
    """Counts PyTorch's kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "scaled_dot_product" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sight", "cap", "count"),
    [(AttentionMask(), None, 2), (AttentionMask(window=5), None, 6), (AttentionMask(), 0.7, 0)],
)
def test_full_attention_takes_one_kernel_for_all_queries(
    sight: AttentionMask, cap: float | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per pass; with a window there is one for each block, and with a cap none."""
    monkeypatch.setattr(sight_module, "MIN_QUERY_BLOCK", 32)
    operands = operands_of(H)
    with Kernels() as kernels:
        run(Attention(0.5, cap), sight, *operands)
    assert kernels.count == count


@pytest.mark.parametrize(
    ("sight", "cap", "max_elements"),
    [
        (AttentionMask(), None, 0),  # the kernel has no scores in memory
        (AttentionMask(window=5), None, 0),
        (AttentionMask(window=5), 0.7, B * K * G * 32 * (32 + 4)),  # scores of a block over the keys that it sees
        (AttentionMask(), 0.7, B * K * G * 32 * T),
    ],
)
def test_no_tensor_of_all_query_key_pairs_is_allocated(
    sight: AttentionMask, cap: float | None, max_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sight_module, "MIN_QUERY_BLOCK", 32)
    operands = operands_of(H)
    with Largest() as largest:
        run(Attention(0.5, cap), sight, *operands)
    assert operands[0].numel() <= largest.elements <= max(max_elements, operands[0].numel())


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_ring_of_one_rank_equals_attention(has_sinks: bool) -> None:
    """With more queries than dims of a head, which the log-sum-exps of all have to come through."""
    q, k, v, _ = operands_of(H)
    attention, sinks = Attention(0.6, None), [random(K, G, seed=5)] if has_sinks else []
    ring = RingAttention(attention, cast(Any, None), (), 0)  # it sends nothing
    results = ring.forward(q, k, v, [AttentionMask()], *sinks)
    for actual, reference in zip(results, attention.forward(q, k, v, AttentionMask(), *sinks), strict=True):
        assert_near(actual, reference)


def test_row_sums_of_sink_gradients_are_in_float32() -> None:
    """257 products of 1 are 257 in float32, and 256 in the eight bits of bf16."""
    ones = torch.ones(1, 3, 1, 1, 257, dtype=torch.bfloat16)
    gradient = sink_gradient(ones, ones, torch.zeros(1, 3, 1, 1), torch.zeros(1, 1))
    torch.testing.assert_close(gradient, torch.full((1, 1), -3 * 257.0), rtol=0, atol=0)
