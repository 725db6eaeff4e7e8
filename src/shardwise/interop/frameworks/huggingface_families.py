"""Families of Hugging Face `transformers`: where each keeps its weights, and its config.json read and written.

One table of weight names serves all families, with what some of them keep elsewhere (source: the files that each family's
`save_pretrained` writes; a test reads and writes them). A config that is written says the same when it is read again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shardwise.interop.frameworks.weight_table import Naming, Stored
from shardwise.layout.rules.engine import rotary_problem
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import PREDICTS
from shardwise.model.huggingface.config import parse_config
from shardwise.model.huggingface.families import FAMILIES as RULES
from shardwise.model.huggingface.numerics_reader import ACTIVATIONS, FULL, MSCALE, SLIDING, RotaryRule
from shardwise.model.numerics import FREQUENCY, INDEX, Numerics, Rotary
from shardwise.values.errors import InputError, require

LAYER = Stored("model.layers.{layer}.")  # modules of multi-token prediction are numbered behind the layers
_ATTENTION = {
    "wq": Stored("self_attn.q_proj.weight", "K G H, D"),
    "wk": Stored("self_attn.k_proj.weight", "K H, D"),
    "wv": Stored("self_attn.v_proj.weight", "K H, D"),
    "wo": Stored("self_attn.o_proj.weight", "D, K G H"),
    "q_flat.bias": Stored("self_attn.q_proj.bias"),
    "k_flat.bias": Stored("self_attn.k_proj.bias"),
    "v.bias": Stored("self_attn.v_proj.bias"),
    "attention_out.bias": Stored("self_attn.o_proj.bias"),
    "q_norm.weight": Stored("self_attn.q_norm.weight"),
    "k_norm.weight": Stored("self_attn.k_norm.weight"),
    "attention_norm.weight": Stored("input_layernorm.weight"),
    "mlp_norm.weight": Stored("post_attention_layernorm.weight"),
}
_MLP = {
    "w_gate": Stored("mlp.gate_proj.weight", "F, D"),
    "w_up": Stored("mlp.up_proj.weight", "F, D"),
    "w_down": Stored("mlp.down_proj.weight", "D, F"),
    "gate.bias": Stored("mlp.gate_proj.bias"),
    "up.bias": Stored("mlp.up_proj.bias"),
    "mlp_out.bias": Stored("mlp.down_proj.bias"),
}
_EXPERTS = {
    "router": Stored("mlp.gate.weight", "E, D"),
    "experts_gate": Stored("mlp.experts.{expert}.gate_proj.weight", "M, D"),
    "experts_up": Stored("mlp.experts.{expert}.up_proj.weight", "M, D"),
    "experts_down": Stored("mlp.experts.{expert}.down_proj.weight", "D, M"),
    "shared_gate": Stored("mlp.shared_expert.gate_proj.weight", "S, D"),
    "shared_up": Stored("mlp.shared_expert.up_proj.weight", "S, D"),
    "shared_down": Stored("mlp.shared_expert.down_proj.weight", "D, S"),
    "shared_expert_gate": Stored("mlp.shared_expert_gate.weight", "1, D"),
}
_ENDS = {
    "embedding": Stored("model.embed_tokens.weight", "V, D"),
    "final_norm.weight": Stored("model.norm.weight"),
    "head": Stored("lm_head.weight", "V, D"),
}
# A module's own weights beside those of its block, and copies of what it borrows. Source: the files of DeepSeek-V3
# (README_WEIGHTS.md); GLM-4.5 has the same.
_PREDICT = {
    "embedding_norm.weight": Stored("enorm.weight"),
    "hidden_norm.weight": Stored("hnorm.weight"),
    "pair_projection": Stored("eh_proj.weight", "D, J"),
    "final_norm.weight": Stored("shared_head.norm.weight"),
}
_COPIES = {"embedding": Stored("embed_tokens.weight", "V, D"), "head": Stored("shared_head.head.weight", "V, D")}
_MIXTRAL = {
    "router": Stored("block_sparse_moe.gate.weight", "E, D"),
    "experts_gate": Stored("block_sparse_moe.experts.{expert}.w1.weight", "M, D"),
    "experts_up": Stored("block_sparse_moe.experts.{expert}.w3.weight", "M, D"),
    "experts_down": Stored("block_sparse_moe.experts.{expert}.w2.weight", "D, M"),
}
_SHARED_EXPERTS = {
    "shared_gate": Stored("mlp.shared_experts.gate_proj.weight", "S, D"),
    "shared_up": Stored("mlp.shared_experts.up_proj.weight", "S, D"),
    "shared_down": Stored("mlp.shared_experts.down_proj.weight", "D, S"),
}
_LATENT = {
    "w_q_down": Stored("self_attn.q_a_proj.weight", "Q, D"),
    "q_latent_norm.weight": Stored("self_attn.q_a_layernorm.weight"),
    "w_q_plain": Stored("self_attn.q_b_proj.weight", "K G [I]+R, Q"),
    "w_q_rotary": Stored("self_attn.q_b_proj.weight", "K G I+[R], Q"),
    "w_kv_down": Stored("self_attn.kv_a_proj_with_mqa.weight", "[C]+R, D"),
    "w_k_rotary": Stored("self_attn.kv_a_proj_with_mqa.weight", "C+[R], D"),
    "kv_latent_norm.weight": Stored("self_attn.kv_a_layernorm.weight"),
    "w_k_up": Stored("self_attn.kv_b_proj.weight", "K [I]+U, C"),
    "w_v_up": Stored("self_attn.kv_b_proj.weight", "K I+[U], C"),
    "wo": Stored("self_attn.o_proj.weight", "D, K G U"),
}
_DIRECT = {
    "w_q_plain": Stored("self_attn.q_proj.weight", "K G [I]+R, D"),
    "w_q_rotary": Stored("self_attn.q_proj.weight", "K G I+[R], D"),
}
_POST_NORMS = {
    "attention_post_norm.weight": Stored("post_attention_layernorm.weight"),
    "mlp_norm.weight": Stored("pre_feedforward_layernorm.weight"),
    "mlp_post_norm.weight": Stored("post_feedforward_layernorm.weight"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFamily:
    """How a family keeps its weights and spells in its config what the planner does not read.

    `elsewhere` are names in a block that the other families do not have. `layer_types`: the config lists each layer's kind.
    `experts` are the keys of their number and width, `balance_bias` the name of the bias of a router's choice ("": it has none).
    `silent` is what a config means that does not say it, `needed` what its code has whatever the config says. `side_by_side`: the
    two dims of a pair that turns (of R, in latent attention) are neighbours, and not one of either half. How it spells constants
    of its arithmetic: `FamilyRule.numerics`.
    """

    built_as: str
    elsewhere: Mapping[str, Stored] = field(default_factory=dict)
    activation: str = "hidden_act"
    layer_types: bool = False
    experts: tuple[str, str] = ("", "")
    balance_bias: str = ""
    silent: Mapping[str, Any] = field(default_factory=dict)
    needed: Mapping[str, Any] = field(default_factory=dict)
    side_by_side: bool = False

    @property
    def naming(self) -> Naming:
        """Where it keeps each weight."""
        return Naming(
            title=self.built_as, ends=_ENDS, block=self._placed({**_ATTENTION, **_MLP, **_EXPERTS, **self.elsewhere}),
            layer=LAYER, direct=self._placed(_DIRECT), module=LAYER, predict=_PREDICT, copies=dict.fromkeys(PREDICTS, _COPIES),
            balance_bias=Stored(self.balance_bias) if self.balance_bias else None,
        )  # fmt: skip

    def _placed(self, names: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """The names, with the dims that turn in the family's order."""
        if not self.side_by_side:
            return names
        return {weight: Stored(stored.name, stored.layout.replace("R", "R~")) for weight, stored in names.items()}


