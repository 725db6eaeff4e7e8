"""Model providers of Megatron Bridge: which class has a model, and its fields that Megatron-LM has no argument for.

Source: megatron-bridge 0.3.1, models/*/*_provider.py, with megatron-core 0.16.1, gpt_model.py and multi_latent_attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardwise.interop.frameworks.megatron.rotary_options import LATENT_YARN_CONSTANTS, is_yarn, yarn_options
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import Requirement
from shardwise.interop.text_formats.option_tables import Options
from shardwise.interop.text_formats.python_config import NameExpr
from shardwise.model import Architecture, Rotary
from shardwise.values import InputError

PROVIDER = "model.provider"  # the class of cfg.model
# Function and gate of each MLP; of several with the same one the first is written.
ACTIVATIONS: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "swiglu": (("torch.nn.functional.silu", True),),
    "clamped_swiglu": (("quick_gelu", True),),
    "geglu": (("fast_gelu", True), ("torch.nn.functional.gelu", True)),
    "gelu": (("torch.nn.functional.gelu", False), ("fast_gelu", False)),
    "relu": (("torch.nn.functional.relu", False),),
}
# GPTModel reads YaRN's constants from the configuration under these names; with latent attention it reads those without a prefix.
YARN_FIELDS: Mapping[str, str] = {
    f"model.{name}": f"model.yarn_{name}" for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")
}
ROUNDING_FIELD = "model.yarn_correction_range_round_to_int"
LATENT_FIELDS = ("model.beta_slow", "model.beta_fast", "model.original_max_position_embeddings")


class Provider(NamedTuple):
    """A class of providers: its module, and its defaults that differ from those of GPTModelProvider.

    `makes` says whether it is written for a model. `write` returns fields that it needs besides (None: the field is left out),
    `generalise` those of GPTModelProvider for its own, and `read` fields of a launch.
    """

    module: str
    defaults: Options
    makes: Callable[[Architecture], bool]
    write: Callable[[Architecture], Options] = lambda model: {}
    generalise: Callable[[Options], Options] = lambda fields: {}
    read: Callable[[Options], Mapping[str, Any]] = lambda fields: {}


def _explicit_sizes(model: Architecture) -> dict[str, Any]:
    """Return the fields whose defaults differ between providers."""
    return {
        "model.kv_channels": model.head_dim, "model.num_query_groups": model.num_kv_heads,
        "model.layernorm_epsilon": model.numerics.norm_epsilon,
        "model.share_embeddings_and_output_weights": model.tied_embeddings,
        "model.layernorm_zero_centered_gamma": model.numerics.norm_offset == 1.0, "model.qk_layernorm": model.qk_norm,
    }  # fmt: skip


def _has_scaled_embedding(model: Architecture) -> bool:
    return math.isclose(model.numerics.embedding_scale, math.sqrt(model.d_model)) and model.d_model > 1


def _write_gemma_3(model: Architecture) -> Options:
    numerics = model.numerics
    local = numerics.local_rotary or numerics.rotary
    return {
        **_explicit_sizes(model), "model.window_size": (model.sliding_window or 0) - 1, "model.window_attn_skip_freq": None,
        "model.interleaved_attn_pattern": (model.global_every - 1, 1),
        "model.rotary_base": (round(local.base), round(numerics.rotary.base)),
        "model.rope_scaling_factor": numerics.rotary.factor, "model.seq_len_interpolation_factor": None,
        "model.softmax_scale": numerics.attention_scale or model.head_dim**-0.5,
    }  # fmt: skip


def _generalise_gemma_3(fields: Options) -> Options:
    return {"model.window_size": (fields["model.window_size"], 0), "model.rotary_base": fields["model.rotary_base"][1]}


def _read_gemma_3(fields: Options) -> Mapping[str, Any]:
    scale, default = fields["model.softmax_scale"], fields["model.kv_channels"] ** -0.5
    num_local, num_global = fields["model.interleaved_attn_pattern"]
    if num_global != 1:
        raise InputError(f"model.interleaved_attn_pattern: found ({num_local}, {num_global}); (N, 1) can be read")
    return {
        **_read_gemma(fields), "model.post_norms": True, "model.global_every": num_local + 1, "model.qk_norm": True,
        "numerics.rotary.factor": float(fields["model.rope_scaling_factor"]),
        "numerics.local_rotary": Rotary(base=float(fields["model.rotary_base"][0])),
        "numerics.attention_scale": None if math.isclose(scale, default) else scale,
    }  # fmt: skip


def _read_gemma(fields: Options) -> Mapping[str, Any]:
    return {"numerics.embedding_scale": math.sqrt(fields["model.hidden_size"])}


_GEMMA: Options = {
    "model.normalization": "RMSNorm", "model.activation_func": NameExpr("fast_gelu"), "model.gated_linear_unit": True,
    "model.position_embedding_type": "rope", "model.add_bias_linear": False, "model.kv_channels": 256,
    "model.layernorm_zero_centered_gamma": True, "model.layernorm_epsilon": 1e-6,
}  # fmt: skip
PROVIDERS: Mapping[str, Provider] = {
    "MLAModelProvider": Provider(
        "mla_provider", {"model.multi_latent_attention": True, "model.rotary_scaling_factor": 40.0},
        lambda model: model.kv_lora_rank > 0,
    ),
    "Gemma3ModelProvider": Provider(
        "gemma.gemma3_provider",
        {**_GEMMA, "model.rotary_base": (10_000, 1_000_000), "model.window_size": 512, "model.interleaved_attn_pattern": (5, 1),
         "model.rope_scaling_factor": 1.0, "model.softmax_scale": 1 / 16},
        lambda model: _has_scaled_embedding(model) and model.post_norms and model.qk_norm and model.global_every > 1,
        _write_gemma_3, _generalise_gemma_3, _read_gemma_3,
    ),
    "GemmaModelProvider": Provider(
        "gemma.gemma_provider", _GEMMA, _has_scaled_embedding, _explicit_sizes, read=_read_gemma,
    ),
    "OlMoEModelProvider": Provider(
        "olmoe.olmoe_provider",
        {"model.normalization": "RMSNorm", "model.activation_func": NameExpr("torch.nn.functional.silu"),
         "model.gated_linear_unit": True, "model.position_embedding_type": "rope", "model.add_bias_linear": False,
         "model.qk_layernorm": True, "model.share_embeddings_and_output_weights": False, "model.moe_router_pre_softmax": True,
         "model.num_moe_experts": 64, "model.moe_router_topk": 8, "model.kv_channels": 128, "model.num_query_groups": 16},
        lambda model: model.qk_norm and model.qk_norm_over == "projection" and model.num_experts > 0,
        lambda model: {**_explicit_sizes(model), "model.moe_router_pre_softmax": not model.numerics.normalised_gates},
        read=lambda fields: {"model.qk_norm_over": "projection"},
    ),
    "GPTModelProvider": Provider("gpt_provider", {}, lambda model: True),
}  # fmt: skip


def write_provider(launch: Launch, fields: Options) -> dict[str, Any]:
    """Return a launch's fields, completed by the class of its model's provider and by what only Bridge has a field for."""
    model = launch.model
    name, provider = next((name, provider) for name, provider in PROVIDERS.items() if provider.makes(model))
    completed = {
        PROVIDER: name,
        **_rename_yarn(fields),
        **_write_activation(model.mlp),
        **_latent_yarn(model),
        **provider.write(model),
    }
    return {field: value for field, value in completed.items() if value is not None}


def _write_activation(mlp: str) -> Options:
    """Return the fields of an MLP; none for one that Bridge has no function for, which is then lost when they are read back."""
    return {
        field: value
        for function, gated in ACTIVATIONS.get(mlp, ())[:1]
        for field, value in (("model.activation_func", NameExpr(function)), ("model.gated_linear_unit", gated))
    }


def _rename_yarn(fields: Options) -> dict[str, Any]:
    if fields.get("model.position_embedding_type") != "yarn":
        return dict(fields)
    return {ROUNDING_FIELD: True, **{YARN_FIELDS.get(field, field): value for field, value in fields.items()}}


def _latent_yarn(model: Architecture) -> Options:
    """Return YaRN's fields of latent attention, with the constants that Megatron-LM takes no arguments for."""
    rotary = model.numerics.rotary
    if not model.kv_lora_rank or not is_yarn(rotary):
        return {}
    factors = {f"model.{option.replace('-', '_')}": value for option, value in yarn_options(model).items()}
    return {**factors, **dict(zip(LATENT_FIELDS, (rotary.low, rotary.high, rotary.original_positions), strict=True))}


