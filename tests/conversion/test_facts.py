"""Names and shapes of what is written, against those of the frameworks' own models: `facts.json`.

They are what `benchmarks/weights_check/torchtitan.py --facts` and `megatron.py --facts` print for these sizes, with the release.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.interop.frameworks.megatron.weight_names import (
    DISTRIBUTED_NAMES,
    NUMBERED,
    RANK_NAMES,
    STACKED,
    megatron_weight_table,
)
from shardwise.interop.frameworks.torchtitan.models import torchtitan_model
from shardwise.interop.weights.distributed_checkpoints import layer_prefix, megatron_slices
from shardwise.interop.weights.megatron_rank_files import RankDegrees, rank_slices, rank_weight_table
from shardwise.interop.weights.stored_slices import list_slices
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import DEFAULT_NUMERICS, SIGMOID, Gating, Numerics
from shardwise.values.boxes import Shape

FACTS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))


def facts(name: str) -> list[Any]:
    return [pytest.param(fact, id=fact["name"]) for fact in FACTS if fact["format"] == name]


def model_of(fact: dict[str, Any]) -> Architecture:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fact["model"].items()}
    numerics = Numerics(gating=Gating(scores=SIGMOID)) if fact["sigmoid"] else DEFAULT_NUMERICS
    return Architecture(name=fact["name"], **fields, numerics=numerics)


def shapes(fact: dict[str, Any]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in fact["tensors"].items()}


@pytest.mark.parametrize("fact", facts("torchtitan"))
def test_a_checkpoint_for_torchtitan_has_the_tensors_of_its_model(fact: dict[str, Any]) -> None:
    model = model_of(fact)
    listed = {place.name: place.tensor_shape for place in list_slices(model, torchtitan_model(model).weight_table)}
    assert listed == shapes(fact)


@pytest.mark.parametrize("fact", facts("megatron"))
def test_a_distributed_checkpoint_has_the_tensors_that_a_model_of_megatron_asks_for(fact: dict[str, Any]) -> None:
    """And those that one under Transformer Engine asks for beside them: norms in the products behind them."""
    model = model_of(fact)
    listed = {place.name: place.tensor_shape for place in megatron_slices(model, layer_prefix(model))}
    for name, shape in shapes(fact).items():
        rows = model.vocab_size if name in ("embedding.word_embeddings.weight", "output_layer.weight") else shape[0]
        assert listed.pop(name) == (rows, *shape[1:]), name
    fused = {
        "linear_q_up_proj.layer_norm_weight",
        "linear_kv_up_proj.layer_norm_weight",
        "linear_fc1.layer_norm_weight",
    }
    for name in listed:
        assert name.endswith((*fused, "pre_mlp_layernorm.weight")), name


@pytest.mark.parametrize("fact", facts("megatron-ranks"))
def test_a_file_of_a_rank_has_the_tensors_of_its_model(fact: dict[str, Any]) -> None:
    model, degrees = model_of(fact), RankDegrees(divisible=8)
    listed = {
        place.name: place.tensor_shape
        for place in rank_slices(model, rank_weight_table(model, "local", degrees), degrees)
    }
    assert listed == shapes(fact)


def test_norms_under_transformer_engine() -> None:
    """Source: get_gpt_layer_with_transformer_engine_submodules in models/gpt/gpt_layer_specs.py of Megatron-LM d98e8a64: norms
    stand in the products behind them, but for those in front of experts and of latent attention."""
    sizes = {"num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 9}
    routed = {"num_experts": 2, "experts_per_token": 2}
    latent = {"q_lora_rank": 2, "kv_lora_rank": 2, "rope_head_dim": 2, "v_head_dim": 2}
    linear, mlp, apart = (
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.weight",
    )
    latents = {f"self_attention.linear_{kind}_up_proj.layer_norm_weight" for kind in ("q", "kv")}
    cases = [({}, {linear, mlp}), (routed, {linear, apart}), (latent, {"input_layernorm.weight", mlp} | latents)]
    for fields, expected in cases:
        model = Architecture(name="a", head_dim=4, **sizes, **fields)
        for names, prefix in (
            (RANK_NAMES["transformer_engine"], "decoder.layers.0."),
            (DISTRIBUTED_NAMES[0], "decoder.layers."),
        ):
            naming = megatron_weight_table(model, names, NUMBERED if prefix.endswith("0.") else STACKED)
            norm_names = {
                place.name.removeprefix(prefix) for place in list_slices(model, naming) if "norm" in place.name
            }
            assert norm_names - {"decoder.final_layernorm.weight"} == expected
