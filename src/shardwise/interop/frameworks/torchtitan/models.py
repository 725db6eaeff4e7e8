"""Models of torchtitan: the flavors of its registries, the tensor names of its models, and which models its code computes.

A flavor is a model by its name, and no option sets a size. Tables: `options/torchtitan_models.json` (0.3.0) and
`options/torchtitan_toml_models.json` (0.2.2), from the registries of the two wheels (models/*/__init__.py). They have the
fields (`launch.Launch.fields`) of each flavor whose weights, built without memory, are as many as those of the fields here;
`attention`, `max_seq_len`, `pipelines` and `splits_sequence` are from its code. Angles are scaled for sequences longer than
`scaled_beyond` alone, if a flavor has it (0.2.2, deepseek_v3/model/model.py). A magnitude of cos and sin may be part of the scale
of scores in its code (0.3.0, gpt_oss/model.py): the products are the same.

Source of weight names: the wheel of torchtitan 0.3.0, models/common (decoder.py, attention.py, feed_forward.py, moe.py),
models/llama3, models/qwen3 and models/deepseek_v3 (model.py, mtp.py, state_dict_adapter.py). Llama 3 and DeepSeek-V3 rotate
pairs of dims that lie side by side (ComplexRoPE), Qwen 3 the halves of a head (CosSinRoPE).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

from shardwise.interop.frameworks.weight_table import (
    ROTARY_FIELDS,
    ModelCondition,
    SupportedModels,
    TensorPattern,
    WeightTable,
    scaling_condition,
)
from shardwise.interop.launches.launch import COSTLESS_FIELDS, Launch
from shardwise.interop.launches.target import OptionMapping, OptionReader, Requirement
from shardwise.interop.text_formats.option_tables import Options, read_option_file
from shardwise.model import Architecture
from shardwise.values import InputError, describe_unknown


class Flavor(NamedTuple):
    """A model of a registry: its fields, and other facts about it in the release (`facts`)."""

    name: str
    flavor: str
    fields: Mapping[str, Any]
    facts: Mapping[str, Any]


@cache
def list_flavors(table: str) -> tuple[Flavor, ...]:
    """Return all flavors of a release from the package's table."""
    return tuple(
        Flavor(name, flavor, {field: _hashable(value) for field, value in facts.pop("parts").items()}, facts)
        for name, flavors in json.loads(read_option_file(f"{table}.json")).items()
        for flavor, facts in flavors.items()
    )


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _flavors_by_shape(table: str) -> Mapping[tuple[Any, ...], Flavor]:
    """Return flavors by their sizes; the first of several with the same sizes."""
    flavors: dict[tuple[Any, ...], Flavor] = {}
    for flavor in list_flavors(table):
        model_fields = {field: value for field, value in flavor.fields.items() if field.startswith("model.")}
        sizes = {field.removeprefix("model."): value for field, value in model_fields.items()}
        flavors.setdefault(_model_shape(Architecture(name="", **sizes)), flavor)
    return flavors


def _model_shape(model: Architecture) -> tuple[Any, ...]:
    """Return the sizes of a model without multi-token prediction, which is an argument of a registry."""
    names = [field.name for field in fields(model) if field.name not in (*COSTLESS_FIELDS, "num_predict_layers")]
    return tuple(tuple(sorted(model.bias)) if name == "bias" else getattr(model, name) for name in names)


def find_flavor(table: str, model: Architecture) -> Flavor | None:
    """Return the flavor with the sizes of a model, or None."""
    return _flavors_by_shape(table).get(_model_shape(model))


def flavor_facts(table: str, model: Architecture) -> Mapping[str, Any]:
    """Return a release's facts about a model beyond its sizes; empty for a model that it lacks."""
    flavor = find_flavor(table, model)
    return flavor.facts if flavor else {}


def default_attention(name: object, flavor: object) -> str | None:
    """Return the default kind of attention of a flavor of 0.3.0, or None."""
    attention = {(model.name, model.flavor): model.facts["attention"] for model in list_flavors("torchtitan_models")}
    return attention.get((str(name), str(flavor)))


def map_flavor(table: str) -> OptionMapping:
    """Map a model's sizes to `model.name` and `model.flavor`."""

    def write_flavor(launch: Launch) -> Options:
        flavor = find_flavor(table, launch.model)
        return {"model.name": flavor.name, "model.flavor": flavor.flavor} if flavor else {}

    return OptionMapping(write_flavor, lambda reader: _fields_of_flavor(read_flavor(table, reader), reader))