def generalise_fields(fields: Options) -> dict[str, Any]:
    """Return the fields of GPTModelProvider (and of latent attention) for those of another provider."""
    provider = _provider_of(fields)
    explicit = {name: value for name, value in fields.items() if value is not None}
    completed = {**provider.defaults, **explicit}
    renamed = {ours: completed[theirs] for ours, theirs in YARN_FIELDS.items() if theirs in completed}
    return {**completed, **renamed, **provider.generalise(completed)}


def read_provider(fields: Options) -> dict[str, Any]:
    """Return the fields of a launch that only Bridge has options for."""
    provider = _provider_of(fields)
    completed = {**provider.defaults, **fields}
    launch_fields: dict[str, Any] = dict(provider.read(completed))
    function, gated = (
        str(completed.get("model.activation_func", "")).split(".")[-1],
        completed.get("model.gated_linear_unit"),
    )
    if function:
        launch_fields["model.mlp"] = _read_activation(function, bool(gated))
    if completed.get("model.multi_latent_attention") and completed.get("model.rotary_scaling_factor", 1.0) != 1.0:
        constants = zip(("low", "high", "original_positions"), LATENT_FIELDS, LATENT_YARN_CONSTANTS, strict=True)
        for name, field, default in constants:
            value = completed.get(field, default)
            launch_fields[f"numerics.rotary.{name}"] = int(value) if name == "original_positions" else float(value)
    return launch_fields


def _read_activation(function: str, gated: bool) -> str:
    for mlp, functions in ACTIVATIONS.items():
        if any(name.split(".")[-1] == function and gate is gated for name, gate in functions):
            return mlp
    names = ", ".join(sorted({name.split(".")[-1] for functions in ACTIVATIONS.values() for name, _ in functions}))
    raise InputError(
        f"model.activation_func: found {function!r}, {'' if gated else 'not '}gated; one of {names} can be read"
    )


def _provider_of(fields: Options) -> Provider:
    return PROVIDERS[
        fields.get(PROVIDER, "MLAModelProvider" if fields.get("model.multi_latent_attention") else "GPTModelProvider")
    ]


# Gemma 2's provider has attention of its own, with whole score matrices (models/gemma/gemma2_provider.py).
CAPPED_SCORES = Requirement(
    lambda launch: launch.model.numerics.attention_cap is None,
    lambda launch: (
        f"attention scores of {launch.model.name} are capped, for which Megatron Bridge has attention that keeps whole "
        "score matrices (Gemma2ModelProvider); such plans are not written"
    ),
)