_DEEPSEEK_EXPERTS = ("n_routed_experts", "moe_intermediate_size")
_BALANCE_BIAS = "mlp.gate.e_score_correction_bias"
_QWEN_EXPERTS = ("num_experts", "moe_intermediate_size")
FAMILIES: Mapping[str, StoredFamily] = {
    "llama": StoredFamily(built_as="LlamaForCausalLM"),
    "mistral": StoredFamily(built_as="MistralForCausalLM"),
    "qwen2": StoredFamily(built_as="Qwen2ForCausalLM"),
    "qwen3": StoredFamily(built_as="Qwen3ForCausalLM"),
    "mixtral": StoredFamily(
        built_as="MixtralForCausalLM", elsewhere=_MIXTRAL, experts=("num_local_experts", "intermediate_size")
    ),
    "qwen2_moe": StoredFamily(built_as="Qwen2MoeForCausalLM", experts=_QWEN_EXPERTS),
    "qwen3_moe": StoredFamily(built_as="Qwen3MoeForCausalLM", experts=_QWEN_EXPERTS),
    "glm4_moe": StoredFamily(
        built_as="Glm4MoeForCausalLM", elsewhere=_SHARED_EXPERTS, experts=_DEEPSEEK_EXPERTS, balance_bias=_BALANCE_BIAS
    ),
    # Pairs of a head's width that turn together lie side by side unless the config says otherwise (DeepseekV3Config), and norms
    # of latents have an epsilon of their own (DeepseekV3RMSNorm).
    "deepseek_v3": StoredFamily(
        built_as="DeepseekV3ForCausalLM", elsewhere={**_SHARED_EXPERTS, **_LATENT}, experts=_DEEPSEEK_EXPERTS,
        balance_bias=_BALANCE_BIAS, silent={"rope_interleave": True}, needed={"rms_norm_eps": 1e-6},
    ),
    "gemma": StoredFamily(built_as="GemmaForCausalLM"),
    "gemma2": StoredFamily(
        built_as="Gemma2ForCausalLM", elsewhere=_POST_NORMS, activation="hidden_activation", layer_types=True
    ),
    "gemma3_text": StoredFamily(
        built_as="Gemma3ForCausalLM", elsewhere=_POST_NORMS, activation="hidden_activation", layer_types=True
    ),
    "olmo2": StoredFamily(built_as="Olmo2ForCausalLM", elsewhere=_POST_NORMS),
}  # fmt: skip

