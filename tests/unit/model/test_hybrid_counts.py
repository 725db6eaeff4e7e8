"""Parameters and FLOPs of models with recurrences, sparse attention and latent experts, at their published sizes.

Parameters are those of transformers 5.23's own models on the meta device, from the config.json of each: Qwen/Qwen3-Next-80B-A3B,
nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B, deepseek-ai/DeepSeek-V3.2, zai-org/GLM-5.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.model import Architecture, load_model, num_active_params, num_params
from shardwise.model.parameters_and_flops import unit_training_flops

NO_EXPERTS = {"num_experts": 0, "experts_per_token": 0, "shared_expert_width": 0, "expert_latent_dim": 0}
DELTA = {"kind": "gated_delta", "num_heads": 32, "num_groups": 16, "key_dim": 128, "head_dim": 128, "conv_width": 4}
MAMBA = {
    "kind": "mamba2", "num_heads": 256, "num_groups": 8, "key_dim": 128, "head_dim": 64, "conv_width": 4, "chunk": 128,
    "norm": "after_gate", "conv_bias": True,
}  # fmt: skip
NEMOTRON_LAYERS = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
)
INDEXER = {"index_head_dim": 128, "index_topk": 2048}


def qwen3_next() -> Architecture:
    return Architecture(
        name="qwen3-next-80b", num_layers=48, d_model=2048, d_ff=512, num_heads=16, num_kv_heads=2, head_dim=256,
        vocab_size=151936, qk_norm=True, attention_gate="element", num_experts=512, experts_per_token=10,
        shared_expert_width=512, shared_gate=True,
        layer_kinds={"linear": {"mixer": "none", "recurrence": DELTA, "attention_gate": "none", "qk_norm": False}},
        layer_pattern=("linear*3", "block"),
    )  # fmt: skip


def nemotron_3_ultra() -> Architecture:
    layers = {"M": "mamba", "E": "block", "*": "attention"}
    kinds: dict[str, dict[str, Any]] = {
        "mamba": {"recurrence": MAMBA, "feed_forward": "none", **NO_EXPERTS},
        "attention": {"mixer": "attention", "feed_forward": "none", "positions": "none", **NO_EXPERTS},
    }
    return Architecture(
        name="nemotron-3-ultra", num_layers=len(NEMOTRON_LAYERS), d_model=8192, d_ff=5120, num_heads=64, num_kv_heads=2,
        head_dim=128, vocab_size=131072, mlp="relu2", mixer="none", num_experts=512, experts_per_token=22,
        shared_expert_width=10240, expert_latent_dim=2048, layer_kinds=kinds,
        layer_pattern=tuple(layers[letter] for letter in NEMOTRON_LAYERS),
    )  # fmt: skip


def glm_5() -> Architecture:
    return Architecture(
        name="glm-5.1", num_layers=78, d_model=6144, d_ff=2048, num_heads=64, num_kv_heads=64, head_dim=256, vocab_size=154880,
        num_experts=256, experts_per_token=8, shared_expert_width=2048, num_dense_layers=3, dense_d_ff=12288, q_lora_rank=2048,
        kv_lora_rank=512, rope_head_dim=64, v_head_dim=256, index_heads=32, **INDEXER,
    )  # fmt: skip


def deepseek_v3_2() -> Architecture:
    return replace(load_model("deepseek-v3"), index_heads=64, **INDEXER)


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (qwen3_next, 79_674_391_296),
        (nemotron_3_ultra, 549_308_968_960),
        (glm_5, 743_911_199_232),
        (deepseek_v3_2, 671_877_929_216),
    ],
)
def test_parameters_equal_those_of_the_published_models(model: Any, params: int) -> None:
    assert num_params(model()) == params


def test_active_parameters_equal_those_in_the_names() -> None:
    """A3B of Qwen3-Next counts no embedding: 3.3e9 and 0.6e9 more in its tables; A55B of Nemotron 3 Ultra."""
    assert num_active_params(qwen3_next()) == pytest.approx(3.9e9, rel=0.02)
    assert num_active_params(nemotron_3_ultra()) == pytest.approx(55e9, rel=0.02)


def test_selected_keys_bound_the_scores() -> None:
    """Each query attends to 2,048 of 32k keys: attention's scores are those of a window; the indexer's are causal."""
    seq_len, sparse, dense = 32768, deepseek_v3_2(), load_model("deepseek-v3")
    share = 2048 / seq_len - (2048 / seq_len) ** 2 / 2
    assert sparse.mean_attended_share(seq_len) == pytest.approx(share)
    forward, _ = unit_training_flops(sparse, "block", seq_len)
    without, _ = unit_training_flops(dense, "block", seq_len)
    scores = 2.0 * seq_len**2 * 128 * (192 + 128)
    indexer = 2.0 * seq_len * (1536 * 64 * 128 + 7168 * (128 + 64)) + seq_len**2 * 64 * (128 + 1)
    assert forward - without == pytest.approx(indexer - scores * (0.5 - share), rel=1e-9)


def test_an_indexer_has_no_backward_pass() -> None:
    seq_len, sparse = 32768, deepseek_v3_2()
    _, backward = unit_training_flops(sparse, "block", seq_len)
    _, window = unit_training_flops(
        replace(sparse, index_heads=0, index_head_dim=0, index_topk=0, sliding_window=2048), "block", seq_len
    )
    assert backward == pytest.approx(window, rel=1e-12)
