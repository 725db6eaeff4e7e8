"""The constants of a model's arithmetic: from its config, from the library's defaults, and through a plan file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.model.huggingface.config import add_numerics, parse_config
from shardwise.model.huggingface.family_rules import FAMILIES
from shardwise.model.huggingface.numerics_reader import (
    DEEPSEEK_V2_ROUTER,
    DEEPSEEK_V3_ROUTER,
    EPSILON_KEYS,
    NumericsRule,
    RouterRule,
    read_numerics,
)
from shardwise.model.load import _read_catalogue, load_model, model_names
from shardwise.model.numerics import DEFAULT_NUMERICS, Gating, Numerics, Rotary

LLAMA_3_1: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 32, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip


# What a family's class leaves open and its models need.
REQUIRED_KEYS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6}, "gemma4_text": {"hidden_size_per_layer_input": 0},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
}  # fmt: skip


# Families that the library does not have by themselves, or not at all.
SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "step3p7_text": "step3p5"}
OUTSIDE_LIBRARY = ("nemotron-nas",)


def default_config(kind: str) -> dict[str, Any]:
    """Values of the library's config class of a family by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING

        required = REQUIRED_KEYS.get(kind, {})
        config = CONFIG_MAPPING[SAME_AS.get(kind, kind)](**required).to_dict()
    return {**config, "model_type": kind}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in OUTSIDE_LIBRARY])
def test_missing_keys_have_the_librarys_defaults(kind: str) -> None:
    config = default_config(kind)
    expected = parse_config(config).numerics
    spelt = {config[key] for key in EPSILON_KEYS if config.get(key) is not None}
    assert {expected.norm_epsilon} == (spelt or {1e-5})  # OPT leaves it to torch.nn.LayerNorm
    reduced = {key: value for key, value in config.items() if key not in (*EPSILON_KEYS, "rope_parameters")}
    numerics = parse_config(reduced).numerics
    assert (numerics.norm_epsilon, numerics.rotary.base) == (expected.norm_epsilon, expected.rotary.base)
    assert (numerics.local_rotary is None) == (expected.local_rotary is None)
    assert (
        numerics.local_rotary is None
        or expected.local_rotary is None
        or numerics.local_rotary.base == expected.local_rotary.base
    )


def test_a_llama_3_1_keeps_its_angles_through_a_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_1), encoding="utf-8")
    rotary = Rotary(base=500000.0, factor=8.0, original_positions=8192, low=1.0, high=4.0)
    job = sw.Job(global_batch_tokens=64, seq_len=32, precision="fp32")
    plan = sw.plan_layout(sw.load_model(str(path)), sw.load_cluster("local:1"), job, sw.Layout())
    sw.dump_plan(plan, tmp_path / "plan.json")
    assert sw.load_plan(tmp_path / "plan.json").model.numerics == Numerics(norm_epsilon=1e-5, rotary=rotary)


def test_a_plan_file_without_numerics_has_the_defaults(tmp_path: Path) -> None:
    plan = sw.plan_layout(
        sw.load_model("tiny-llama-15m"), sw.load_cluster("local:1"),
        sw.Job(global_batch_tokens=64, seq_len=32, precision="fp32"), sw.Layout(),
    )  # fmt: skip
    sw.dump_plan(plan, tmp_path / "plan.json")
    payload = json.loads((tmp_path / "plan.json").read_text())
    del payload["model"]["numerics"]
    (tmp_path / "plan.json").write_text(json.dumps(payload))
    assert sw.load_plan(tmp_path / "plan.json").model.numerics == DEFAULT_NUMERICS


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rotary angles of type 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "rotary angles on 0.5 of a head's width"),
        ({"hidden_act": "relu"}, "the activation 'relu' (modelled: silu or swish)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ],
)
def test_unmodelled_keys_of_a_config_are_named(changes: dict[str, Any], named: str) -> None:
    assert parse_config({**LLAMA_3_1, **changes}).numerics.unread == (named,)
    assert parse_config(LLAMA_3_1).numerics.unread == ()


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        ("minimax_m2", {"head_dim": 128, "rotary_dim": 64}, 0.5),
        ("minimax_m2", {"head_dim": 128, "rotary_dim": 64, "partial_rotary_factor": 0.25}, 0.25),
        ("minimax_m2", {"head_dim": 128}, 1.0),
        ("gptj", {"n_embd": 4096, "n_head": 16, "rotary_dim": 32}, 0.125),
        ("gptj", {"n_embd": 4096, "n_head": 16, "rotary_dim": None}, 1.0),
    ],
)
def test_a_config_may_set_the_number_of_rotary_elements(family: str, changes: dict[str, Any], part: float) -> None:
    config = default_config(family) | changes
    assert parse_config({**config, "rope_parameters": None}).numerics.rotary.part == part


