"""Caches of sequences have the bytes of those that models of `transformers` fill: keys, values, states, rows of convolutions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from shardwise.book_formulas.kv_cache import KvCache
from shardwise.model.huggingface.config import parse_config

TOKENS = 9
SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_key_value_heads": 2, "intermediate_size": 16, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "num_experts": 2, "num_experts_per_tok": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    },
    "bamba": {
        "num_key_value_heads": 2, "intermediate_size": 16, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2,
        "mamba_d_state": 3, "attn_layer_indices": [2],
    },
    "mimo_v2_flash": {
        "num_key_value_heads": 1, "v_head_dim": 3, "intermediate_size": 16, "mlp_layer_types": ["dense"] * 4,
        "layer_types": ["full_attention"] * 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", MODELS)
def test_a_sequence_takes_the_bytes_of_the_librarys_cache(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(model_type, **SMALL, **MODELS[model_type])
        model: Any = AutoModelForCausalLM.from_config(config).eval()
        cache = model(torch.arange(TOKENS)[None], use_cache=True).past_key_values
    elements = 0
    for layer in cache.layers:
        elements += sum(getattr(layer, name).numel() for name in ("keys", "values") if hasattr(layer, name))
        elements += sum(state.numel() for state in getattr(layer, "recurrent_states", {}).values())
        # A filter of width W reads W - 1 rows before a token; the library keeps W.
        elements += sum(rows[..., 1:].numel() for rows in getattr(layer, "conv_states", {}).values())
    architecture = parse_config({**config.to_dict(), "model_type": model_type})
    assert KvCache(architecture=architecture, dtype="fp32").sequence_bytes(TOKENS) == 4 * elements
