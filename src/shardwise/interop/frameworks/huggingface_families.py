"""Families of Hugging Face `transformers`: tensor names of each, and its config.json read and written.

One table of weight names serves all families, with overrides for some (source: the files that each family's `save_pretrained`
writes; a test reads and writes them). A config that is written is read back as the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shardwise.interop.frameworks.weight_table import TensorPattern, WeightTable
from shardwise.layout.rules.engine import rotary_problem
from shardwise.model import LABEL_FIELDS, MTP_UNITS, YARN_MSCALE, Architecture, Numerics, Rotary
from shardwise.model.huggingface.config import parse_config
from shardwise.model.huggingface.family_rules import FAMILIES as RULES
from shardwise.model.huggingface.field_readers import read_boolean
from shardwise.model.huggingface.numerics_reader import (
    ACTIVATIONS,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    RotaryRule,
)
from shardwise.model.numerics import CLAMPED_SWIGLU_SLOPE, RAMP_OVER_FREQUENCY, RAMP_OVER_INDEX, SWIGLU_CLAMP
from shardwise.values import InputError, raise_problems

LAYER_PREFIX = TensorPattern("model.layers.{layer}.")  # multi-token prediction modules are numbered after the layers
_ATTENTION = {
    "wq": TensorPattern("self_attn.q_proj.weight", "K G H, D"),
    "wk": TensorPattern("self_attn.k_proj.weight", "K H, D"),
    "wv": TensorPattern("self_attn.v_proj.weight", "K H, D"),
    "wo": TensorPattern("self_attn.o_proj.weight", "D, K G H"),
    "q_flat.bias": TensorPattern("self_attn.q_proj.bias"),
    "k_flat.bias": TensorPattern("self_attn.k_proj.bias"),
    "v.bias": TensorPattern("self_attn.v_proj.bias"),
    "attention_out.bias": TensorPattern("self_attn.o_proj.bias"),
    "q_norm.weight": TensorPattern("self_attn.q_norm.weight"),
    "k_norm.weight": TensorPattern("self_attn.k_norm.weight"),
    "attention_norm.weight": TensorPattern("input_layernorm.weight"),
    "mlp_norm.weight": TensorPattern("post_attention_layernorm.weight"),
}
_MLP = {
    "w_gate": TensorPattern("mlp.gate_proj.weight", "F, D"),
    "w_up": TensorPattern("mlp.up_proj.weight", "F, D"),
    "w_down": TensorPattern("mlp.down_proj.weight", "D, F"),
    "gate.bias": TensorPattern("mlp.gate_proj.bias"),
    "up.bias": TensorPattern("mlp.up_proj.bias"),
    "mlp_out.bias": TensorPattern("mlp.down_proj.bias"),
}
_EXPERTS = {
    "router": TensorPattern("mlp.gate.weight", "E, D"),
    "experts_gate": TensorPattern("mlp.experts.{expert}.gate_proj.weight", "M, D"),
    "experts_up": TensorPattern("mlp.experts.{expert}.up_proj.weight", "M, D"),
    "experts_down": TensorPattern("mlp.experts.{expert}.down_proj.weight", "D, M"),
    "shared_gate": TensorPattern("mlp.shared_expert.gate_proj.weight", "S, D"),
    "shared_up": TensorPattern("mlp.shared_expert.up_proj.weight", "S, D"),
    "shared_down": TensorPattern("mlp.shared_expert.down_proj.weight", "D, S"),
    "shared_expert_gate": TensorPattern("mlp.shared_expert_gate.weight", "1, D"),
}
_ENDS = {
    "embedding": TensorPattern("model.embed_tokens.weight", "V, D"),
    "final_norm.weight": TensorPattern("model.norm.weight"),
    "head": TensorPattern("lm_head.weight", "V, D"),
}
# A multi-token prediction module's own weights besides its block's, and copies of those that it borrows. Source: the files of
# DeepSeek-V3 (README_WEIGHTS.md); GLM-4.5 has the same.
_PREDICT = {
    "embedding_norm.weight": TensorPattern("enorm.weight"),
    "hidden_norm.weight": TensorPattern("hnorm.weight"),
    "pair_projection": TensorPattern("eh_proj.weight", "D, J"),
    "final_norm.weight": TensorPattern("shared_head.norm.weight"),
}
_COPIES = {
    "embedding": TensorPattern("embed_tokens.weight", "V, D"),
    "head": TensorPattern("shared_head.head.weight", "V, D"),
}
_MIXTRAL = {
    "router": TensorPattern("block_sparse_moe.gate.weight", "E, D"),
    "experts_gate": TensorPattern("block_sparse_moe.experts.{expert}.w1.weight", "M, D"),
    "experts_up": TensorPattern("block_sparse_moe.experts.{expert}.w3.weight", "M, D"),
    "experts_down": TensorPattern("block_sparse_moe.experts.{expert}.w2.weight", "D, M"),
}
_SHARED_EXPERTS = {
    "shared_gate": TensorPattern("mlp.shared_experts.gate_proj.weight", "S, D"),
    "shared_up": TensorPattern("mlp.shared_experts.up_proj.weight", "S, D"),
    "shared_down": TensorPattern("mlp.shared_experts.down_proj.weight", "D, S"),
}
_LATENT = {
    "w_q_down": TensorPattern("self_attn.q_a_proj.weight", "Q, D"),
    "q_latent_norm.weight": TensorPattern("self_attn.q_a_layernorm.weight"),
    "w_q_plain": TensorPattern("self_attn.q_b_proj.weight", "K G [I]+R, Q"),
    "w_q_rotary": TensorPattern("self_attn.q_b_proj.weight", "K G I+[R], Q"),
    "w_kv_down": TensorPattern("self_attn.kv_a_proj_with_mqa.weight", "[C]+R, D"),
    "w_k_rotary": TensorPattern("self_attn.kv_a_proj_with_mqa.weight", "C+[R], D"),
    "kv_latent_norm.weight": TensorPattern("self_attn.kv_a_layernorm.weight"),
    "w_k_up": TensorPattern("self_attn.kv_b_proj.weight", "K [I]+U, C"),
    "w_v_up": TensorPattern("self_attn.kv_b_proj.weight", "K I+[U], C"),
    "wo": TensorPattern("self_attn.o_proj.weight", "D, K G U"),
}
_FUSED = {
    "wq": TensorPattern("self_attn.qkv_proj.weight", "[KGH]+KH+KH, D"),
    "wk": TensorPattern("self_attn.qkv_proj.weight", "KGH+[KH]+KH, D"),
    "wv": TensorPattern("self_attn.qkv_proj.weight", "KGH+KH+[KH], D"),
    "w_gate": TensorPattern("mlp.gate_up_proj.weight", "[F]+F, D"),
    "w_up": TensorPattern("mlp.gate_up_proj.weight", "F+[F], D"),
}
# One tensor has all experts, in which columns of gate and up take turns, and products take rows: GptOssExperts.
_STACKED_EXPERTS = {
    "sinks": TensorPattern("self_attn.sinks"),
    "router": TensorPattern("mlp.router.weight", "E, D"),
    "router_logits.bias": TensorPattern("mlp.router.bias"),
    "experts_gate": TensorPattern("mlp.experts.gate_up_proj", "E, D, M [1]+1"),
    "experts_up": TensorPattern("mlp.experts.gate_up_proj", "E, D, M 1+[1]"),
    "experts_gate.bias": TensorPattern("mlp.experts.gate_up_proj_bias", "E, M [1]+1"),
    "experts_up.bias": TensorPattern("mlp.experts.gate_up_proj_bias", "E, M 1+[1]"),
    "experts_down": TensorPattern("mlp.experts.down_proj", "E, M, D"),
    "experts_down.bias": TensorPattern("mlp.experts.down_proj_bias", "E, D"),
}
_DIRECT = {
    "w_q_plain": TensorPattern("self_attn.q_proj.weight", "K G [I]+R, D"),
    "w_q_rotary": TensorPattern("self_attn.q_proj.weight", "K G I+[R], D"),
}
_POST_NORMS = {
    "attention_post_norm.weight": TensorPattern("post_attention_layernorm.weight"),
    "mlp_norm.weight": TensorPattern("pre_feedforward_layernorm.weight"),
    "mlp_post_norm.weight": TensorPattern("post_feedforward_layernorm.weight"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceFamily:
    """A model family: how it keeps its weights, and spells in its config what the planner does not read.

    `block_overrides` are names in a block that the other families do not have. `layer_types`: the config lists each layer's
    kind. `experts` are the config's keys of their number and width, `balance_bias` the tensor of a router's balance bias ("":
    none). `config_defaults` are values that a config without these keys means, `required_values` constants of its code
    whatever the config says, `written_values` what a config says against its class's defaults. `adjacent_pairs`: the two dims
    that rotary embeddings rotate together (of R, in latent attention) are neighbours, rather than one in each half.
    `whole_heads`: transformers refuses a width that is not a multiple of the number of heads (`validate_architecture`, 5.23).
    Constants of its arithmetic are in `FamilyRule.numerics`.
    """

    model_class: str
    block_overrides: Mapping[str, TensorPattern] = field(default_factory=dict)
    activation: str = "hidden_act"
    layer_types: bool = False
    experts: tuple[str, str] = ("", "")
    balance_bias: str = ""
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    required_values: Mapping[str, Any] = field(default_factory=dict)
    written_values: Mapping[str, Any] = field(default_factory=dict)
    adjacent_pairs: bool = False
    whole_heads: bool = False

    @property
    def weight_table(self) -> WeightTable:
        """The family's tensor names."""
        return WeightTable(
            title=self.model_class, ends=_ENDS,
            block=self._with_rotary_order({**_ATTENTION, **_MLP, **_EXPERTS, **self.block_overrides}),
            layer=LAYER_PREFIX, direct=self._with_rotary_order(_DIRECT), module=LAYER_PREFIX, predict=_PREDICT,
            copies=dict.fromkeys(MTP_UNITS, _COPIES),
            balance_bias=TensorPattern(self.balance_bias) if self.balance_bias else None,
        )  # fmt: skip

    def _with_rotary_order(self, names: Mapping[str, TensorPattern]) -> Mapping[str, TensorPattern]:
        """Return the patterns with rotary dims in the family's order."""
        if not self.adjacent_pairs:
            return names
        return {weight: TensorPattern(stored.name, stored.dims.replace("R", "R~")) for weight, stored in names.items()}


