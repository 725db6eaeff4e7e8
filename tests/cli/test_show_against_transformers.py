"""`show models --against-transformers`: the parameters of a config beside those of the model that transformers builds of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.present.command_line import main
from shardwise.verify import transformers_judge

QWEN: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **QWEN, "model_type": "deepseek_v3", "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10, "n_group": 1, "topk_group": 1, "head_dim": 4,
}  # fmt: skip
# Projections of streams are a matrix each in transformers, and one tensor here.
STREAMS: dict[str, Any] = {
    **QWEN, "model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 0, "laurel_rank": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 90, "altup_num_inputs": 3,
}  # fmt: skip

# Layers that attend to images alone are left out, and the others numbered in their order.
IMAGE_LAYERS: dict[str, Any] = {
    "model_type": "mllama", "vision_config": {"num_hidden_layers": 1, "num_global_layers": 1},
    "text_config": {
        **QWEN, "model_type": "mllama_text_model", "num_hidden_layers": 5, "cross_attention_layers": [1, 3], "pad_token_id": 1,
        "num_attention_heads": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip
GIT: dict[str, Any] = {
    "model_type": "git", "num_hidden_layers": 2, "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 32, "vision_config": {"num_hidden_layers": 1},
}  # fmt: skip


def compare(config: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert main(["show", "models", "--against-transformers", str(path), "--json"]) == 0
    ((_, values),) = [(entry["name"], entry["values"]) for entry in json.loads(capsys.readouterr().out)["entries"]]
    return {name: value["value"] for name, value in values.items()}


@pytest.mark.parametrize(
    "config", [QWEN, LATENT, STREAMS, IMAGE_LAYERS, GIT],
    ids=["tied", "fused matrices", "joined matrices", "layers of images", "layers in a singular"],
)  # fmt: skip
def test_equal_models_have_no_difference(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = compare(config, tmp_path, capsys)
    assert values["transformers.first_difference"] == "none: all parameters are accounted for"
    assert values["transformers.num_params"] == values["num_params"]


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        (
            {"qk_norm": False},
            "layer 0: transformers has model.layers.0.self_attn.q_norm.weight [16]; left for it here: nothing",
        ),
        ({"sinks": True}, "layer 0: transformers has nothing for sinks [2, 4]"),
        (
            {"d_ff": 97},
            "layer 0: transformers has model.layers.0.mlp.gate_proj.weight [96, 64]; left for it here: w_up [97, 64]",
        ),
        ({"num_layers": 4}, "layer 3: transformers has nothing for "),
        (
            {"vocab_size": 101},
            "outside the layers: transformers has model.embed_tokens.weight [100, 64]; left for it here: ",
        ),
    ],
)
def test_the_first_difference_is_named(
    fields: dict[str, Any], difference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    parse = transformers_judge.parse_config
    monkeypatch.setattr(
        transformers_judge, "parse_config", lambda config, name: replace(parse(config, name=name), **fields)
    )
    assert compare(QWEN, tmp_path, capsys)["transformers.first_difference"].startswith(difference)


@pytest.mark.parametrize(
    ("arguments", "config", "words"),
    [
        (["models", "llama-3-8b"], QWEN, "--against-transformers: found with llama-3-8b; it goes with models"),
        (["chips"], QWEN, "found with chips"),
        (["models"], {**QWEN, "num_attention_heads": 7}, "num_heads = 7 is not a multiple"),
        (["models"], {**QWEN, "hidden_act": "none"}, "cannot build the model of this config"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], config: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert main(["show", *arguments, "--against-transformers", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_without_transformers_it_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_judge, "find_spec", lambda name: None)
    assert main(["show", "models", "--against-transformers", str(tmp_path / "config.json")]) == 2
    assert "they are required: pip install transformers torch" in capsys.readouterr().err
