"""Collectives of a decoding layer equal closed forms: 2-D weight-stationary, heads then batch, the limit of tensor parallelism.

Pope et al. 2023, "Efficiently Scaling Transformer Inference" (arXiv 2211.05102), sections 3.2 and 3.3; Austin et al. 2025, "How
to Scale Your Model", chapter on inference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from shardwise.model import Architecture, load_model
from shardwise.model.program import Role
from shardwise.serve.inference_pass import (
    InferencePass,
    PassForm,
    PassUnit,
    SequenceGroup,
    axis_degrees,
    inference_pass,
)
from shardwise.sharding import CollectiveKind
from shardwise.step.instructions import UnitCollective
from shardwise.values import SymbolValues

SEQS, CONTEXT = 128, 2048
DECODING = SequenceGroup(kind="decode", num_seqs=SEQS, cached_tokens=CONTEXT - 1)
WIDTH, HIDDEN = 4096, 16_384


def plain_model(**fields: Any) -> Architecture:
    """A layer of attention with 32 heads of 128, and an MLP of two matrices."""
    return replace(load_model("llama-2-7b"), d_ff=HIDDEN, mlp="gelu", **fields)


class Layer:
    """The layers of a model in a pass that decodes, on `tp` devices and as many of the width of weights as the form says."""

    def __init__(self, model: Architecture, tp: int, form: PassForm, ws: int = 1) -> None:
        self.inference: InferencePass = inference_pass(model, form)
        self.degrees: Mapping[str, int] = axis_degrees(model.num_kv_heads, tp=tp, attention_dp=1, expert_tp=tp, ws=ws)
        self.unit: PassUnit = self.inference.unit("block")
        self.tokens = self.inference.token_values(self.unit, [DECODING], self.degrees)
        self.group = self.inference.group_values(self.unit, DECODING, self.degrees)

    def collectives(self) -> Iterator[tuple[UnitCollective, SymbolValues]]:
        moved = [(collective, self.tokens) for collective in self.unit.token_collectives]
        moved += [(collective, self.group) for collective in self.unit.group_collectives["decode"]]
        return ((c, values) for c, values in moved if values.group_degree(c.axes) > 1)

    def received(self, *tensors: str) -> float:
        """Elements that a device receives in the collectives of some tensors, or of all."""
        return float(
            sum(
                sum(step.collective.received_elements.evaluate(values) for step in c.derived)
                for c, values in self.collectives()
                if not tensors or c.tensors[0] in tensors
            )
        )

    def cache_elements(self) -> float:
        kernels = self.unit.group_kernels["decode"]
        attention = next(k.kernel for k in kernels if k.kernel.kind == "cached_attention")
        return float(attention.elements[Role.CACHE].evaluate(self.group))


def all_reduce(elements: float, degree: int) -> float:
    return 2 * elements * (degree - 1) / degree


@pytest.mark.parametrize(("x", "y"), [(2, 4), (4, 4), (4, 16), (1, 8)])
def test_2d_weight_stationary_reduces_hidden_over_x_and_width_over_y(x: int, y: int) -> None:
    """The MLP: [B, F/y] is a sum over the x parts of D, [B, D/x] one over the y parts of F."""
    layer = Layer(plain_model(), y, PassForm(splits_width=True), ws=x)
    mlp = all_reduce(SEQS * HIDDEN / y, x) + all_reduce(SEQS * WIDTH / x, y)
    assert layer.received("up", "mlp_out") == mlp
    heads = 3 * all_reduce(SEQS * WIDTH / y, x) + all_reduce(SEQS * WIDTH / x, y)
    norms = 2 * all_reduce(SEQS, x)  # sums of squares
    assert layer.received() == pytest.approx(mlp + heads + norms)


def test_2d_weight_stationary_moves_less_the_more_devices_there_are() -> None:
    """With n devices the best x is sqrt(n D / F), and what moves falls as 1/sqrt(n); along one axis it does not fall."""

    def moved(x: int, y: int) -> float:
        return Layer(plain_model(), y, PassForm(splits_width=True), ws=x).received("up", "mlp_out")

    for devices in (64, 256):
        best = min((2**i for i in range(int(math.log2(devices)) + 1)), key=lambda x: moved(x, devices // x))
        assert best == math.sqrt(devices * WIDTH / HIDDEN)
    assert moved(8, 32) == pytest.approx(moved(4, 16) / 2, rel=0.1)
    assert moved(1, 64) > moved(1, 16)


@pytest.mark.parametrize("tp", [16, 32])
def test_heads_then_batch_takes_two_all_to_alls_and_shares_the_cache(tp: int) -> None:
    """Beyond the 8 key-value heads, devices share sequences: queries go to them and results come back, [B, 1, N H] by tp each."""
    model = load_model("llama-3-8b")
    copies, shared = (Layer(model, tp, PassForm(cache_split=split)) for split in ("heads", "heads_then_batch"))
    exchanges = [c for c, _ in shared.collectives() if c.kind is CollectiveKind.ALL_TO_ALL]
    assert [c.tensors[0] for c in exchanges] == ["q", "attended"]
    assert not [c for c, _ in copies.collectives() if c.kind is CollectiveKind.ALL_TO_ALL]
    group = tp // 8
    payload = SEQS * model.num_heads * model.head_dim / tp
    assert shared.received("q", "attended") == 2 * payload * (group - 1) / group
    cache = 2 * SEQS * CONTEXT * model.num_kv_heads * model.head_dim
    assert (copies.cache_elements(), shared.cache_elements()) == (cache / 8, cache / tp)


@pytest.mark.parametrize("tp", [8, 16, 32])
def test_tensor_parallelism_ends_where_the_all_reduce_takes_as_long_as_the_weights(tp: int) -> None:
    """An MLP reads 2DF/Y weights and reduces BD: with a memory beta times as fast as the links, both take as long at
    Y = F / (B beta), up to the (Y-1)/Y of the AllReduce."""
    layer = Layer(plain_model(), tp, PassForm())
    products = (k for k in layer.unit.token_kernels if k.kernel.outputs[0] in ("up", "mlp_out"))
    weights = sum(k.weights["mlp"].evaluate(layer.tokens) for k in products)
    beta = HIDDEN / (SEQS * tp)  # at which this tp is the limit
    assert layer.received("mlp_out") * beta / weights == pytest.approx((tp - 1) / tp)
