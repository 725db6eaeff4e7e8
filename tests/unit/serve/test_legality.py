"""Legal serving layouts of a model: heads, experts and widths are split evenly, and blocks of scales stay whole."""

from __future__ import annotations

import pytest

from shardwise.model import load_model
from shardwise.serve import ServingFormats, ServingLayout
from shardwise.serve.legality import require_legal_serving_layout, serving_layout_problems
from shardwise.values import InputError


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3-70b", "tp=8"),
        ("llama-3-70b", "tp=16"),  # 8 key-value heads in two copies each
        ("deepseek-v3", "tp=1 attention_dp=32 ep=32"),
        ("deepseek-v3", "tp=16 ep=16"),  # latent attention has no key-value heads to split
        ("qwen3-30b-a3b", "tp=4 ep=2 expert_tp=2"),
    ],
)
def test_layouts_of_published_launches_are_legal(model: str, layout: str) -> None:
    assert serving_layout_problems(load_model(model), ServingLayout.parse(layout)) == []


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("llama-3-70b", "tp=6", "a divisor of the 64 query heads is required"),
        ("llama-3-70b", "tp=8 ep=8", "has no experts, so ep=1 is required"),
        ("llama-3-70b", "attention_dp=2 replicas=3", "attention_dp=1 replicas=6 is required"),
        ("llama-3-70b", "pp=128", "80 layers is required"),
        ("deepseek-v3", "tp=96 ep=96", "a divisor of the 256 experts is required"),
    ],
)
def test_violated_rules_name_the_requirement(model: str, layout: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        require_legal_serving_layout(load_model(model), ServingLayout.parse(layout), ServingFormats())


def test_parts_of_a_matrix_hold_whole_blocks_of_scales() -> None:
    """Experts of qwen3-30b-a3b are 768 wide, six blocks of 128: three parts hold two each, four parts none whole."""
    model, formats = load_model("qwen3-30b-a3b"), ServingFormats(weights="fp8_block")
    assert serving_layout_problems(model, ServingLayout(tp=2), formats) == []
    (problem,) = serving_layout_problems(model, ServingLayout(tp=4), formats)
    assert "multiples of 128 are required" in problem
    assert "the nearest are 3 and 6" in problem
    assert serving_layout_problems(model, ServingLayout(tp=4, ep=4), formats) == []
