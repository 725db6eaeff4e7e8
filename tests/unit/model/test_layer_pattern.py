"""Kinds of layers beside the base layer, and which kind each layer is."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.model.architecture import Architecture
from shardwise.model.decoder import UNIT_PROGRAMS, routes_tokens, unit_program, units_of_structure
from shardwise.model.layer_pattern import (
    KIND_FIELDS,
    OTHER_UNITS,
    FrozenFields,
    compress_layers,
    describe_layers,
    expand_pattern,
)
from shardwise.model.load import load_model
from shardwise.model.parameters_and_flops import (
    layer_training_flops,
    model_flops_per_token,
    num_active_params,
    num_params,
    params_by_part,
    unit_training_flops,
)
from shardwise.present.reports.catalogue import _pattern_text
from shardwise.price.problem import resolve_problem
from shardwise.values import to_json
from shardwise.values.errors import InputError
from shardwise.values.payload import known_fields, parse_dataclass

NO_EXPERTS = {"num_experts": 0, "experts_per_token": 0, "shared_expert_width": 0}
D, F, N, K, H, V, M, E = 64, 160, 8, 2, 16, 512, 48, 4
PLAIN = Architecture(
    name="plain", num_layers=12, d_model=D, d_ff=F, num_heads=N, num_kv_heads=K, head_dim=H, vocab_size=V
)


def model_with_pattern(pattern: tuple[str, ...], kinds: dict[str, dict[str, Any]], **fields: Any) -> Architecture:
    return dataclasses.replace(PLAIN, layer_pattern=pattern, layer_kinds=kinds, **fields)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_a_compressed_pattern_has_the_same_layers(layers: list[str]) -> None:
    pattern = compress_layers(layers)
    assert expand_pattern(pattern, len(layers)) == tuple(layers)
    assert len(pattern) <= len(layers)


def test_a_pattern_is_repeated_and_may_end_in_its_middle() -> None:
    model = model_with_pattern(("window*2", "block"), {"window": {"sliding_window": 8}}, num_layers=8)
    assert model.layer_units == ("window", "window", "block") * 2 + ("window", "window")
    assert model.layer_counts == {"window": 6, "block": 2}
    assert [model.count_layers(begin, end)["window"] for begin, end in ((0, 2), (1, 4), (5, 5), (0, 8))] == [2, 2, 0, 6]
    assert [model.attention_window(layer) for layer in range(4)] == [8, 8, None, 8]
    assert model.num_windowed_layers == 6


def test_units_other_than_layers_have_separate_programs() -> None:
    assert set(OTHER_UNITS) == UNIT_PROGRAMS.keys()
    assert {*KIND_FIELDS} <= {field.name for field in dataclasses.fields(Architecture)}


def attention(heads: int, kv_heads: int) -> int:
    """Weights of attention with its norm."""
    return 2 * D * heads * H + 2 * D * kv_heads * H + D


def mlp(width: int) -> int:
    return 3 * D * width + D


def test_parameters_are_counted_kind_by_kind() -> None:
    """By hand: experts on every third layer, layers of attention or an MLP only, other heads; two tables and the last norm."""
    kinds = {
        "dense": {**NO_EXPERTS, "d_ff": F, "num_heads": 4},
        "attention": {**NO_EXPERTS, "feed_forward": "none", "num_kv_heads": 4},
        "mlp": {**NO_EXPERTS, "mixer": "none", "d_ff": 2 * F},
    }
    model = model_with_pattern(
        ("dense", "attention", "block", "mlp"),
        kinds,
        d_ff=M,
        num_experts=E,
        experts_per_token=1,
        shared_expert_width=24,
    )
    experts = 3 * E * D * M + D * E + 3 * D * 24 + D
    layers = [attention(4, K) + mlp(F), attention(N, 4), attention(N, K) + experts, mlp(2 * F)]
    total = 3 * sum(layers) + 2 * V * D + D
    assert num_params(model) == total == sum(params_by_part(model).values())
    assert num_active_params(model) == total - 3 * (E - 1) * 3 * D * M
    assert model.num_routers == 3
    structure = model.structure
    assert units_of_structure(structure) == ("embedding", "dense", "attention", "mlp", "block", "head")
    assert [unit for unit in units_of_structure(structure) if routes_tokens(structure, unit)] == ["block"]
    assert not [name for name in unit_program(structure, "mlp").weights if name.startswith("w") and "_" not in name]


def test_flops_are_counted_kind_by_kind() -> None:
    """2 FLOPs per weight of a product forward; scores over the attended pairs: a window, half the square, or none."""
    seq_len, window = 32, 8
    kinds = {
        "window": {"sliding_window": window, "num_heads": 4, "num_kv_heads": 1},
        "mlp": {"mixer": "none", "d_ff": 2 * F},
    }
    model = model_with_pattern(("window", "block", "mlp"), kinds)
    num_pairs = {"window": window * seq_len - window**2 / 2, "block": seq_len**2 / 2, "mlp": 0.0}
    heads, weights = (
        {"window": 4, "block": N, "mlp": 0},
        {"window": attention(4, 1) + mlp(F) - 2 * D, "block": attention(N, K) + mlp(F) - 2 * D, "mlp": mlp(2 * F) - D},
    )
    forward = {unit: 2 * seq_len * weights[unit] + 4 * num_pairs[unit] * heads[unit] * H for unit in num_pairs}
    for unit, flops in forward.items():
        assert unit_training_flops(model, unit, seq_len) == pytest.approx((flops, 2 * flops), rel=1e-12)
    total = 4 * 3 * sum(forward.values()) + 6 * seq_len * D * V
    assert model_flops_per_token(model, seq_len) * seq_len == pytest.approx(total, rel=1e-12)
    products, scores = layer_training_flops(model, seq_len)
    assert model.num_layers * (sum(products.values()) + scores) == pytest.approx(
        4 * 3 * sum(forward.values()), rel=1e-12
    )


@pytest.mark.parametrize("name", ["gemma-3-4b", "gemma-2-9b", "gpt-oss-20b"])
def test_windows_written_as_a_kind_have_the_same_counts(name: str) -> None:
    model = load_model(name)
    every = model.global_every
    as_kinds = dataclasses.replace(
        model, sliding_window=None, global_every=0, layer_pattern=(f"window*{every - 1}", "block"),
        layer_kinds={"window": {"sliding_window": model.sliding_window}},
    )  # fmt: skip
    assert num_params(as_kinds) == num_params(model)
    assert as_kinds.num_windowed_layers == model.num_windowed_layers
    assert [as_kinds.attention_window(n) for n in range(model.num_layers)] == [
        model.attention_window(n) for n in range(model.num_layers)
    ]
    assert model_flops_per_token(as_kinds, 8192) == pytest.approx(model_flops_per_token(model, 8192), rel=1e-12)


def test_layers_are_described_by_their_fields() -> None:
    """Jamba's and Llama 4's way: experts on every second layer."""
    dense, routed = {"d_ff": F, **NO_EXPERTS}, {"d_ff": M, **NO_EXPERTS, "num_experts": E, "experts_per_token": 1}
    fields = describe_layers([dense, routed] * 3, ["dense", "routed"] * 3)
    assert fields["num_experts"] == E
    assert fields["layer_pattern"] == ("dense", "block")
    assert fields["layer_kinds"] == {"dense": {"d_ff": F, "num_experts": 0, "experts_per_token": 0}}
    assert describe_layers([dense] * 3, ["dense"] * 3) == dense


@pytest.mark.parametrize(
    ("pattern", "kinds", "fields", "problem"),
    [
        (("block", "windw"), {"window": {"sliding_window": 8}}, {}, "layer_pattern has 'windw' (did you mean 'window'?)"),
        (("window",), {"window": {"sliding_window": 8}}, {}, "layer_pattern has no 'block' among its 12 layers"),
        (("block",), {"window": {"sliding_window": 8}}, {}, "layer_pattern has no 'window'"),
        ((), {"window": {"sliding_window": 8}}, {}, "layer_pattern names 0 layers of 12"),
        (("block", "window*0"), {"window": {}}, {}, "window*0"),
        (("block*13", "window"), {"window": {}}, {}, "layer_pattern has 'block*13'"),
        (("block", "head"), {"head": {}}, {}, "layer_kinds has 'head'; a name in small letters is required"),
        (("block", "a"), {"a": {"sliding_widow": 8}}, {}, "'sliding_widow' (did you mean 'sliding_window'?)"),
        (("block", "a"), {"a": {"d_model": 8}}, {}, "layer_kinds.a has 'd_model'"),
        (("block", "a"), {"a": {"num_heads": 7}}, {}, "model plain, layer_kinds.a: num_heads = 7 is not a multiple"),
        (("block", "a"), {"a": {"mixer": "atention"}}, {}, "did you mean 'attention'?"),
        (("block", "a"), {"a": {"mixer": "none", "feed_forward": "none"}}, {}, "does nothing; one of the two"),
        (("block", "a"), {"a": {"num_experts": 4, "experts_per_token": 1}}, {}, "experts that the base layer lacks"),
        (("block", "a"), {"a": {"positions": "learned"}}, {"max_positions": 8}, "learned positions are all layers' or none's"),
        (("block", "a"), {"a": {}}, {"global_every": 2, "sliding_window": 8}, "global_every beside a layer_pattern"),
        (
            ("block", "a"), {"a": {}}, {"num_experts": 4, "experts_per_token": 1, "num_dense_layers": 1, "dense_d_ff": 8},
            "num_dense_layers beside a layer_pattern",
        ),
    ],
)  # fmt: skip
def test_problems_of_patterns_are_named(
    pattern: tuple[str, ...], kinds: dict[str, dict[str, Any]], fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        model_with_pattern(pattern, kinds, **fields)


def test_a_pattern_is_read_back_from_its_payload_and_plain_models_print_none() -> None:
    model = model_with_pattern(("window", "block"), {"window": {"sliding_window": 8, "bias": ["qkv"]}})
    payload = to_json(model)
    assert payload["layer_kinds"] == {"window": {"sliding_window": 8, "bias": ["qkv"]}}
    read_back = parse_dataclass(Architecture, known_fields(Architecture, payload), "model")
    assert read_back == model
    assert hash(read_back) == hash(model)
    assert not {"layer_kinds", "layer_pattern", "mixer", "feed_forward"} & to_json(PLAIN).keys()


def test_patterns_are_set_field_by_field() -> None:
    overrides = ["model.layer_pattern=window*3,block", "model.layer_kinds.window.sliding_window=1Ki",
                 "model.layer_kinds.window.positions=none"]  # fmt: skip
    model = resolve_problem("llama-3-8b", ["h100:8"], fields={"overrides": overrides}).architecture
    assert model.layer_kinds == {"window": {"sliding_window": 1024, "positions": "none"}}
    assert model.layer_counts == {"window": 24, "block": 8}
    with pytest.raises(InputError, match=r"model\.layer_kinds\.window has no 'windw'"):
        resolve_problem("llama-3-8b", ["h100:8"], fields={"overrides": ["model.layer_kinds.window.windw=1"]})


def test_equality_of_frozen_fields_ignores_their_order() -> None:
    first, second = FrozenFields({"a": 1, "b": [2]}), FrozenFields({"b": (2,), "a": 1})
    assert first == second
    assert hash(first) == hash(second)


def test_adapters_freeze_kinds_without_adapters() -> None:
    """Only adapters are trained, so layers without their target matrices train nothing."""
    model = model_with_pattern(
        ("mlp", "block"), {"mlp": {"mixer": "none"}}, lora_rank=4, lora_targets=("q_proj",),
    )  # fmt: skip
    trained = {
        unit: [name for name in program.weights if not program.tensors[name].frozen]
        for unit in ("mlp", "block")
        for program in [unit_program(model.structure, unit)]
    }
    assert trained == {"mlp": [], "block": ["wq.lora_a", "wq.lora_b"]}


def test_a_long_pattern_is_printed_as_counts_of_each_kind() -> None:
    assert _pattern_text(("window*2", "block"), 6) == "window*2, block"
    pattern = tuple(f"window*{count}" if count % 2 else "block" for count in range(1, 19))
    text = _pattern_text(pattern, 90)
    assert text == "81 window, 9 block; --json has their order"
