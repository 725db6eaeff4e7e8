"""MaxText's options for a model: a decoder block with base_* sizes, or the name of one of its models.

Source: MaxText at e591f30 (2026-08-22), src/maxtext/configs/base.yml, types.py and configs/models, layers/attentions.py,
models/*.py.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from shardwise.interop.frameworks.maxtext.rotary_options import ROTARY_DEFAULTS, read_rotary, write_rotary
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import OptionMapping, OptionReader
from shardwise.interop.text_formats.option_tables import Options, option_table, read_option_file
from shardwise.model import Architecture
from shardwise.values import InputError, did_you_mean

ACTIVATIONS: Mapping[str, list[str]] = {
    "swiglu": ["silu", "linear"], "geglu": ["gelu", "linear"], "gelu": ["gelu"], "relu": ["relu"],
    "clamped_swiglu": ["sigmoid", "linear"],
}  # fmt: skip
MLPS = {tuple(theirs): ours for ours, theirs in ACTIVATIONS.items()}
GPT3_BIASES, OSS_BIASES = ("qkv", "attention_out", "mlp"), ("qkv", "attention_out", "router", "experts")
DEEPSEEK_V3 = "deepseek3"  # begin of names of models (layers/moe.py)
PAIRED_BLOCK = "gemma2"  # its decoder layer is two of the model's: one with a window, one with global attention
# Blocks with global attention on every Nth layer, and windows on the others. A pipeline's stages have one kind of layer.
PATTERN_BLOCKS: Mapping[str, int] = {"gemma3": 6, "olmo3": 4}
GEMMA3_BY_WIDTH = "gemma3-27b"  # its scores are scaled by d_model / num_heads (gemma3.py, get_query_pre_attn_scalar)
# Names of models that blocks ask for: gemma3 scales scores by the name, the norms of q and k span all heads for olmo3 alone
# (attentions.py). Models of other sizes take the name with override_model_config.
NAMES_OF_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3-4b", "gemma3-12b", GEMMA3_BY_WIDTH),
    "olmo3": ("olmo3",),
}
FIXED_EPSILON = 1e-6  # of the layers of Gemma's blocks: RMSNorm's default, whatever normalization_layer_epsilon says
BLOCKS = (
    "llama2", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", PAIRED_BLOCK, "gpt3", "gpt_oss", "deepseek",
    *PATTERN_BLOCKS,
)  # fmt: skip
# Options of models that no architecture here describes, with the only readable value.
UNPRICED: Mapping[str, object] = {
    "use_indexer": False, "moba": False, "mhc_expansion_rate": 1, "engram_layers": [], "share_kv_projections": False,
    "interleave_moe_layer_step": 1, "enable_diloco": False, "use_multimodal": False, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "nope_layer_interval": -1, "capacity_factor": -1.0, "partial_rotary_factor": 1.0,
}  # fmt: skip
# The defaults of a model's options in base.yml.
BASE_OPTIONS: Mapping[str, Any] = {
    "decoder_block": "llama2", "base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 16, "base_mlp_dim": 7168,
    "base_num_decoder_layers": 16, "head_dim": 128, "vocab_size": 32000, "mlp_activations": ["silu", "linear"],
    "mlp_activations_limit": -1.0, "logits_via_embedding": False, "normalization_layer_epsilon": 1e-5,
    **ROTARY_DEFAULTS, "use_qk_norm": False, "attention_bias": False, "mlp_bias": False,
    "attention_sink": False, "sliding_window_size": 0, "use_post_attn_norm": False, "use_post_ffw_norm": False,
    "trainable_position_size": -1, "num_experts": 1,
    "num_experts_per_tok": 1, "base_moe_mlp_dim": -1, "norm_topk_prob": False, "first_num_dense_layers": 0, "shared_experts": 0,
    "routed_scaling_factor": 1.0, "routed_score_func": "", "routed_bias": False, "n_routing_groups": -1, "topk_routing_group": -1,
    "inhomogeneous_layer_cycle_interval": 1, "attention_type": "global", "q_lora_rank": 0, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mtp_num_layers": 0, "attn_logits_soft_cap": 0.0,
    "final_logits_soft_cap": 0.0,
}  # fmt: skip


def decoder_block(model: Architecture) -> str:
    """Return the decoder block nearest to a model. What the block cannot express is lost when the options are read back."""
    numerics = model.numerics
    kinds = {
        "deepseek": bool(model.kv_lora_rank), "gpt_oss": model.sinks, "gpt3": model.structure.has_learned_positions,
        "olmo3": not model.pre_norms, "gemma3": model.post_norms and model.qk_norm, PAIRED_BLOCK: model.post_norms,
        "qwen2": model.bias == ("qkv",), "qwen3_moe": model.qk_norm and bool(model.num_experts),
        "qwen3": model.qk_norm, "mixtral": bool(model.num_experts), "gemma": bool(numerics.norm_offset),
    }  # fmt: skip
    return next((name for name, fits in kinds.items() if fits), "llama2")


def layers_per_block(block: str) -> int:
    """Return how many of the model's layers one decoder layer of MaxText has."""
    return 2 if block == PAIRED_BLOCK else 1


