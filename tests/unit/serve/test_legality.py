"""Legal serving layouts of a model: heads, experts and widths are split evenly, and blocks of scales stay whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.interop.serving.engines import ENGINES
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.model import Architecture, load_model
from shardwise.serve import ServingFormats, ServingLayout
from shardwise.serve.legality import default_serving_layout, require_legal_serving_layout, serving_layout_problems
from shardwise.values import InputError

MAMBA2 = {"kind": "mamba2", "num_heads": 32, "key_dim": 256, "head_dim": 128, "conv_width": 4}


def falcon_h1(num_groups: int) -> Architecture:
    """Return a model of Falcon-H1's kind: attention and Mamba-2 side by side, as Falcon-H1-34B has them."""
    base = load_model("llama-3-8b")
    return replace(base, name="falcon-h1", recurrence={**MAMBA2, "num_groups": num_groups})  # type: ignore[arg-type]


# Asked of `MambaMixer2` of vLLM 0.32.0 and SGLang 0.5.23 for 32 heads: tp divides the groups, or there is one.
@pytest.mark.parametrize(
    ("num_groups", "legal"), [(1, (1, 2, 4, 8, 16, 32)), (2, (1, 2)), (8, (1, 2, 4, 8)), (32, (1, 2, 4, 8, 16, 32))]
)  # fmt: skip
def test_groups_of_mamba_2_are_not_copied(num_groups: int, legal: tuple[int, ...]) -> None:
    model = falcon_h1(num_groups)
    degrees = [tp for tp in (1, 2, 4, 8, 16, 32) if not serving_layout_problems(model, ServingLayout(tp=tp))]
    assert tuple(degrees) == legal
    if len(legal) < 6:
        with pytest.raises(InputError, match=f"a divisor of the {num_groups} groups of heads of mamba2 is required"):
            require_legal_serving_layout(model, ServingLayout(tp=2 * max(legal)), ServingFormats())


@pytest.mark.parametrize(
    ("num_groups", "weights", "refused"), [(1, "fp8", True), (1, "bf16", False), (2, "fp8", False)]
)
def test_sglang_loads_a_group_on_several_devices_from_16_bits(num_groups: int, weights: str, refused: bool) -> None:
    launch = ServingLaunch(
        engine="sglang", checkpoint="x", architecture=falcon_h1(num_groups), layout=ServingLayout(tp=2),
        formats=ServingFormats(weights=weights),
    )  # fmt: skip
    assert any("share one group" in problem for problem in ENGINES["sglang"].violations(launch)) == refused
    assert not ENGINES["vllm"].violations(replace(launch, engine="vllm"))


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


def test_a_cache_that_inference_lacks_is_the_only_reason() -> None:
    """DeepSeek-V4's caches: one head of keys, and keys of windows; no degree of the layout is a matter then."""
    base = load_model("llama-3-8b")
    shared = {"shared_keys": True, "q_lora_rank": 64, "output_rank": 64}
    model = replace(
        base, name="v4", **shared, compress_window=128, layer_kinds={"fine": {"compress_window": 4}},
        layer_pattern=("fine", *["block"] * (base.num_layers - 1)),
    )  # type: ignore[arg-type]  # fmt: skip
    problems = serving_layout_problems(model, ServingLayout(tp=3))
    assert len(problems) == 1
    assert (
        "v4 caches one head of keys, which are its values too, and keys that stand for 4 and 128 tokens each"
        in problems[0]
    )
    plain = replace(base, name="v4", **shared)  # type: ignore[arg-type]
    assert "which are its values too; no program" in serving_layout_problems(plain, ServingLayout())[0]


@pytest.mark.parametrize(
    ("model", "weights", "layout"),
    [
        ("qwen3-235b-a22b", "bf16", "tp=8"), ("qwen3-235b-a22b", "fp8_block", "tp=8 ep=8"),
        ("minimax-m2.5", "fp8_block", "tp=8 ep=8"), ("glm-5", "fp8_block", "tp=8"), ("llama-3-8b", "bf16", "tp=8"),
    ],
)  # fmt: skip
def test_without_a_layout_experts_are_split_where_their_matrices_are_not(model: str, weights: str, layout: str) -> None:
    """Experts' widths of 1,536 have no eight parts of whole blocks of 128; those of 2,048 have."""
    chosen = default_serving_layout(load_model(model), 8, ServingFormats(weights=weights))
    assert chosen == ServingLayout.parse(layout)


def test_a_width_that_is_not_split_names_experts_that_are() -> None:
    problems = serving_layout_problems(
        load_model("minimax-m2.5"), ServingLayout(tp=8), ServingFormats(weights="fp8_block")
    )
    assert problems[0].endswith("(the nearest are 6 and 12), or experts that are split from each other: ep=8")