_DEEPSEEK_EXPERTS = ("n_routed_experts", "moe_intermediate_size")
_BALANCE_BIAS = "mlp.gate.e_score_correction_bias"
_QWEN_EXPERTS = ("num_experts", "moe_intermediate_size")
FAMILIES: Mapping[str, HuggingFaceFamily] = {
    "llama": HuggingFaceFamily(model_class="LlamaForCausalLM", whole_heads=True),
    "mistral": HuggingFaceFamily(model_class="MistralForCausalLM"),
    "qwen2": HuggingFaceFamily(model_class="Qwen2ForCausalLM"),
    "qwen3": HuggingFaceFamily(model_class="Qwen3ForCausalLM"),
    "mixtral": HuggingFaceFamily(
        model_class="MixtralForCausalLM", block_overrides=_MIXTRAL, experts=("num_local_experts", "intermediate_size")
    ),
    "qwen2_moe": HuggingFaceFamily(model_class="Qwen2MoeForCausalLM", experts=_QWEN_EXPERTS),
    "qwen3_moe": HuggingFaceFamily(model_class="Qwen3MoeForCausalLM", experts=_QWEN_EXPERTS),
    "glm4_moe": HuggingFaceFamily(
        model_class="Glm4MoeForCausalLM", block_overrides=_SHARED_EXPERTS, experts=_DEEPSEEK_EXPERTS, balance_bias=_BALANCE_BIAS
    ),
    # Dims that are rotated together lie side by side unless the config says otherwise (DeepseekV3Config), and norms of latents
    # have their own epsilon (DeepseekV3RMSNorm).
    "deepseek_v3": HuggingFaceFamily(
        model_class="DeepseekV3ForCausalLM", block_overrides={**_SHARED_EXPERTS, **_LATENT}, experts=_DEEPSEEK_EXPERTS,
        balance_bias=_BALANCE_BIAS, config_defaults={"rope_interleave": True}, required_values={"rms_norm_eps": 1e-6},
    ),
    "gemma": HuggingFaceFamily(model_class="GemmaForCausalLM"),
    "gemma2": HuggingFaceFamily(
        model_class="Gemma2ForCausalLM", block_overrides=_POST_NORMS, activation="hidden_activation", layer_types=True,
        whole_heads=True,
    ),
    "gemma3_text": HuggingFaceFamily(
        model_class="Gemma3ForCausalLM", block_overrides=_POST_NORMS, activation="hidden_activation", layer_types=True,
        whole_heads=True,
    ),
    "olmo2": HuggingFaceFamily(model_class="Olmo2ForCausalLM", block_overrides=_POST_NORMS),
    # Phi3Config's padding token, 32000, is in no smaller vocabulary.
    "phi3": HuggingFaceFamily(
        model_class="Phi3ForCausalLM", block_overrides=_FUSED, written_values={"pad_token_id": None}
    ),
    "gpt_oss": HuggingFaceFamily(
        model_class="GptOssForCausalLM", block_overrides=_STACKED_EXPERTS, experts=("num_local_experts", "intermediate_size"),
        layer_types=True, required_values={"swiglu_alpha": CLAMPED_SWIGLU_SLOPE, "swiglu_limit": SWIGLU_CLAMP},
    ),
}  # fmt: skip