def test_rotary_elements_are_at_most_those_of_a_head() -> None:
    with pytest.raises(
        sw.InputError, match="rotary_dim is 256; a number of a head's 128 elements is required, from 1 on"
    ):
        parse_config(default_config("minimax_m2") | {"head_dim": 128, "rotary_dim": 256, "rope_parameters": None})


def test_angles_of_each_kind_of_layer_are_read() -> None:
    angles = {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
    numerics = parse_config(default_config("mellum") | {"rope_parameters": angles}).numerics
    assert numerics.local_rotary is not None
    assert (numerics.rotary.base, numerics.local_rotary.base, numerics.unread) == (5e5, 1e4, ())


def test_granites_multipliers_are_read() -> None:
    config = default_config("granite") | {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
    }
    numerics = parse_config(config).numerics
    assert (numerics.embedding_scale, numerics.attention_scale) == (12.0, 0.015625)
    assert numerics.unread == ("residual_multiplier = 0.22",)


@pytest.mark.parametrize("name", model_names())
def test_the_catalogue_has_the_values_of_released_models(name: str) -> None:
    """By the keys of their config.json; models from papers without a config, and fictitious models, have the defaults."""
    table = _read_catalogue()[name]
    assert ("config" in table) == ("config" in table["source"] or name.startswith(("llama-3-", "mpt-", "tiny-llama")))
    if "config" in table:
        assert load_model(name).numerics == add_numerics(sw.load_model(name), table["config"]).numerics


# Keys of released config.json files that differ from the defaults of transformers' classes: rope_theta, rope_scaling (factor,
# original_max_position_embeddings), final_logit_softcapping, routed_scaling_factor, n_group and topk_group.
RELEASED: dict[str, tuple[float, float, int, float | None, tuple[float, int, int]]] = {
    "deepseek-v3.2": (1e4, 40.0, 4096, None, (2.5, 8, 4)),  # deepseek-ai/DeepSeek-V3.2
    "llama-4-scout": (5e5, 16.0, 8192, None, (1.0, 1, 1)),  # text_config of Llama-4-Scout-17B-16E-Instruct
    "gemma-4-26b-a4b": (1e6, 1.0, 0, 30.0, (1.0, 1, 1)),  # nvidia/Gemma-4-26B-A4B-NVFP4, its text_config
    "gemma-4-31b": (1e6, 1.0, 0, 30.0, (1.0, 1, 1)),  # nvidia/Gemma-4-31B-IT-NVFP4, its text_config
    "qwen3-next-80b-a3b": (1e7, 1.0, 0, None, (1.0, 1, 1)),  # Qwen/Qwen3-Next-80B-A3B-Instruct
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_numerics_of_recent_models_are_not_those_of_a_class(name: str) -> None:
    model = sw.load_model(name)
    numerics, (base, factor, positions, cap, gating) = model.numerics, RELEASED[name]
    assert (numerics.rotary.base, numerics.rotary.factor, numerics.rotary.original_positions) == (
        base,
        factor,
        positions,
    )
    assert numerics.logit_cap == cap
    assert (numerics.gating.scale, numerics.gating.groups, numerics.gating.chosen_groups) == gating
    assert model.num_predict_layers == (name == "deepseek-v3.2")


def test_numerics_of_released_models_equal_their_configs() -> None:
    assert sw.load_model("llama-3-8b").numerics == Numerics(norm_epsilon=1e-5, rotary=Rotary(base=500_000.0))
    gemma = sw.load_model("gemma-2-27b").numerics
    assert (gemma.attention_cap, gemma.logit_cap, gemma.attention_scale) == (50.0, 30.0, 144**-0.5)
    assert (gemma.norm_offset, gemma.embedding_scale) == (1.0, 4608**0.5)
    deepseek = sw.load_model("deepseek-v3").numerics
    assert deepseek.unread == ()
    assert deepseek.attention_scale == pytest.approx(
        0.1352337788608801
    )  # softmax_scale of the authors' inference/model.py
    assert deepseek.rotary == Rotary(
        factor=40.0, original_positions=4096, low=1.0, high=32.0, ramp="index", amplitude=1.0
    )
    assert sw.load_model("gpt-oss-20b").numerics.rotary.rounded is False
    numerics_by_name = {name: sw.load_model(name).numerics for name in ("glm-4.5", "glm-4.5-air", "gpt-neox-20b")}
    assert [(numerics.rotary.part, numerics.unread) for numerics in numerics_by_name.values()] == [
        (0.5, ()),
        (0.5, ()),
        (0.25, ()),
    ]


def test_gating_of_released_models_equals_their_configs() -> None:
    """Values are those of the models' config files."""
    numerics_by_name = {
        name: sw.load_model(name).numerics for name in ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2")
    }
    assert {name: (numerics.gating, numerics.normalised_gates) for name, numerics in numerics_by_name.items()} == {
        "deepseek-v2-lite": (Gating(), False),
        "deepseek-v2": (Gating(scale=16.0, groups=8, chosen_groups=3), False),
        "deepseek-v3": (Gating(scores="sigmoid", scale=2.5, groups=8, chosen_groups=4, votes=2), True),
        "kimi-k2": (Gating(scores="sigmoid", scale=2.827), True),
    }
    assert sw.load_model("glm-4.5").numerics.gating == Gating(scores="sigmoid", scale=2.5)


@pytest.mark.parametrize(("rule", "usual"), [(DEEPSEEK_V2_ROUTER, False), (DEEPSEEK_V3_ROUTER, True)])
def test_normalisation_of_gates_is_the_configs_or_else_the_librarys(rule: RouterRule, usual: bool) -> None:
    def normalised(config: dict[str, Any]) -> bool:
        return read_numerics(config, NumericsRule(router=rule), d_model=8, head_dim=4, mlp="swiglu").normalised_gates

    assert normalised({}) is normalised({"norm_topk_prob": None}) is usual
    assert normalised({"norm_topk_prob": True}) is True
    assert normalised({"norm_topk_prob": False}) is False


@pytest.mark.parametrize(
    ("gating", "problem"),
    [
        (Gating(scores="tanh"), "scores are 'tanh'; softmax or sigmoid is required"),
        (Gating(groups=3), "groups = 3 of 8 experts; a divisor of these is required"),
        (Gating(groups="2"), "groups = '2'; a whole number is required"),  # type: ignore[arg-type]
        (
            Gating(groups=4, chosen_groups=1),
            "chosen_groups = 1 of groups = 4, of 2 experts each; at least 1, at most all and",
        ),
        (Gating(groups=4, chosen_groups=5), "chosen_groups = 5 of groups = 4"),
        (Gating(groups=4, chosen_groups=2, votes=3), "votes = 3; 1 to 2 are required"),
        (Gating(groups=4, chosen_groups=2, votes=2), None),
    ],
)
def test_impossible_groups_of_experts_are_refused(gating: Gating, problem: str | None) -> None:
    message = gating.problem(num_experts=8, num_chosen=3)
    assert message == problem if problem is None else message is not None and problem in message