def num_blocks(model: Architecture) -> int:
    """Return the number of MaxText's decoder layers, which pipeline stages consist of."""
    return model.num_layers // layers_per_block(decoder_block(model))


def _model_options(launch: Launch) -> Options:
    model, block = launch.model, decoder_block(launch.model)
    numerics = model.numerics
    options = {
        "decoder_block": block, "base_emb_dim": model.d_model, "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads, "base_mlp_dim": model.dense_d_ff or model.d_ff,
        "base_num_decoder_layers": num_blocks(model),
        "head_dim": BASE_OPTIONS["head_dim"] if model.kv_lora_rank else model.head_dim,
        "vocab_size": model.vocab_size, "mlp_activations": ACTIVATIONS.get(model.mlp, BASE_OPTIONS["mlp_activations"]),
        "logits_via_embedding": model.tied_embeddings, "normalization_layer_epsilon": numerics.norm_epsilon,
        **write_rotary(model), "mtp_num_layers": model.num_predict_layers,
        "attn_logits_soft_cap": numerics.attention_cap or 0.0, "final_logits_soft_cap": numerics.logit_cap or 0.0,
        **_expert_options(model, block), **_block_options(model, block),
    }  # fmt: skip
    return {name: value for name, value in options.items() if name not in BASE_OPTIONS or value != BASE_OPTIONS[name]}


def _expert_options(model: Architecture, block: str) -> Options:
    if not model.num_experts:
        return {}
    gating, numerics = model.numerics.gating, model.numerics
    options: dict[str, Any] = {
        "num_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token, "base_moe_mlp_dim": model.d_ff,
    }  # fmt: skip
    if block == "qwen3_moe":
        options["norm_topk_prob"] = numerics.normalised_gates
    if block == "deepseek":
        options |= {
            "first_num_dense_layers": model.num_dense_layers, "shared_experts": model.shared_expert_width // model.d_ff,
            "routed_scaling_factor": gating.scale, "routed_score_func": gating.scores, "routed_bias": gating.scores == "sigmoid",
            **({"n_routing_groups": gating.groups, "topk_routing_group": gating.chosen_groups} if gating.groups > 1 else {}),
        }  # fmt: skip
    return options


def _block_options(model: Architecture, block: str) -> Options:
    """Return the options that a kind of block needs."""
    match block:
        case "deepseek":
            return {"attention_type": "mla", "q_lora_rank": model.q_lora_rank, "kv_lora_rank": model.kv_lora_rank,
                    "qk_nope_head_dim": model.head_dim - model.rope_head_dim, "qk_rope_head_dim": model.rope_head_dim,
                    "v_head_dim": model.v_head_dim}  # fmt: skip
        case "gpt_oss":
            return {"attention_bias": True, "attention_sink": True, "mlp_bias": True, "routed_bias": True,
                    "mlp_activations_limit": 7.0, "sliding_window_size": model.sliding_window or 0,
                    "inhomogeneous_layer_cycle_interval": 2}  # fmt: skip
        case "gpt3":
            return {"trainable_position_size": model.max_positions}
        case "gemma2":
            norms = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
            return {**norms, "sliding_window_size": model.sliding_window or 0}
        case "gemma3":
            scale = model.numerics.attention_scale
            name = "gemma3-4b" if scale is None or math.isclose(scale, model.head_dim**-0.5) else GEMMA3_BY_WIDTH
            norms = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
            return {**_named(name), **norms, "sliding_window_size": model.sliding_window or 0}
        case "olmo3":
            cycle = {"inhomogeneous_layer_cycle_interval": PATTERN_BLOCKS[block]}
            return {**_named("olmo3-7b"), **cycle, "use_qk_norm": model.qk_norm, "attention_bias": model.bias == ("qkv",),
                    "sliding_window_size": model.sliding_window or 0}  # fmt: skip
        case "qwen2":
            return {"attention_bias": True}
        case "qwen3" | "qwen3_moe":
            return {"use_qk_norm": True}
    return {}