def _fields_of_flavor(flavor: Flavor, reader: OptionReader) -> Mapping[str, Any]:
    """Return the fields of a flavor, without scaled angles where its code does not scale them."""
    longest_unscaled = flavor.facts.get("scaled_beyond")
    if longest_unscaled is None or reader.get("training.seq_len", 2048) > longest_unscaled:
        return flavor.fields
    base = "numerics.rotary.base"
    return {
        name: value
        for name, value in flavor.fields.items()
        if name == base or not name.startswith(("numerics.rotary.", "numerics.attention_scale"))
    }


def read_flavor(table: str, reader: OptionReader) -> Flavor:
    """Return the flavor that options name. Raises `InputError` for one that the release lacks."""
    name, flavor = reader.get("model.name", "llama3"), reader.get("model.flavor", "debugmodel")
    flavors = {registered.flavor: registered for registered in list_flavors(table) if registered.name == name}
    if not flavors:
        raise InputError(
            f"model.name: {describe_unknown(str(name), dict.fromkeys(registered.name for registered in list_flavors(table)))}"
        )
    if flavor not in flavors:
        raise InputError(f"model.flavor: of {name}: {describe_unknown(str(flavor), flavors)}")
    return flavors[flavor]


def require_flavor(table: str, title: str) -> Requirement:
    """Return the requirement that a model is one of a release's flavors."""

    def message(launch: Launch) -> str:
        names = ", ".join(
            f"{flavor.name} {flavor.flavor}" for flavor in list_flavors(table) if "debug" not in flavor.flavor
        )
        return f"{launch.model.name} has not the sizes of any model in the registries of {title}; it has {names}"

    return Requirement(lambda launch: find_flavor(table, launch.model) is not None, message, reads_model=True)


LAYER_PREFIX, MODULE_PREFIX = TensorPattern("layers.{layer}."), TensorPattern("mtp_layers.{module}.")
_ENDS = {
    "embedding": TensorPattern("tok_embeddings.weight", "V, D"),
    "final_norm.weight": TensorPattern("norm.weight"),
    "head": TensorPattern("lm_head.weight", "V, D"),
}
_BLOCK = {
    "wq": TensorPattern("attention.qkv_linear.wq.weight", "K G H, D"),
    "wk": TensorPattern("attention.qkv_linear.wk.weight", "K H, D"),
    "wv": TensorPattern("attention.qkv_linear.wv.weight", "K H, D"),
    "wo": TensorPattern("attention.wo.weight", "D, K G H"),
    "attention_norm.weight": TensorPattern("attention_norm.weight"),
    "mlp_norm.weight": TensorPattern("ffn_norm.weight"),
    "w_gate": TensorPattern("feed_forward.w1.weight", "F, D"),
    "w_down": TensorPattern("feed_forward.w2.weight", "D, F"),
    "w_up": TensorPattern("feed_forward.w3.weight", "F, D"),
}
_PAIRS = {
    "wq": TensorPattern("attention.qkv_linear.wq.weight", "K G H~, D"),
    "wk": TensorPattern("attention.qkv_linear.wk.weight", "K H~, D"),
}
_QK_NORM = {
    "q_norm.weight": TensorPattern("attention.q_norm.weight"),
    "k_norm.weight": TensorPattern("attention.k_norm.weight"),
}
_EXPERTS = {
    "router": TensorPattern("moe.router.gate.weight", "E, D"),
    "experts_gate": TensorPattern("moe.routed_experts.inner_experts.w1_EFD", "{expert}, M, D"),
    "experts_down": TensorPattern("moe.routed_experts.inner_experts.w2_EDF", "{expert}, D, M"),
    "experts_up": TensorPattern("moe.routed_experts.inner_experts.w3_EFD", "{expert}, M, D"),
    "shared_gate": TensorPattern("moe.shared_experts.w1.weight", "S, D"),
    "shared_down": TensorPattern("moe.shared_experts.w2.weight", "D, S"),
    "shared_up": TensorPattern("moe.shared_experts.w3.weight", "S, D"),
}
_LATENT = {
    "w_q_down": TensorPattern("attention.wq_a.weight", "Q, D"),
    "q_latent_norm.weight": TensorPattern("attention.q_norm.weight"),
    "w_q_plain": TensorPattern("attention.wq_b.weight", "K G [I]+R, Q"),
    "w_q_rotary": TensorPattern("attention.wq_b.weight", "K G I+[R~], Q"),
    "w_kv_down": TensorPattern("attention.wkv_a.weight", "[C]+R, D"),
    "w_k_rotary": TensorPattern("attention.wkv_a.weight", "C+[R~], D"),
    "kv_latent_norm.weight": TensorPattern("attention.kv_norm.weight"),
    "w_k_up": TensorPattern("attention.wkv_b.weight", "K [I]+U, C"),
    "w_v_up": TensorPattern("attention.wkv_b.weight", "K I+[U], C"),
    "wo": TensorPattern("attention.wo.weight", "D, K G U"),
}
_DIRECT = {
    "w_q_plain": TensorPattern("attention.wq.weight", "K G [I]+R, D"),
    "w_q_rotary": TensorPattern("attention.wq.weight", "K G I+[R~], D"),
}
_PREDICT = {
    "embedding_norm.weight": TensorPattern("enorm.weight"),
    "hidden_norm.weight": TensorPattern("hnorm.weight"),
    "pair_projection": TensorPattern("eh_proj.weight", "D, J"),
    "final_norm.weight": TensorPattern("mtp_norm.weight"),
}
# A tied model's state dict has its single matrix under both names (Decoder.__init__).
_TIED = {"head": {"head": TensorPattern("lm_head.weight", "V, D")}}


