"""Configs of 2026 that spell sizes in several ways: counts of transformers 5.23 on the meta device, closed forms, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwise.model import num_params
from shardwise.model.huggingface.config import parse_config
from shardwise.values import InputError

GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 128, "sliding_window": 8, "hidden_size_per_layer_input": 0,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 32, "dense_intermediate_size": 96, "shared_intermediate_size": 32, "num_local_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 128,
}  # fmt: skip
WIDTH, HEADS, HEAD_DIM, VOCAB = 512, 8, 64, 100
NAS: dict[str, Any] = {
    "model_type": "nemotron-nas", "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": None,
    "intermediate_size": None, "num_hidden_layers": 3, "vocab_size": VOCAB,
}  # fmt: skip


def block(group: int | None, width: float | None, **attention: Any) -> dict[str, Any]:
    return {
        "attention": {"n_heads_in_group": group, "no_op": group is None, **attention},
        "ffn": {"ffn_mult": width, "no_op": width is None},
    }


def test_step_has_different_heads_on_layers_with_a_window() -> None:
    text = {
        "attention_other_setting": {"num_attention_heads": 96}, "num_nextn_predict_layers": 3, "sliding_window": 512,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
        "moe_layers_enum": ",".join(map(str, range(3, 45))),
    }  # fmt: skip
    model = parse_config({"model_type": "step3p7", "text_config": text})
    assert num_params(model) == 196_955_454_720
    assert model.layer_architecture(1).num_heads == 96
    assert model.layer_architecture(4).sliding_window is None


def test_sizes_that_a_familys_code_ignores_are_reported() -> None:
    model = parse_config({"model_type": "step3p7", "vocab_size": 128_896, "layer_types": ["sliding_attention"] * 45})
    assert num_params(model) == 195_843_833_088
    assert model.vocab_size == 128_815
    assert "vocab_size = 128896 outside text_config, where its code takes 128815" in model.numerics.unread
    assert any(text.startswith("layer_types") for text in model.numerics.unread)


def test_blocks_from_an_architecture_search_have_individual_sizes() -> None:
    """Widths are two thirds of a multiple of 512, rounded up to a multiple of 256; every half has a norm."""
    model = parse_config({**NAS, "block_configs": [block(4, 2.0), block(None, 0.5), block(8, None)]})
    attention = {heads: 2 * WIDTH * HEADS * HEAD_DIM + 2 * WIDTH * heads * HEAD_DIM for heads in (1, 2)}
    first = attention[2] + 3 * WIDTH * 768 + 2 * WIDTH
    second = 3 * WIDTH * 256 + WIDTH
    third = attention[1] + WIDTH
    assert num_params(model) == first + second + third + 2 * VOCAB * WIDTH + WIDTH
    assert not model.layer_architecture(1).has_mixer
    assert model.layer_architecture(2).feed_forward == "none"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**NAS, "block_configs": [block(4, 2.0)] * 2}, "block_configs has 2 blocks for 3 layers; one for each is required"),
        (
            {**NAS, "block_configs": [block(4, 2.0), block(None, None), block(4, 2.0)]},
            "block 1 of block_configs has neither attention nor an MLP; one is required",
        ),
        (
            {**NAS, "block_configs": [block(4, 2.0, replace_with_linear=True)] * 3},
            "block 0 of block_configs has attention.replace_with_linear = True, which is not known here",
        ),
        (
            {**GEMMA, "per_layer_config": {"0": {"head_dim": 16}, "1": {"head_dim": 32}}},
            "per_layer_config has several values of head_dim; one for all layers without a window is known here",
        ),
        ({**GEMMA, "num_kv_shared_layers": 99}, "num_kv_shared_layers is 99; less than the"),
        ({**GEMMA, "num_kv_shared_layers": 2}, "no layer before those that reuse keys and values is of the same type"),
        ({**MINIMAX, "sparse_attention_config": {"sparse_local_block": 2}}, "one local block is known here"),
    ],
)  # fmt: skip
def test_unknown_features_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_config(config)
    assert message in str(error.value)


def test_gemma4_counts_keys_once_where_they_are_also_values() -> None:
    """Only the last of the six layers has no window: there keys are also values, with another number of heads."""
    wide = {**GEMMA, "global_head_dim": 32}
    apart = parse_config(wide)
    shared = parse_config({**wide, "attention_k_eq_v": True, "num_global_key_value_heads": 1})
    assert num_params(apart) - num_params(shared) == 64 * 2 * 32 + 64 * 1 * 32
    assert shared.layer_architecture(5).num_kv_heads == 1
    assert apart.layer_architecture(5).num_kv_heads == 2


def test_minimax_reads_its_indexer_from_the_table_of_sparse_attention() -> None:
    table = {
        "sparse_attention_freq": [0, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_block_size": 16,
        "sparse_topk_blocks": 4, "sparse_local_block": 1, "sparse_init_block": 0,
    }  # fmt: skip
    model = parse_config({**MINIMAX, "sparse_attention_config": table, "moe_layer_freq": [0, 1]})
    sparse = model.layer_architecture(1)
    assert (sparse.index_heads, sparse.index_head_dim, sparse.index_topk, sparse.index_block) == (2, 8, 4, 16)
    assert not model.layer_architecture(0).index_topk
    assert (
        num_params(model) - num_params(parse_config({**MINIMAX, "moe_layer_freq": [0, 1]})) == 64 * (2 * 8 + 8) + 2 * 8
    )


def test_blocks_limit_the_attended_keys() -> None:
    """A query attends to 4 blocks of 16 keys, of which its own only up to itself: summed query by query."""
    table = {
        "sparse_attention_freq": [1, 1],
        "sparse_num_index_heads": 2,
        "sparse_block_size": 16,
        "sparse_topk_blocks": 4,
    }
    model = parse_config({**MINIMAX, "sparse_attention_config": table})
    num_pairs = sum(min(query + 1, 3 * 16 + query % 16 + 1) for query in range(4096))
    assert model.mean_attended_share(4096) == pytest.approx(num_pairs / 4096**2, rel=0.01)


GEMMA3N: dict[str, Any] = {
    "model_type": "gemma3n_text", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "num_hidden_layers": 5, "num_kv_shared_layers": 0, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"laurel_rank": 0}, "laurel_rank is 0; at least 1 is required"),
        ({"laurel_rank": "x"}, "laurel_rank is 'x'; a whole number of at least 1 is required"),
        ({"vocab_size_per_layer_input": 8.5}, "layer_input_rows is 8.5; a whole number"),
        ({"altup_num_inputs": 1}, "found num_streams = 1; at least 2 are required"),
        ({"altup_active_idx": 1}, r"altup_active_idx = 1 \(known: 0\)"),
        ({"activation_sparsity_pattern": [0.5]}, "is not a list of a share for each of 5 layers"),
        ({"activation_sparsity_pattern": [1.0] * 5}, "has 1.0; shares of 0 and 0.95 are known here"),
        ({"num_kv_shared_layers": 4}, "no layer before those that reuse keys and values is of the same type"),
    ],
)
def test_unsupported_variants_of_gemma3n_are_refused(fields: dict[str, Any], message: str) -> None:
    assert parse_config(GEMMA3N).alternating_streams
    with pytest.raises(InputError, match=message):
        parse_config({**GEMMA3N, **fields})


def test_gemma3n_has_its_codes_defaults_for_missing_keys() -> None:
    """Keys that the code does not read have no effect."""
    model = parse_config({**GEMMA3N, "num_hidden_layers": 12, "kinds_of_gates": ["all_gates"] * 12})
    assert model.numerics.logit_cap == 30.0
    assert [model.layer_architecture(layer).sparse_activation for layer in range(12)] == [True] * 10 + [False] * 2
    assert "a bound of the weights of streams while they are trained" in model.numerics.unread


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_mem_blocks": 0}, "num_mem_blocks is 0; a whole number of at least 1 is required"),
        (
            {"hybrid_layer_ids": [3]},
            "hybrid_layer_ids are [3], and the list of layers has [2, 3]; the same are required",
        ),
        ({"attention_hidden_size": 64}, "attention_hidden_size is 64; 32, twice the model's width, is required"),
        (
            {"use_shared_attention_adapter": True, "num_key_value_heads": 2},
            "attention has 4 query and 2 key-value heads",
        ),
        ({"mamba_headdim": 3}, "8 heads of width 3 are not mamba_expand times the model's width, 32"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, and the list of layers has 4; the same are required"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False (known: True)"),
        ({"adapter_rank": 0}, "adapter_rank is 0; at least 1 is required"),
    ],
)
def test_variants_that_zamba2s_code_does_not_build_are_refused(change: dict[str, Any], message: str) -> None:
    config = {
        "model_type": "zamba2", "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64,
        "layers_block_type": ["mamba", "mamba", "hybrid", "hybrid"], "n_mamba_heads": 8,
    }  # fmt: skip
    assert parse_config(config).layer_units == ("block", "block", "shared_0", "shared_0_again")
    with pytest.raises(InputError, match=re.escape(message)):
        parse_config({**config, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_mamba_heads": 3}, "n_mamba_heads is 3, which does not divide 32 channels"),
        ({"attn_layer_period": 0}, "attn_layer_period is 0 and attn_layer_offset 4; whole numbers are required"),
    ],
)
def test_variants_that_zambas_code_does_not_build_are_refused(change: dict[str, Any], message: str) -> None:
    config = {
        "model_type": "zamba", "hidden_size": 16, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 64,
        "intermediate_size": 64,
    }  # fmt: skip
    units = parse_config(config).layer_units
    assert [layer for layer, unit in enumerate(units) if unit != "block"] == [2, 7]
    with pytest.raises(InputError, match=re.escape(message)):
        parse_config({**config, **change})