MSCALE_DIGITS = 9  # more than any config has


def write_rotaries(numerics: Numerics, rule: RotaryRule, head_dim: int) -> dict[str, Any]:
    """The value of `rope_parameters`: of a family whose layers with a window have angles of their own, both."""
    whole = _written(numerics.rotary)
    if rule.part is not None:
        whole["partial_rotary_factor"] = numerics.rotary.part
    if rule.local_theta is not None:
        return {FULL: whole, SLIDING: _written(numerics.local_rotary or numerics.rotary)}
    if rule.scaled and numerics.attention_scale is not None and numerics.rotary.factor > 1.0:
        whole["mscale_all_dim"] = _mscale(numerics.attention_scale * math.sqrt(head_dim), numerics.rotary.factor)
    return whole


def _mscale(score_factor: float, factor: float) -> float:
    """The `mscale_all_dim` whose magnitude has this square, without the last digits, which a square root does not keep."""
    return round((math.sqrt(score_factor) - 1.0) / (MSCALE * math.log(factor)), MSCALE_DIGITS)


def _written(rotary: Rotary) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if rotary.original_positions:
        return written | {
            "factor": rotary.factor, "original_max_position_embeddings": rotary.original_positions, **WRITE[rotary.ramp](rotary)
        }  # fmt: skip
    return written | ({"rope_type": "linear", "factor": rotary.factor} if rotary.factor != 1.0 else {})


def _llama3(rotary: Rotary) -> dict[str, Any]:
    return {"rope_type": "llama3", "low_freq_factor": rotary.low, "high_freq_factor": rotary.high}


def _yarn(rotary: Rotary) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "beta_slow": rotary.low, "beta_fast": rotary.high, "truncate": rotary.rounded,
        "attention_factor": rotary.amplitude,
    }  # fmt: skip


WRITE = {FREQUENCY: _llama3, INDEX: _yarn}