MSCALE_DIGITS = 9  # decimals: more than any config has


def write_rope_parameters(numerics: Numerics, rule: RotaryRule, head_dim: int) -> dict[str, Any]:
    """Return the value of `rope_parameters`; one entry per kind of layer in families whose window layers have other angles."""
    parameters = _rotary_fields(numerics.rotary)
    if rule.part is not None:
        parameters["partial_rotary_factor"] = numerics.rotary.part
    if rule.local_theta is not None:
        return {FULL_ATTENTION: parameters, SLIDING_ATTENTION: _rotary_fields(numerics.local_rotary or numerics.rotary)}
    if rule.scaled and numerics.attention_scale is not None and numerics.rotary.factor > 1.0:
        score_factor = numerics.attention_scale * math.sqrt(head_dim)
        parameters["mscale_all_dim"] = _mscale_all_dim(score_factor, numerics.rotary.factor)
    return parameters


def _mscale_all_dim(score_factor: float, factor: float) -> float:
    """Return the `mscale_all_dim` whose squared magnitude is `score_factor`, without the last digits, which a root loses."""
    return round((math.sqrt(score_factor) - 1.0) / (YARN_MSCALE * math.log(factor)), MSCALE_DIGITS)


def _rotary_fields(rotary: Rotary) -> dict[str, Any]:
    rope_fields: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if rotary.original_positions:
        return rope_fields | {
            "factor": rotary.factor, "original_max_position_embeddings": rotary.original_positions,
            **RAMP_WRITERS[rotary.ramp](rotary)
        }  # fmt: skip
    return rope_fields | ({"rope_type": "linear", "factor": rotary.factor} if rotary.factor != 1.0 else {})


