"""Weights that layers share, by hand: state once, FLOPs for each use, gradients whole until their owner reduces them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.model import Architecture
from shardwise.model.parameters_and_flops import layer_training_flops
from shardwise.model.program import ModelPart
from shardwise.model.recurrent_mixers import parse_recurrence
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.vectorised.search_layouts import SearchChecks, search_layouts
from shardwise.values import bytes_per_element, get_precision

WIDTH, HIDDEN = 512, 2048
BLOCK = {"mixer": "attention", "feed_forward": "mlp", "shared_block": True}
MIXER = {
    "kind": "mamba2", "num_heads": 16, "head_dim": 64, "key_dim": 64, "conv_width": 4, "chunk": 256, "norm": "after_gate",
}  # fmt: skip
MODEL = Architecture(
    name="sharing", num_layers=3, d_model=WIDTH, d_ff=HIDDEN, num_heads=8, num_kv_heads=8, head_dim=2 * WIDTH // 8,
    vocab_size=32000, mlp="geglu", mixer="none", feed_forward="none", recurrence=parse_recurrence(MIXER), carried_embedding=True,
    layer_kinds={"first": BLOCK, "again": {**BLOCK, "weights_of": "first"}}, layer_pattern=("first", "block", "again"),
)  # fmt: skip
USED_ONCE = replace(MODEL, layer_kinds={"first": BLOCK}, layer_pattern=("first", "block", "block"))
UNSHARED = replace(MODEL, layer_kinds={"first": BLOCK}, layer_pattern=("first", "block", "first"))
PRODUCTS = 3 * (2 * WIDTH) ** 2 + 2 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN  # queries, keys and values; output; MLP
SHARED = PRODUCTS + 2 * WIDTH + WIDTH  # and the norms of both
JOB = sw.Job(global_batch_tokens=16 * 4096, seq_len=4096, precision="bf16")


def memory(model: Architecture, text: str) -> dict[str, float]:
    return dict(estimate(Problem(model, load_cluster("h100:8"), JOB), Layout.parse(text)).memory)


def test_state_counts_once() -> None:
    assert sw.num_params(UNSHARED) - sw.num_params(MODEL) == SHARED
    assert (
        sw.num_params(MODEL) - sw.num_params(USED_ONCE) == WIDTH * WIDTH
    )  # the product behind the block is each layer's
    once, twice = (memory(model, "dp=8 zero_stage=0") for model in (MODEL, UNSHARED))
    precision = get_precision("bf16")
    for term, width in (("parameters", bytes_per_element(precision.weights)), ("gradients", precision.gradient_bytes)):
        assert twice[term] - once[term] == pytest.approx(SHARED * width, rel=1e-3)


def test_products_count_for_each_use() -> None:
    shared, unshared = (layer_training_flops(model, 256)[0] for model in (MODEL, UNSHARED))
    assert shared == unshared
    assert 3 * sum(shared[part] for part in (ModelPart.ATTENTION, ModelPart.MLP)) == pytest.approx(
        2 * 6 * 256 * (PRODUCTS + WIDTH * WIDTH)
    )


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_gradients_of_uses_are_whole_until_the_first_use(zero_stage: int) -> None:
    """They add to what ZeRO gathers from ZeRO-2 on; below, gradients rest whole."""
    used, once = (memory(model, f"fsdp=8 zero_stage={zero_stage}").get("gathered", 0.0) for model in (MODEL, USED_ONCE))
    lent = SHARED * bytes_per_element(get_precision("bf16").gradients) if zero_stage >= 2 else 0.0
    assert used - once == pytest.approx(lent, rel=1e-6, abs=1.0)


def test_a_search_prices_shared_weights_as_an_estimate_does() -> None:
    problem = Problem(MODEL, load_cluster("h100:8"), JOB)
    result = search_layouts(problem, choices=Choices(), checks=SearchChecks(num_samples=30))
    for row in (*result.best, *result.sampled):
        priced = estimate(problem, row.layout)
        assert row.memory_bytes == pytest.approx(priced.memory_bytes, rel=1e-9)
        assert row.layout.pp == 1