def read_config(config: Mapping[str, Any], *, name: str = "model") -> tuple[Architecture, StoredFamily]:
    """The architecture of a config, its numerics with it, and its family. Raises `InputError` that says what is not known."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise InputError(
            f"model: weights of model_type {config.get('model_type')!r} cannot be read; one of {', '.join(FAMILIES)} is required"
        )
    config = {**family.silent, **config}
    architecture = parse_config(config, name=name)
    require(list(_problems(config, architecture, family)))
    return architecture, replace(family, side_by_side=bool(config.get("rope_interleave")))


def _problems(config: Mapping[str, Any], architecture: Architecture, family: StoredFamily) -> Iterator[str]:
    yield from (f"model: the config sets {what}, which is not known here" for what in architecture.numerics.unread)
    yield from (f"model: {problem}" for problem in filter(None, [rotary_problem(architecture)]))
    for key, value in family.needed.items():
        if config.get(key, value) != value:
            yield f"model: the config has {key} = {config[key]!r}; {value!r}, which this family's code has in places, is required"
    kinds, mixed = config.get("layer_types"), bool(architecture.sliding_window and architecture.global_every)
    if mixed and not family.layer_types:
        yield "model: layers with and without a sliding window; this family has one kind of layer"
    elif mixed and kinds and kinds != _layer_types(architecture):
        yield f"model: layer_types is {kinds}; full_attention on every {architecture.global_every}-th layer is required"


def _layer_types(architecture: Architecture) -> list[str]:
    return [SLIDING if architecture.window(layer) else FULL for layer in range(architecture.num_layers)]


def write_config(architecture: Architecture, seq_len: int, model_type: str = "") -> tuple[dict[str, Any], StoredFamily]:
    """The config of the first family (or of the one named) that such a model is of: read again, it says the same.

    Raises `InputError` where no family has what the model has.
    """
    for kind in (model_type,) if model_type else FAMILIES:
        config = _draft(architecture, seq_len, kind)
        try:
            read, family = read_config(config)
        except InputError:
            continue
        same = replace(
            read, name=architecture.name, source=architecture.source, nominal_num_params=architecture.nominal_num_params
        )
        if same == architecture:
            return config, family
    raise InputError(
        f"model {architecture.name}: none of {model_type or ', '.join(FAMILIES)} has what it has, so that it cannot be written "
        "as a model of transformers"
    )


def _draft(architecture: Architecture, seq_len: int, kind: str) -> dict[str, Any]:
    """The model in the terms of this family's configs, as far as the family has fields for it."""
    if kind not in FAMILIES:
        raise InputError(f"model: found model_type {kind!r}; one of {', '.join(FAMILIES)} is required")
    family, rule, numerics = FAMILIES[kind], RULES[kind].numerics, architecture.numerics
    qkv = "qkv" in architecture.bias
    config: dict[str, Any] = {
        "architectures": [family.built_as], "model_type": kind, "hidden_size": architecture.d_model,
        "num_hidden_layers": architecture.num_layers, "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads, "head_dim": architecture.head_dim,
        "intermediate_size": architecture.dense_d_ff or architecture.d_ff, "vocab_size": architecture.vocab_size,
        "max_position_embeddings": seq_len, "rms_norm_eps": numerics.norm_epsilon,
        "tie_word_embeddings": architecture.tied_embeddings, family.activation: ACTIVATIONS.get(architecture.mlp, ("",))[0],
        "attention_bias": qkv, "qkv_bias": qkv, "mlp_bias": "mlp" in architecture.bias,
        "sliding_window": architecture.sliding_window,
        **({"rope_parameters": write_rotaries(numerics, rule.rotary, architecture.head_dim)} if rule.rotary else {}),
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
        config |= _latent(architecture)
    if family.experts[0]:
        config |= _experts(architecture, family) | (_router(architecture) if rule.router else _everywhere(architecture))
    return config


def _experts(architecture: Architecture, family: StoredFamily) -> dict[str, Any]:
    number, width = family.experts
    return {
        number: architecture.num_experts, "num_experts_per_tok": architecture.experts_per_token, width: architecture.d_ff,
        "norm_topk_prob": architecture.numerics.normalised_gates,
    }  # fmt: skip


def _latent(architecture: Architecture) -> dict[str, Any]:
    """Fields of latent attention; a head's width is there that of its rotary part.

    Pairs that turn together lie side by side, as in the files of DeepSeek-V3, whose own code knows no other order.
    """
    return {
        "q_lora_rank": architecture.q_lora_rank or None, "kv_lora_rank": architecture.kv_lora_rank,
        "qk_rope_head_dim": architecture.rope_head_dim, "head_dim": architecture.rope_head_dim,
        "qk_nope_head_dim": architecture.head_dim - architecture.rope_head_dim, "v_head_dim": architecture.v_head_dim,
        "rope_interleave": True,
    }  # fmt: skip


def _everywhere(architecture: Architecture) -> dict[str, Any]:
    """Fields of experts on all layers."""
    return {
        "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": architecture.shared_expert_width,
    }  # fmt: skip


def _router(architecture: Architecture) -> dict[str, Any]:
    """Fields of DeepSeek's router, of shared experts and of the dense layers before those with experts."""
    gating = architecture.numerics.gating
    return {
        "n_group": gating.groups, "topk_group": gating.chosen_groups, "routed_scaling_factor": gating.scale,
        "n_shared_experts": architecture.shared_expert_width // max(architecture.d_ff, 1),
        "first_k_dense_replace": architecture.num_dense_layers, "use_qk_norm": architecture.qk_norm,
        "num_nextn_predict_layers": architecture.num_predict_layers,
    }  # fmt: skip


ABOUT = ("name", "source")  # of an architecture what says nothing of the model itself


def require_same(folder: str | Path, architecture: Architecture) -> None:
    """Raise `InputError` where the folder's model is another one than the plan's, in its weights or its numerics."""
    path = Path(folder) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--from: cannot read {path}: {error}; a folder of a Hugging Face model is required") from None
    found, _ = read_config(config, name=architecture.name)
    require(
        [
            f"--from: {path} has {field.name} = {getattr(found, field.name)!r}; the plan's model has "
            f"{getattr(architecture, field.name)!r}, which is required: plan for {path}"
            for field in fields(Architecture)
            if field.name not in ABOUT and getattr(found, field.name) != getattr(architecture, field.name)
        ]
    )


CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