def _llama3_fields(rotary: Rotary) -> dict[str, Any]:
    return {"rope_type": "llama3", "low_freq_factor": rotary.low, "high_freq_factor": rotary.high}


def _yarn_fields(rotary: Rotary) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "beta_slow": rotary.low, "beta_fast": rotary.high, "truncate": rotary.rounded,
        "attention_factor": rotary.amplitude,
    }  # fmt: skip


RAMP_WRITERS = {RAMP_OVER_FREQUENCY: _llama3_fields, RAMP_OVER_INDEX: _yarn_fields}


def read_config(config: Mapping[str, Any], *, name: str = "model") -> tuple[Architecture, HuggingFaceFamily]:
    """Return a config's architecture (with numerics) and family. Raises `InputError` for anything unsupported."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise InputError(
            f"model: weights of model_type {config.get('model_type')!r} cannot be read; one of {', '.join(FAMILIES)} is required"
        )
    config = {**family.config_defaults, **config}
    architecture = parse_config(config, name=name)
    raise_problems(list(_problems(config, architecture, family)))
    return architecture, replace(family, adjacent_pairs=read_boolean(config, "rope_interleave", False))


def _problems(config: Mapping[str, Any], architecture: Architecture, family: HuggingFaceFamily) -> Iterator[str]:
    quantised = config.get("quantization_config") is not None
    if quantised:
        yield _quantised_problem(config["quantization_config"])
    for setting in architecture.numerics.missing_arithmetic:
        yield f"model: the config sets {setting}, which is not known here"
    yield from (f"model: {problem}" for problem in filter(None, [rotary_problem(architecture)]))
    for key, value in family.required_values.items():
        if config.get(key, value) != value:
            yield f"model: the config has {key} = {config[key]!r}; {value!r}, which this family's code has in places, is required"
    if family.whole_heads and architecture.d_model % architecture.num_heads:
        yield (
            f"model: found hidden_size = {architecture.d_model} with num_attention_heads = {architecture.num_heads}; a multiple "
            f"of these is required by {family.model_class}"
        )
    kinds, mixed = config.get("layer_types"), bool(architecture.sliding_window and architecture.global_every)
    if mixed and not family.layer_types:
        yield "model: layers with and without a sliding window; this family has one kind of layer"
    elif mixed and kinds and kinds != _layer_types(architecture):
        yield f"model: layer_types is {kinds}; full_attention on every {architecture.global_every}-th layer is required"


def _quantised_problem(quantisation: object) -> str:
    """Return that weights are stored with scales, and how transformers writes them without."""
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    return (
        f"model: the weights are quantised (quantization_config of {method or 'no method'}); weights of 16, 32 or 64 bits are "
        "required: from_pretrained(FOLDER, quantization_config=...) with the method's own config and dequantize=True, then "
        "save_pretrained(NEW_FOLDER), writes them"
    )


def _layer_types(architecture: Architecture) -> list[str]:
    windows = map(architecture.attention_window, range(architecture.num_layers))
    return [SLIDING_ATTENTION if window else FULL_ATTENTION for window in windows]


def write_config(
    architecture: Architecture, seq_len: int, model_type: str = ""
) -> tuple[dict[str, Any], HuggingFaceFamily]:
    """Return the config of the first family (or of `model_type`) that reads back as the same model, and the family.

    Raises `InputError` if no family has such a model.
    """
    for candidate_type in (model_type,) if model_type else FAMILIES:
        config = _config_of_family(architecture, seq_len, candidate_type)
        try:
            restored, family = read_config(config)
        except InputError:
            continue
        labels = {name: getattr(architecture, name) for name in LABEL_FIELDS}
        if replace(restored, **labels) == architecture:
            return config, family
    raise InputError(
        f"model {architecture.name}: none of {model_type or ', '.join(FAMILIES)} has what it has; these are the families of "
        "transformers that are written"
    )


def _config_of_family(architecture: Architecture, seq_len: int, model_type: str) -> dict[str, Any]:
    """Return the model in this family's config keys, as far as the family has keys for it."""
    if model_type not in FAMILIES:
        raise InputError(f"model: found model_type {model_type!r}; one of {', '.join(FAMILIES)} is required")
    family, rule, numerics = FAMILIES[model_type], RULES[model_type].numerics, architecture.numerics
    qkv = "qkv" in architecture.bias
    config: dict[str, Any] = {
        "architectures": [family.model_class], "model_type": model_type, "hidden_size": architecture.d_model,
        "num_hidden_layers": architecture.num_layers, "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads, "head_dim": architecture.head_dim,
        "intermediate_size": architecture.dense_d_ff or architecture.d_ff, "vocab_size": architecture.vocab_size,
        "max_position_embeddings": seq_len, "rms_norm_eps": numerics.norm_epsilon,
        "tie_word_embeddings": architecture.tied_embeddings, family.activation: ACTIVATIONS.get(architecture.mlp, ("",))[0],
        "attention_bias": qkv, "qkv_bias": qkv, "mlp_bias": "mlp" in architecture.bias,
        "sliding_window": architecture.sliding_window,
        **({"rope_parameters": write_rope_parameters(numerics, rule.rotary, architecture.head_dim)} if rule.rotary else {}),
    }  # fmt: skip
    if architecture.num_predict_layers:
        config["num_nextn_predict_layers"] = architecture.num_predict_layers
    if family.layer_types:
        config["layer_types"] = _layer_types(architecture)
    if rule.scaled_scores:
        scale = numerics.attention_scale
        config |= {
            "query_pre_attn_scalar": architecture.head_dim if scale is None else round(scale**-2),
            "attn_logit_softcapping": numerics.attention_cap, "final_logit_softcapping": numerics.logit_cap,
        }  # fmt: skip
    if architecture.kv_lora_rank:
        config |= _latent_fields(architecture)
    config |= family.written_values
    if family.experts[0]:
        config |= _expert_fields(architecture, family)
        config |= _router_fields(architecture) if rule.router else _experts_on_all_layers(architecture)
    return config