def _named(name: str) -> Options:
    return {"model_name": name, "override_model_config": True}


def _read_model(reader: OptionReader) -> Mapping[str, Any]:
    options = _read_model_options(reader)
    block, latent = options["decoder_block"], options["attention_type"] == "mla"
    return {
        "model.d_model": options["base_emb_dim"], "model.num_heads": options["base_num_query_heads"],
        "model.num_kv_heads": options["base_num_query_heads"] if latent else options["base_num_kv_heads"],
        "model.num_layers": options["base_num_decoder_layers"] * layers_per_block(block),
        "model.vocab_size": options["vocab_size"], "model.mlp": MLPS[tuple(options["mlp_activations"])],
        "model.tied_embeddings": options["logits_via_embedding"], "model.num_predict_layers": options["mtp_num_layers"],
        "numerics.norm_epsilon": options["normalization_layer_epsilon"],
        **read_rotary(options, options["qk_nope_head_dim"] + options["qk_rope_head_dim"] if latent else 0),
        "numerics.attention_cap": options["attn_logits_soft_cap"] or None,
        "numerics.logit_cap": options["final_logits_soft_cap"] or None, "model.head_dim": options["head_dim"],
        **_read_experts(options, block, _routes_by_groups(reader)), **_read_block(options, block, _model_name(reader)),
    }  # fmt: skip


def _read_model_options(reader: OptionReader) -> Options:
    """Return the model's options with base.yml's defaults. Raises `InputError` for models that no architecture here describes."""
    unreadable = [name for name, accepted in UNPRICED.items() if reader.get(name, accepted) != accepted]
    if unreadable:
        raise InputError(
            *(f"{name}: found {reader.get(name)!r}; {UNPRICED[name]!r} is what can be read" for name in unreadable)
        )
    options = {name: reader.get(name, default) for name, default in BASE_OPTIONS.items()}
    block = "llama2" if options["decoder_block"] == "default" else options["decoder_block"]
    if block not in BLOCKS:
        raise InputError(f"decoder_block: found {block!r}; one of {', '.join(BLOCKS)} is what can be read")
    if tuple(options["mlp_activations"]) not in MLPS:
        raise InputError(
            f"mlp_activations: found {options['mlp_activations']}; one of {', '.join(map(str, MLPS))} is what can be read"
        )
    if options["attention_type"] not in ("global", "mla") or (options["attention_type"] == "mla") is not (
        block == "deepseek"
    ):
        raise InputError(
            f"attention_type: found {options['attention_type']!r} with {block}; mla with deepseek, else global, can be read"
        )
    return {**options, "decoder_block": block}


def _routes_by_groups(reader: OptionReader) -> bool:
    """Return whether the router limits groups of experts: it does for models of certain names (layers/moe.py, get_topk)."""
    name = _model_name(reader)
    return _is_deepseek_v3(reader.options) if name == "default" else name.startswith(DEEPSEEK_V3)


def _model_name(reader: OptionReader) -> str:
    return str(reader.get("model_name", "default")).replace("-Instruct", "")


def is_named_deepseek_v3(launch: Launch) -> bool:
    """Return whether a launch names a model whose routers limit groups, and leave the balance bias out of the gates."""
    return _is_deepseek_v3(_model_options(launch))


def _is_deepseek_v3(options: Options) -> bool:
    return str(shorten_to_name(options).get("model_name", "")).startswith(DEEPSEEK_V3)