def _weight_table(title: str, block: Mapping[str, TensorPattern]) -> WeightTable:
    return WeightTable(
        title=title, ends=_ENDS, block={**_BLOCK, **_EXPERTS, **block}, direct=_DIRECT, layer=LAYER_PREFIX, module=MODULE_PREFIX,
        predict=_PREDICT, copies=_TIED, balance_bias=TensorPattern("moe.expert_bias_E", "E"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchtitanModel:
    """A folder of torchtitan's models: its weight table, and the models that it computes."""

    weight_table: WeightTable
    models: SupportedModels


_ROUTED = frozenset({"num_experts", "experts_per_token", "numerics.normalised_gates"})
_LATENTS = frozenset({"q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "num_dense_layers", "dense_d_ff"})
_GATING = frozenset(f"numerics.gating.{name}" for name in ("scores", "scale", "groups", "chosen_groups", "votes"))
TORCHTITAN_MODELS: Mapping[str, TorchtitanModel] = {
    "llama3": TorchtitanModel(
        _weight_table("llama3 of torchtitan", _PAIRS),
        SupportedModels(any_of=frozenset({"tied_embeddings"}) | ROTARY_FIELDS, conditions=(scaling_condition("none", "llama3"),)),
    ),
    "qwen3": TorchtitanModel(
        _weight_table("qwen3 of torchtitan", _QK_NORM),
        SupportedModels(any_of=frozenset({"tied_embeddings"}) | _ROUTED, values={"qk_norm": (True,)}),
    ),
    "deepseek_v3": TorchtitanModel(
        _weight_table("deepseek_v3 of torchtitan", _LATENT),
        SupportedModels(
            any_of=_ROUTED | _LATENTS | _GATING | {"shared_expert_width"},
            values={"num_predict_layers": (0, 1)},  # a second module would read the normed output of the first
            conditions=(
                ModelCondition(
                    lambda architecture: architecture.kv_lora_rank > 0, "kv_lora_rank is 0; latent attention is required"
                ),
                ModelCondition(
                    lambda architecture: architecture.numerics.gating.groups == 1 or architecture.numerics.gating.votes == 2,
                    "groups of experts are chosen by other than their 2 best scores; 2 is required",
                ),
            ),
        ),
    ),
}  # fmt: skip


def torchtitan_model(architecture: Architecture) -> TorchtitanModel:
    """Return the torchtitan model that computes an architecture. Raises `InputError` with the reason against each."""
    for model in TORCHTITAN_MODELS.values():
        if not any(model.models.problems(architecture)):
            return model
    raise InputError(
        f"model {architecture.name}: no model of torchtitan 0.3.0 computes it", *_refusal_reasons(architecture)
    )


def _refusal_reasons(architecture: Architecture) -> Iterator[str]:
    for name, model in TORCHTITAN_MODELS.items():
        first, *later = model.models.problems(architecture)
        yield f"{name}: {first}" + (f" ({len(later)} more)" if later else "")