def _expert_fields(architecture: Architecture, family: HuggingFaceFamily) -> dict[str, Any]:
    count_key, width_key = family.experts
    return {
        count_key: architecture.num_experts, "num_experts_per_tok": architecture.experts_per_token, width_key: architecture.d_ff,
        "norm_topk_prob": architecture.numerics.normalised_gates,
    }  # fmt: skip


def _latent_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the keys of latent attention; `head_dim` is there the rotary part's width.

    Rotated pairs lie side by side, as in the files of DeepSeek-V3, whose own code has no other order.
    """
    return {
        "q_lora_rank": architecture.q_lora_rank or None, "kv_lora_rank": architecture.kv_lora_rank,
        "qk_rope_head_dim": architecture.rope_head_dim, "head_dim": architecture.rope_head_dim,
        "qk_nope_head_dim": architecture.head_dim - architecture.rope_head_dim, "v_head_dim": architecture.v_head_dim,
        "rope_interleave": True,
    }  # fmt: skip


def _experts_on_all_layers(architecture: Architecture) -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": architecture.shared_expert_width,
    }  # fmt: skip


def _router_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the keys of DeepSeek's router, of shared experts, and of the dense layers before those with experts."""
    gating = architecture.numerics.gating
    return {
        "n_group": gating.groups, "topk_group": gating.chosen_groups, "routed_scaling_factor": gating.scale,
        "n_shared_experts": architecture.shared_expert_width // max(architecture.d_ff, 1),
        "first_k_dense_replace": architecture.num_dense_layers, "use_qk_norm": architecture.qk_norm,
        "num_nextn_predict_layers": architecture.num_predict_layers,
    }  # fmt: skip


