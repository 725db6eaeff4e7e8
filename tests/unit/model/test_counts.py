"""Parameters and FLOPs, read off the programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwise.model.architecture import Architecture
from shardwise.model.load import load_model, model_names
from shardwise.model.parameters_and_flops import model_flops_per_token, num_active_params, num_mtp_params, num_params
from shardwise.values.errors import InputError

PARAMS = {
    "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496,
    "llama-3-405b": 405853388800,
    "llama-3.2-1b": 1235814400,
    "llama-2-13b": 13015864320,
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_of_released_models_equal_the_published_counts(name: str) -> None:
    assert num_params(load_model(name)) == PARAMS[name]


@pytest.mark.parametrize("mlp", ["swiglu", "geglu", "gelu", "relu"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_equal_the_closed_form(mlp: Any, tied: bool) -> None:
    layers, d, f, n, k, h, v = 3, 10, 24, 6, 2, 4, 50
    model = Architecture(
        name="m", num_layers=layers, d_model=d, d_ff=f, num_heads=n, num_kv_heads=k, head_dim=h, vocab_size=v,
        mlp=mlp, tied_embeddings=tied,
    )  # fmt: skip
    gates = 3 if mlp in ("swiglu", "geglu") else 2
    block = 2 * d * n * h + 2 * d * k * h + gates * d * f + 2 * d
    assert num_params(model) == layers * block + d + (1 if tied else 2) * v * d


@pytest.mark.parametrize("name", PARAMS)
def test_flops_are_6_per_weight_of_a_product_and_causal_attention(name: str) -> None:
    """6 N for every weight that multiplies, the head included and the norms and the embedding's rows not, and
    6 T n h per layer for the causal half of the scores."""
    model, seq_len = load_model(name), 4096
    norms = (2 * model.num_layers + 1) * model.d_model
    table = model.vocab_size * model.d_model
    multiplying = num_params(dataclasses.replace(model, tied_embeddings=False)) - norms - table
    attention = 6 * seq_len * model.num_heads * model.head_dim * model.num_layers
    assert model_flops_per_token(model, seq_len) == pytest.approx(6 * multiplying + attention, rel=1e-12)


def test_longer_sequences_need_more_flops_per_token() -> None:
    model = load_model("llama-3-8b")
    longer = model_flops_per_token(model, 8192) - model_flops_per_token(model, 4096)
    assert longer == pytest.approx(6 * 4096 * 32 * 128 * 32, rel=1e-9)


def test_an_unknown_model_gets_the_nearest_name() -> None:
    with pytest.raises(InputError) as caught:
        load_model("llama-4")
    assert str(caught.value) == (
        f"model: found 'llama-4' (did you mean 'llama-4-scout'?); one of the catalogue's {len(model_names())} models is required "
        "(`shardwise show models` lists them), or the path of a Hugging Face config.json or of its folder (nothing is fetched "
        "from a hub)"
    )
    assert set(PARAMS) <= set(model_names())


def test_spellings_of_names_are_normalised() -> None:
    assert load_model(" Llama-3-8B ") == load_model("llama-3-8b")


@pytest.mark.parametrize("name", model_names())
def test_every_model_has_a_source_and_is_near_its_nominal_size(name: str) -> None:
    model = load_model(name)
    assert len(model.source) > 10
    if model.nominal_num_params is not None:
        assert num_params(model) == pytest.approx(model.nominal_num_params, rel=0.25)


# DeepSeek-AI 2025, DeepSeek-V3 Technical Report, section 4.2
DEEPSEEK_V3 = Architecture(
    name="deepseek-v3", num_layers=61, d_model=7168, d_ff=2048, num_heads=128, num_kv_heads=128, head_dim=192,
    rope_head_dim=64, v_head_dim=128, kv_lora_rank=512, q_lora_rank=1536, vocab_size=129280, num_experts=256,
    experts_per_token=8, shared_expert_width=2048, num_dense_layers=3, dense_d_ff=18432, num_predict_layers=1,
)  # fmt: skip


def test_deepseek_v3_by_hand() -> None:
    """671 billion parameters, 37 of them active; the module of multi-token prediction adds 11.6 billion."""
    d, heads = 7168, 128
    attention = (
        (d + 1) * 1536 + 1536 * heads * 192 + d * 64 + (d + 1) * 512 + 512 * heads * (128 + 128) + heads * 128 * d
    )
    expert, router = 3 * d * 2048, 256 * d
    moe = attention + 2 * d + 257 * expert + router
    dense = attention + 2 * d + 3 * d * 18432
    ends = 2 * 129280 * d + d
    assert num_params(DEEPSEEK_V3) == 58 * moe + 3 * dense + ends
    assert num_active_params(DEEPSEEK_V3) == num_params(DEEPSEEK_V3) - 58 * 248 * expert
    assert num_mtp_params(DEEPSEEK_V3) == moe + 2 * d * d + 3 * d
    assert round(num_params(DEEPSEEK_V3) / 1e9) == 671
    assert int(num_active_params(DEEPSEEK_V3) / 1e9) == 37


def test_latent_attention_takes_flops_by_the_widths_of_its_heads() -> None:
    """Scores over 192 wide keys, results over 128 wide values, half of the square, three times for training."""
    short, long = (model_flops_per_token(DEEPSEEK_V3, n) for n in (1024, 2048))
    assert long - short == pytest.approx(3 * 62 * 128 * (192 + 128) * 1024)