def _read_experts(options: Options, block: str, routes_by_groups: bool) -> Mapping[str, Any]:
    if options["num_experts"] <= 1:
        return {"model.d_ff": options["base_mlp_dim"]}
    dense, width = options["first_num_dense_layers"] if block == "deepseek" else 0, options["base_moe_mlp_dim"]
    grouped = {
        "numerics.gating.groups": options["n_routing_groups"],
        "numerics.gating.chosen_groups": options["topk_routing_group"],
        "numerics.gating.votes": 2,  # the best scores of a group (expert_group_mask)
    }
    scores = options["routed_score_func"] or "softmax"
    return {
        "model.num_experts": options["num_experts"], "model.experts_per_token": options["num_experts_per_tok"],
        "model.d_ff": width if width > 0 else options["base_mlp_dim"], "model.num_dense_layers": dense,
        "model.dense_d_ff": options["base_mlp_dim"] if dense else 0,
        "model.shared_expert_width": options["shared_experts"] * width if block == "deepseek" else 0,
        "numerics.normalised_gates": block != "deepseek" or scores == "sigmoid",  # others take the softmax of those chosen
        "numerics.gating.scores": scores,
        "numerics.gating.scale": options["routed_scaling_factor"],
        **(grouped if options["n_routing_groups"] > 1 and routes_by_groups else {}),
    }  # fmt: skip


