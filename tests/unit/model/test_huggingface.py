"""Architectures from config.json: spellings, values that families fix, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.model.huggingface.config import load_config, parse_config
from shardwise.model.load import load_model, model_names
from shardwise.model.parameters_and_flops import num_active_params, num_params
from shardwise.present.command_line import main
from shardwise.values.errors import InputError

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 100,
}  # fmt: skip


def test_sizes_and_defaults_are_read() -> None:
    model = parse_config(LLAMA, name="small")
    assert (model.name, model.d_model, model.num_layers, model.num_kv_heads, model.head_dim) == ("small", 64, 3, 2, 8)
    assert (model.mlp, model.norm, model.bias, model.tied_embeddings) == ("swiglu", "rms", (), False)


def test_old_spellings_and_missing_key_value_heads_are_read() -> None:
    model = parse_config({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 100})
    assert (model.d_ff, model.num_kv_heads, model.max_positions, model.positions) == (256, 8, 1024, "learned")
    assert model.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"attention_bias": True}, "bias", ("qkv", "attention_out")),
        ({"mlp_bias": True}, "bias", ("mlp",)),
        ({"model_type": "qwen2"}, "bias", ("qkv",)),
        ({"model_type": "qwen3"}, "qk_norm", True),
        ({"model_type": "mistral", "sliding_window": 32}, "sliding_window", 32),
        ({"model_type": "mistral", "sliding_window": None}, "sliding_window", None),
        ({"model_type": "gemma2", "sliding_window": 32}, "global_every", 2),
        ({"model_type": "gemma3_text", "sliding_window": 32}, "global_every", 6),
        (
            {"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
            "global_every",
            3,
        ),
        (
            {  # Gemma 3 4B: the list ends with layers that have a window
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4,
            },
            "global_every",
            6,
        ),
        (  # as transformers 5 writes it
            {"model_type": "qwen3_moe", "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            "num_experts",
            8,
        ),
        ({"model_type": "cohere"}, "parallel", True),
        ({"model_type": "cohere", "attention_bias": True}, "bias", ("qkv", "attention_out")),
        ({"head_dim": 16}, "head_dim", 16),
        ({"tie_word_embeddings": True}, "tied_embeddings", True),
    ],
)
def test_features_of_a_config_are_read(changes: dict[str, Any], name: str, value: object) -> None:
    assert getattr(parse_config({**LLAMA, **changes}), name) == value


@pytest.mark.parametrize(("length", "printed"), [(60, repr("x" * 58)), (61, "'" + "x" * 56 + "...")])
def test_a_long_value_is_cut(length: int, printed: str) -> None:
    """For a key that adds weights, and for one that changes values."""
    value = "x" * (length - len("''"))
    with pytest.raises(InputError, match=re.escape(f"kv_lora_rank = {printed}") + r"\W*( |$)"):
        parse_config({**LLAMA, "kv_lora_rank": value})
    assert parse_config({**LLAMA, "clip_qkv": value}).numerics.unread == (f"clip_qkv = {printed}",)


def test_a_nested_text_config_is_read() -> None:
    outer = {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}, "vision_config": {}}
    assert parse_config(outer).post_norms


def test_a_text_config_without_a_model_type_has_the_outer_one() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "model_type"}
    with pytest.raises(InputError, match="model_type is 'new_vl_text'"):
        parse_config({"model_type": "new_vl", "text_config": inner})


def test_the_outer_config_states_whether_the_head_is_tied() -> None:
    text = {**LLAMA, "model_type": "qwen2"}
    assert parse_config({"model_type": "a", "text_config": text, "tie_word_embeddings": True}).tied_embeddings
    nested = {"model_type": "a", "thinker_config": {"text_config": {**text, "tie_word_embeddings": True}}}
    assert parse_config(nested).tied_embeddings


# Sizes of released towers, and their parameters as `transformers` 5.23 builds them.
QWEN_TOWER = {
    "depth": 27, "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "num_position_embeddings": 2304,
    "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_channels": 3, "patch_size": 14}
KIMI_TOWER = {
    "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_hidden_layers": 27, "patch_size": 14,
    "init_pos_emb_height": 64, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2],
}  # fmt: skip
MINIMAX_TOWER = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_channels": 3, "patch_size": 14,
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip
LLAMA_TOWER = {
    "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_channels": 3, "patch_size": 14,
    "image_size": 336, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096, "projector_output_dim": 4096,
    "vision_output_dim": 4096,
}  # fmt: skip
GEMMA4_TOWER = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 72, "position_embedding_size": 10240, "patch_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "tower", "width", "num_params"),
    [
        ("qwen3_vl", QWEN_TOWER, 4096, 576_388_336),
        ("gemma3", {**SIGLIP, "image_size": 224, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                    "patch_size": 16}, 2304, 94_654_464),
        ("gemma4", GEMMA4_TOWER, 2816, 572_792_112),
        ("llama4", LLAMA_TOWER, 5120, 871_932_416),
        ("kimi_k25", KIMI_TOWER, 7168, 471_143_920),
        ("minimax_m3_vl", MINIMAX_TOWER, 6144, 865_567_232),
        ("step3p7", {"patch_size": 14}, 4096, 1_981_014_784),
        ("qwen3_vl", {"depth": 27}, 4096, None),
        ("qwen3_vl", {**QWEN_TOWER, "depth": "27"}, 4096, None),
        ("another", QWEN_TOWER, 4096, None),
    ],
)  # fmt: skip
def test_a_tower_is_left_out_and_counted(
    model_type: str, tower: dict[str, Any], width: int, num_params: int | None
) -> None:
    config = {"model_type": model_type, "vision_config": tower, "text_config": {**LLAMA, "hidden_size": width}}
    (part,) = parse_config(config).omitted_parts
    assert (part.name, part.num_params) == ("vision tower", num_params)


def test_the_report_names_omitted_parts_and_the_stored_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = {
        "model_type": "qwen3_vl",
        "vision_config": QWEN_TOWER,
        "audio_config": {"layers": 3},
        "text_config": LLAMA,
    }
    path.write_text(json.dumps({**config, "quantization_config": quantization}), encoding="utf-8")
    omitted = "its vision tower (0.58B parameters) and audio tower (size not known) are left out"
    stored = "stored in fp8 (e4m3, blocks of 128x128): planned is the model in the job's precision"
    job = ["h100:2", "--layout=fsdp=2", "--seq-len=32"]
    for verb in ("estimate", "memory"):
        assert main([verb, str(path), *job]) == 0
        text = capsys.readouterr().out
        assert omitted in text
        assert stored in text
    assert main(["estimate", str(path), *job, "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert any(omitted in note for note in payload["estimate"]["notes"])
    parts = [{"name": "vision tower", "num_params": 576_388_336}, {"name": "audio tower", "num_params": None}]
    assert payload["model"]["omitted_parts"] == parts
    assert main(["show", "models", str(path)]) == 0
    assert re.search(r"omitted_parts.audio tower +size not known", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4 (modelopt)"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors (float-quantized)"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"bits": 4}, "a quantised format"),
        (None, ""),
    ],
)
def test_a_quantised_config_is_read_as_the_architecture(config: dict[str, Any] | None, text: str) -> None:
    plain = parse_config(LLAMA)
    quantised = parse_config({**LLAMA, "quantization_config": config})
    assert quantised.stored_format == text
    assert num_params(quantised) == num_params(plain)


@pytest.mark.parametrize(
    ("config", "phrases"),
    [
        ({"model_type": "mamba9"}, ["'mamba9'", "such as llama, mistral"]),
        ({"model_type": "lama"}, ["'lama' (did you mean 'llama'?), which is not known"]),
        ({"model_type": "rwkv"}, ["'rwkv'", "not planned for: it has time mixing"]),
        ({}, ["model_type is None"]),
        (
            {"model_type": "llama", "hidden_size": 64},
            ["num_hidden_layers or n_layer", "intermediate_size", "vocab_size"],
        ),
        ({**LLAMA, "num_local_experts": 8}, ["num_local_experts = 8", "not known with that"]),
        ({**LLAMA, "hidden_size": -1}, ["d_model is -1"]),
        ({**LLAMA, "num_attention_heads": "many"}, ["num_heads is 'many'"]),
        ({**LLAMA, "num_key_value_heads": 3}, ["not a multiple of num_kv_heads = 3"]),
    ],
)
def test_unsupported_configs_are_refused(config: dict[str, Any], phrases: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(config)
    for phrase in phrases:
        assert phrase in str(caught.value)


EXPERTS = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN = {**EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}
LATENT = {
    **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10, "num_nextn_predict_layers": 1,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "ffn_dim": 96, "vocab_size": 100,
    "max_position_embeddings": 32, "activation_function": "relu",
}  # fmt: skip
FALCON = {
    "model_type": "falcon",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
MPT = {
    "model_type": "mpt",
    "d_model": 64,
    "n_layers": 3,
    "n_heads": 8,
    "vocab_size": 100,
    "attn_config": {"alibi": True},
}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (QWEN, {"d_ff": 32, "shared_expert_width": 64, "shared_gate": True, "bias": ("qkv",), "experts_per_token": 2}),
        ({**QWEN, "qkv_bias": False}, {"bias": ()}),
        ({**LLAMA, "model_type": "olmo2"}, {"pre_norms": False, "post_norms": True, "qk_norm_over": "projection"}),
        (
            {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
            {
                "sinks": True, "mlp": "clamped_swiglu", "bias": ("qkv", "attention_out", "router", "experts"),
                "sliding_window": 16, "global_every": 2,
            },
        ),
        (
            LATENT,
            {
                "head_dim": 16, "rope_head_dim": 4, "v_head_dim": 10, "kv_lora_rank": 16, "q_lora_rank": 0, "d_ff": 32,
                "num_dense_layers": 1, "dense_d_ff": 96, "shared_expert_width": 64, "num_predict_layers": 1,
            },
        ),
        (OPT, {"d_ff": 96, "max_positions": 34, "mlp": "relu", "bias": ("qkv", "attention_out", "mlp")}),
        (FALCON, {"num_kv_heads": 1, "d_ff": 256, "parallel": True, "separate_norms": False, "positions": "rotary"}),
        ({**FALCON, "multi_query": False, "alibi": True}, {"num_kv_heads": 8, "positions": "none"}),
        ({**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, {"num_kv_heads": 2, "separate_norms": True}),
        ({**FALCON, "parallel_attn": False}, {"parallel": False, "separate_norms": False}),
        (MPT, {"d_ff": 256, "positions": "none", "norm_bias": False, "bias": ()}),
        (
            {"model_type": "bloom", "n_embed": 64, "n_layer": 3, "num_attention_heads": 8, "vocab_size": 100},
            {"d_model": 64, "d_ff": 256, "embedding_norm": True, "positions": "none"},
        ),
        ({**LLAMA, "model_type": "gpt_neox"}, {"parallel": True, "separate_norms": True}),
    ],
)  # fmt: skip
def test_features_of_a_family_are_read(config: dict[str, Any], fields: dict[str, Any]) -> None:
    model = parse_config(config)
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("config", "phrases"),
    [
        ({**QWEN, "decoder_sparse_step": 0}, ["decoder_sparse_step is 0; an interval of layers is required"]),
        ({**QWEN, "use_sliding_window": True}, ["use_sliding_window = True (known: False)"]),
        ({**EXPERTS, "model_type": "qwen2_moe"}, ["the config lacks shared_expert_intermediate_size"]),
        ({**EXPERTS, "model_type": "qwen3_moe", "n_shared_experts": 1}, ["n_shared_experts = 1"]),
        ({**EXPERTS, "model_type": "mixtral"}, ["the config lacks num_local_experts"]),
        ({**LLAMA, "model_type": "mixtral", "num_local_experts": 0, "num_experts_per_tok": 2}, ["0; at least 1"]),
        ({**LLAMA, "model_type": "mistral", "kv_lora_rank": 16}, ["kv_lora_rank = 16"]),
        ({**LLAMA, "model_type": "cohere2", "use_qk_norm": True}, ["a cohere2 with use_qk_norm = True"]),
        ({**LLAMA, "layer_types": ["linear_attention"] * 3}, ["layer_types = ['linear_attention'"]),
        (
            {**LLAMA, "model_type": "gemma2", "sliding_window": 8, "layer_types": ["sliding_attention", "chunked"] * 2},
            ["its layers cannot be read", "layer_types is not a list of a value for each of 3 layers"],
        ),
        ({**LATENT, "moe_layer_freq": 2}, ["moe_layer_freq = 2 (known: 1)"]),
        ({**LATENT, "attention_bias": True}, ["attention_bias = True (known: False)"]),
        ({**LATENT, "index_topk": 2048}, ["index_topk = 2048"]),
        ({k: v for k, v in LATENT.items() if k != "q_lora_rank"}, ["the config lacks q_lora_rank"]),
        ({**LATENT, "first_k_dense_replace": 4}, ["first_k_dense_replace is 4; a number of the 3 layers"]),
        ({**LATENT, "mlp_layer_types": ["sparse"] * 3}, ["mlp_layer_types and first_k_dense_replace say different layers"]),
        ({**LATENT, "mlp_layer_types": ["dense", "hash", "sparse"]}, ["mlp_layer_types has 'hash'; of dense, sparse some"]),
        ({**LLAMA, "model_type": "cwm", "layer_types": ["full_attention"] * 2 + ["chunked"]}, ["'chunked'; of full_attention"]),
        ({**OPT, "word_embed_proj_dim": 32}, ["word_embed_proj_dim is 32"]),
        ({**OPT, "do_layer_norm_before": False}, ["do_layer_norm_before = False (known: True)"]),
        ({**OPT, "activation_function": "silu"}, ["activation_function is 'silu'; one of relu, gelu is known here"]),
        ({**OPT, "enable_bias": "yes"}, ["enable_bias is 'yes'; true or false is required"]),
        ({**FALCON, "new_decoder_architecture": True, "parallel_attn": False}, ["parallel_attn false is not known"]),
        ({**MPT, "attn_config": {"alibi": False}}, ["alibi = False"]),
        ({**MPT, "attn_config": {"alibi": True, "kv_n_heads": 2}}, ["kv_n_heads = 2"]),
        ({**MPT, "attn_config": {}}, ["attn_config has no alibi"]),
        ({**MPT, "no_bias": False}, ["no_bias = False (known: True)"]),
        ({**LATENT, "model_type": "deepseek_v92", "index_topk": 1}, ["'deepseek_v92' (", "(its config sets", "index_topk"]),
        ({**LLAMA, "model_type": ["llama"]}, ["model_type is ['llama']"]),
        ({"model_type": "falcon"}, ["lacks num_hidden_layers or n_layer or n_layers, hidden_size or", "vocab_size"]),
    ],
)  # fmt: skip
def test_features_unknown_to_a_family_are_refused(config: dict[str, Any], phrases: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(config)
    for phrase in phrases:
        assert phrase in str(caught.value)


@pytest.mark.parametrize(
    ("config", "pattern", "kinds"),
    [
        (
            {
                **LLAMA, "model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 8,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            ("block*3", "sliding_attention"), {"sliding_attention": {"sliding_window": 8}},
        ),
        (
            {**QWEN, "num_hidden_layers": 4, "decoder_sparse_step": 2},
            ("dense", "block"),
            {"dense": {"d_ff": 96, "num_experts": 0, "experts_per_token": 0, "shared_expert_width": 0, "shared_gate": False}},
        ),
        (
            {**LLAMA, "model_type": "cwm", "num_hidden_layers": 8, "sliding_window": 8},
            ("full_attention", "block*3"), {"full_attention": {"sliding_window": None}},
        ),
    ],
)  # fmt: skip
def test_layers_that_differ_are_kinds(
    config: dict[str, Any], pattern: tuple[str, ...], kinds: dict[str, dict[str, Any]]
) -> None:
    model = parse_config(config)
    assert model.layer_pattern == pattern
    assert {name: dict(fields) for name, fields in model.layer_kinds.items()} == kinds


def test_a_listed_first_dense_layer_needs_no_pattern() -> None:
    listed = {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    assert parse_config(listed) == parse_config(LATENT)
    all_dense = parse_config({**LATENT, "first_k_dense_replace": 3})
    assert (all_dense.num_experts, all_dense.d_ff, all_dense.layer_pattern) == (0, 96, ())


def test_configs_are_read_from_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert load_model(str(folder)).name == "my-model"
    assert load_model(str(folder / "config.json")) == load_model(str(folder))


@pytest.mark.parametrize(
    ("text", "phrase"), [("{", "is not JSON"), ("[1]", "an object with a model_type"), (None, "cannot read")]
)
def test_unusable_files_are_refused(text: str | None, phrase: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=phrase):
        load_config(path)


# Parameters as the weights, the model cards or the papers give them.
OFFICIAL = {
    "gpt-2": 124.4e6, "gpt-2-medium": 354.8e6, "gpt-2-large": 774.0e6, "gpt-2-xl": 1557.6e6, "gpt-3-175b": 174.6e9,
    "llama-2-7b": 6.74e9, "llama-2-13b": 13.0e9, "llama-2-70b": 69.0e9, "llama-3-8b": 8.03e9, "llama-3-70b": 70.6e9,
    "llama-3-405b": 405.9e9, "llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.6e9, "llama-3.1-405b": 405.9e9,
    "llama-3.2-1b": 1.24e9, "llama-3.2-3b": 3.21e9, "llama-3.3-70b": 70.6e9, "tinyllama-1.1b": 1.1e9, "smollm3-3b": 3.08e9,
    "mistral-7b": 7.24e9, "mistral-nemo-12b": 12.25e9, "mistral-small-24b": 23.57e9, "mistral-large-123b": 122.6e9,
    "mixtral-8x7b": 46.7e9, "mixtral-8x22b": 140.6e9,
    "qwen2.5-0.5b": 0.494e9, "qwen2.5-1.5b": 1.54e9, "qwen2.5-3b": 3.09e9, "qwen2.5-7b": 7.61e9, "qwen2.5-14b": 14.77e9,
    "qwen2.5-32b": 32.76e9, "qwen2.5-72b": 72.7e9, "qwen3-4b": 4.02e9, "qwen3-8b": 8.2e9, "qwen3-14b": 14.8e9,
    "qwen3-32b": 32.8e9, "qwen1.5-moe-a2.7b": 14.3e9, "qwen2-57b-a14b": 57.4e9, "qwen3-30b-a3b": 30.5e9,
    "qwen3-235b-a22b": 235e9, "qwen3-coder-480b-a35b": 480e9,
    "gemma-2b": 2.51e9, "gemma-7b": 8.54e9, "gemma-2-2b": 2.61e9, "gemma-2-9b": 9.24e9, "gemma-2-27b": 27.2e9,
    "gemma-3-270m": 268e6, "gemma-3-1b": 1.0e9, "gemma-3-4b": 3.88e9, "gemma-3-12b": 11.77e9, "gemma-3-27b": 27.0e9,
    "gpt-oss-20b": 20.91e9, "gpt-oss-120b": 116.83e9,
    "deepseek-v2-lite": 15.7e9, "deepseek-v2": 236e9, "deepseek-v3": 671e9, "moonlight-16b-a3b": 15.96e9,
    "olmo-2-7b": 7.3e9, "olmo-2-13b": 13.7e9, "olmo-2-32b": 32.2e9, "olmoe-1b-7b": 6.92e9, "phi-3-mini": 3.82e9,
    "phi-4": 14.66e9, "gpt-neox-20b": 20.55e9, "pythia-12b": 11.85e9, "opt-175b": 175e9, "bloom-176b": 176.25e9,
    "falcon-7b": 6.92e9, "falcon-40b": 41.3e9,
    "palm-8b": 8.63e9, "palm-62b": 62.50e9, "palm-540b": 540.35e9, "mpt-7b": 6.65e9, "mpt-30b": 29.97e9,
    "tiny-llama-15m": 15.2e6, "tiny-llama-42m": 41.7e6, "tiny-llama-110m": 110e6,
}  # fmt: skip
# What is published in two digits only, or in the model's name.
ROUNDED = {
    "gpt-3-125m": 125e6, "gpt-3-350m": 350e6, "gpt-3-760m": 760e6, "gpt-3-1.3b": 1.3e9, "gpt-3-2.7b": 2.7e9,
    "gpt-3-6.7b": 6.7e9, "gpt-3-13b": 13e9, "qwen3-0.6b": 0.6e9, "qwen3-1.7b": 1.7e9, "mpt-1b": 1.3e9, "mpt-3b": 2.65e9,
    "mpt-13b": 13e9, "glm-4.5": 355e9, "glm-4.5-air": 106e9, "kimi-k2": 1.03e12,
    "minimax-m2.5": 230e9, "glm-5": 744e9, "qwen3.5-397b-a17b": 397e9, "qwen3.5-2b": 1.9e9, "qwen3.5-4b": 4.2e9,
    "qwen3.5-9b": 9e9, "qwen3.5-27b": 27e9, "qwen3.5-35b-a3b": 35e9, "qwen3.5-122b-a10b": 122e9, "qwen3-next-80b-a3b": 80e9,
    "gemma-4-26b-a4b": 25.2e9, "gemma-4-31b": 30.7e9, "glm-4.7-flash": 30e9, "minimax-m2": 229e9, "deepseek-v3.2": 671e9,
    "kimi-linear-48b-a3b": 49e9, "llama-4-scout": 109e9, "nemotron-3-nano-30b-a3b": 31.6e9, "olmo-3-7b": 7.3e9,
    "olmo-3-32b": 32.2e9, "smollm2-135m": 135e6, "smollm2-360m": 362e6, "smollm2-1.7b": 1.71e9, "starcoder2-7b": 7.4e9,
    "starcoder2-15b": 16e9, "phi-1.5": 1.42e9, "phi-2": 2.78e9, "ernie-4.5-21b-a3b": 21.9e9, "ernie-4.5-0.3b": 0.36e9,
    "seed-oss-36b": 36e9,
}  # fmt: skip


@pytest.mark.parametrize("name", OFFICIAL)
def test_counts_of_the_catalogue_equal_the_model_cards(name: str) -> None:
    assert num_params(load_model(name)) == pytest.approx(OFFICIAL[name], rel=5e-3)


@pytest.mark.parametrize("name", ROUNDED)
def test_the_catalogue_is_near_rounded_sizes(name: str) -> None:
    assert num_params(load_model(name)) == pytest.approx(ROUNDED[name], rel=2e-2)


def test_every_model_of_the_catalogue_is_checked() -> None:
    released = {name for name in model_names() if not load_model(name).source.startswith("made up here")}
    assert released == {*OFFICIAL, *ROUNDED}
    assert all(load_model(name).source for name in model_names())


# Active parameters as the cards give them; gpt-oss's card leaves the embedding out (1.16 billion with the head, in equal parts).
ACTIVE = {
    "mixtral-8x7b": 12.9e9, "mixtral-8x22b": 39.1e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22.2e9,
    "qwen3-coder-480b-a35b": 35e9, "qwen1.5-moe-a2.7b": 2.7e9, "qwen2-57b-a14b": 14.2e9, "olmoe-1b-7b": 1.28e9,
    "gpt-oss-20b": 3.61e9 + 0.58e9, "gpt-oss-120b": 5.13e9 + 0.58e9, "deepseek-v2": 21e9, "deepseek-v3": 37e9,
    "kimi-k2": 32.9e9,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_equal_the_model_cards(name: str) -> None:
    assert num_active_params(load_model(name)) == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize("num_experts", ["8", [1], -3, True, 2.5, float("inf"), {}])
def test_an_invalid_number_of_experts_is_refused(num_experts: object) -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": num_experts, "num_experts_per_tok": 2}
    with pytest.raises(InputError, match="experts"):
        parse_config(config)


def test_a_window_costs_less_attention() -> None:
    model = load_model("gemma-2-9b")
    assert model.mean_attended_share(4096) == 0.5
    share = 4096 / 16384
    assert model.mean_attended_share(16384) == pytest.approx((0.5 + share - share**2 / 2) / 2)