DESCRIPTIVE_FIELDS = tuple(
    name for name in LABEL_FIELDS if name != "nominal_num_params"
)  # may differ between the same models


def require_same_model(folder: str | Path, stored: Architecture, architecture: Architecture) -> None:
    """Raise `InputError` if a folder's model (`stored`) differs from the plan's, in its weights or its numerics."""
    path = Path(folder) / CONFIG_FILE
    raise_problems(
        [
            f"--from: {path} has {field.name} = {getattr(stored, field.name)!r}; the plan's model has "
            f"{getattr(architecture, field.name)!r}, which is required: plan for {path}{_planned_fix(field.name, stored)}"
            for field in fields(Architecture)
            if field.name not in DESCRIPTIVE_FIELDS and getattr(stored, field.name) != getattr(architecture, field.name)
        ]
    )


def _planned_fix(name: str, stored: Architecture) -> str:
    """Return the flag that plans for a folder whose config has modules of multi-token prediction and whose weights do not."""
    return " --set model.num_predict_layers=0" if name == "num_predict_layers" and not stored.num_predict_layers else ""


def without_missing_modules(architecture: Architecture, tensor_names: Iterable[str]) -> Architecture:
    """Return the model whose weights a folder has: transformers leaves out modules of multi-token prediction when it saves.

    Source: `_keys_to_ignore_on_load_unexpected` of Glm4MoeModel and DeepseekV3Model; their configs have
    `num_nextn_predict_layers` all the same.
    """
    prefixes = tuple(
        LAYER_PREFIX.name.format(layer=architecture.num_layers + module)
        for module in range(architecture.num_predict_layers)
    )
    has_modules = any(name.startswith(prefixes) for name in tensor_names) if prefixes else True
    return architecture if has_modules else replace(architecture, num_predict_layers=0)


CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