def _read_block(options: Options, block: str, model_name: str) -> Mapping[str, Any]:
    size = options["sliding_window_size"]
    window = {"model.sliding_window": size, "model.global_every": PATTERN_BLOCKS.get(block, 2)} if size else {}
    if block in PATTERN_BLOCKS:
        _require_pattern(options, block, model_name)
    match block:
        case "deepseek":
            return {"model.kv_lora_rank": options["kv_lora_rank"], "model.q_lora_rank": options["q_lora_rank"],
                    "model.rope_head_dim": options["qk_rope_head_dim"], "model.v_head_dim": options["v_head_dim"],
                    "model.head_dim": options["qk_nope_head_dim"] + options["qk_rope_head_dim"]}  # fmt: skip
        case "gpt_oss":
            return {"model.sinks": options["attention_sink"], "model.bias": OSS_BIASES, **window}
        case "gpt3":
            return {"model.norm": "layer", "model.norm_bias": True, "model.positions": "learned", "model.bias": GPT3_BIASES,
                    "model.max_positions": options["trainable_position_size"]}  # fmt: skip
        case "gemma" | "gemma2" | "gemma3":
            gemma = {"numerics.norm_offset": 1.0, "numerics.embedding_scale": math.sqrt(options["base_emb_dim"]),
                     "numerics.norm_epsilon": FIXED_EPSILON}  # fmt: skip
            has_post_norms = options["use_post_attn_norm"] and options["use_post_ffw_norm"]
            norms = {"model.post_norms": has_post_norms, "model.qk_norm": block == "gemma3"} if block != "gemma" else {}
            by_width = {
                "numerics.attention_scale": (options["base_emb_dim"] // options["base_num_query_heads"]) ** -0.5
            }
            return {
                **gemma,
                **norms,
                **(window if norms else {}),
                **(by_width if model_name == GEMMA3_BY_WIDTH else {}),
            }
        case "olmo3":
            norms = {"model.pre_norms": False, "model.post_norms": True, "model.qk_norm": options["use_qk_norm"]}
            if options["use_qk_norm"] and model_name.startswith("olmo3"):
                norms["model.qk_norm_over"] = "projection"
            return {**norms, "model.bias": ("qkv",) if options["attention_bias"] else (), **window}
        case "qwen2":
            bias = ("qkv",) if options["attention_bias"] else ()
            return {"model.bias": bias, "model.qk_norm": options["use_qk_norm"]}
        case "qwen3" | "qwen3_moe":
            return {"model.qk_norm": options["use_qk_norm"]}
    return {}


def _require_pattern(options: Options, block: str, model_name: str) -> None:
    """Raise `InputError` unless MaxText builds layers of this block: by its name, with windows, in whole cycles."""
    names = NAMES_OF_BLOCKS[block]
    if block == "gemma3" and model_name not in names:
        raise InputError(
            f"decoder_block: found gemma3 with model_name {model_name}; MaxText builds it for one of {', '.join(names)} "
            "(set override_model_config for other sizes)"
        )
    if not options["sliding_window_size"]:
        raise InputError(f"sliding_window_size: found 0; {block} needs the size of its windows")
    layers, cycle = options["base_num_decoder_layers"], PATTERN_BLOCKS[block]
    if block == "olmo3" and layers % cycle:
        raise InputError(f"base_num_decoder_layers: found {layers}; {block} builds them in cycles of {cycle}")


MODEL_MAPPINGS: tuple[OptionMapping, ...] = (OptionMapping(_model_options, _read_model),)


@cache
def known_models() -> Mapping[str, Options]:
    """Return the options of each of MaxText's models by name, from the package's table."""
    rows = csv.DictReader(read_option_file("maxtext_models.csv").splitlines())
    return {row["name"]: json.loads(row["options"]) for row in rows}


# Options that may stand beside the name of a model that does not set them.
BESIDE_NAMES = ("mtp_num_layers", "n_routing_groups", "topk_routing_group")


def shorten_to_name(options: Options) -> Options:
    """Return options with the name of one of MaxText's models in place of its sizes, if one has the same; else unchanged.

    Of several the shortest name is taken: longer ones are of variants, with meshes or schedules of their own.
    """
    model_options = {name: options.get(name, default) for name, default in BASE_OPTIONS.items()}
    accepted_names = option_table("maxtext")["model_name"].choices
    for name, named_options in sorted(known_models().items(), key=lambda model: len(model[0])):
        unset_options = {key: model_options[key] for key in BESIDE_NAMES if key not in named_options}
        sizes = {key: value for key, value in named_options.items() if key in BASE_OPTIONS}
        if (
            name in accepted_names
            and {**BASE_OPTIONS, **sizes, **unset_options} == model_options
            and not _unpriced_options(named_options)
        ):
            rest = {key: value for key, value in options.items() if key not in BASE_OPTIONS or key in unset_options}
            return (
                {**rest, "model_name": name}
                if rest.pop("override_model_config", None)
                else {"model_name": name, **rest}
            )
    return _override_name(options, model_options) if options.get("override_model_config") else options


def _override_name(options: Options, model_options: Options) -> Options:
    """Return options that name a model of other sizes, with each option in which this one differs from it."""
    named_options = known_models()[options["model_name"]]
    defaults = {**BASE_OPTIONS, **{key: value for key, value in named_options.items() if key in BASE_OPTIONS}}
    rest = {key: value for key, value in options.items() if key not in BASE_OPTIONS}
    return {**rest, **{key: value for key, value in model_options.items() if value != defaults[key]}}


def expand_name(options: Options, command: Collection[str] = ()) -> Options:
    """Return options with those of the model that they name, and with a scale of all sizes applied.

    `command` are the names of the options on the command line. Those alone override the model's, and only with
    override_model_config: what a file says beside the name of a model that sets it is ignored (pyconfig.py). Raises `InputError`
    for a name that the release does not have, and for options of a command that differ from the model's without that option.
    """
    name = str(options.get("model_name", "default")).replace("-Instruct", "")
    if name != "default":
        if name not in known_models():
            suggestion = did_you_mean(name, known_models())
            raise InputError(f"model_name: found {name!r}{suggestion}; a model of configs/models is required")
        named_options = known_models()[name]
        differing = [key for key in command if key in named_options and options[key] != named_options[key]]
        if differing and not options.get("override_model_config"):
            raise InputError(
                f"{', '.join(differing)}: the model {name} sets it too, to another value; MaxText refuses that without "
                "override_model_config=true"
            )
        options = {**options, **{key: value for key, value in named_options.items() if key not in differing}}
    return _scale_sizes(options, options.get("global_parameter_scale", 1))


def _scale_sizes(options: Options, scale: object) -> Options:
    """Multiply sizes by powers of two. Source: types.py, get_individual_scales: heads and MLP first, then width, then layers."""
    if scale == 1:
        return options
    if not isinstance(scale, int) or scale < 1 or scale & (scale - 1) or scale > 2**30:
        raise InputError(f"global_parameter_scale: found {scale!r}; a power of two is required")
    layer_doublings, remainder = divmod(scale.bit_length() - 1, 3)
    head_doublings, width_doublings = layer_doublings + (remainder > 0), layer_doublings + (remainder > 1)
    doublings = {
        "base_num_query_heads": head_doublings, "base_num_kv_heads": head_doublings, "base_mlp_dim": head_doublings,
        "base_moe_mlp_dim": head_doublings, "base_emb_dim": width_doublings, "base_num_decoder_layers": layer_doublings,
    }  # fmt: skip
    sizes = {name: options.get(name, BASE_OPTIONS[name]) for name in doublings}
    return {**options, **{name: size * 2 ** doublings[name] if size > 0 else size for name, size in sizes.items()}}


def _unpriced_options(options: Options) -> list[str]:
    return [name for name, value in UNPRICED.items() if options.get(name, value) != value]
