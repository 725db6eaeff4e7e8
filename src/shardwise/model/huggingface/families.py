"""Model families as Hugging Face's `config.json` describes them: one rule for each `model_type`.

A `FamilyRule` says which fields of the architecture every model of the family has, which keys of the config give the others,
and how the family spells constants that change values but neither weights nor operations
(`model/huggingface/numerics_reader.py`). Sources: the modelling code of `transformers` for each family; a test compares the
parameter counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.model.huggingface.field_readers import (
    NUM_HEADS_KEYS,
    SIZE_READERS,
    FieldReader,
    TrackedConfig,
    read_biases,
    read_choice,
    read_d_model,
    read_default_mlp_ratio,
    read_first,
    read_flag,
    read_global_every,
    read_or_zero,
    read_positive,
    read_product,
    read_window,
)
from shardwise.model.huggingface.numerics_reader import (
    DEEPSEEK_V2_ROUTER,
    DEEPSEEK_V3_ROUTER,
    SIGMOID_ROUTER,
    NumericsRule,
    RotaryRule,
)

ATTENTION_BIASES = read_biases(qkv="attention_bias", attention_out="attention_bias")
LLAMA_BIASES = read_biases(qkv="attention_bias", attention_out="attention_bias", mlp="mlp_bias")
QKV_OUT_MLP = ("qkv", "attention_out", "mlp")
FULL_ATTENTION_ONLY = {"use_sliding_window": (False,)}
EXPERTS_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}


def window_readers(every: int) -> dict[str, FieldReader]:
    """Return readers of a sliding window on all layers but every n-th (0: on all), where the config does not list the layers."""
    return {"sliding_window": read_window, "global_every": read_global_every(every)}


WINDOW_ON_EVERY_LAYER = window_readers(0)


def expert_readers(*keys: str, width: str = "intermediate_size") -> dict[str, FieldReader]:
    """Return readers of how many experts there are, how many of them a token takes, and how wide each is."""
    return {
        "num_experts": read_positive(*keys), "experts_per_token": read_first("num_experts_per_tok", "experts_per_token"),
        "d_ff": read_first(width),
    }  # fmt: skip


def dense_layer_readers(key: str) -> dict[str, FieldReader]:
    """Return readers of leading dense layers and the width of their MLP; shared experts count as one of their joint width."""
    narrow = read_first("moe_intermediate_size")
    return {
        "num_dense_layers": read_or_zero(key),
        "dense_d_ff": lambda config: SIZE_READERS["d_ff"](config) if config.first(key) else 0,
        "shared_expert_width": read_product(narrow, read_or_zero("n_shared_experts")),
        **expert_readers("n_routed_experts", width="moe_intermediate_size"),
    }


LATENT_ATTENTION_READERS: Mapping[str, FieldReader] = {
    "head_dim": lambda config: _add_sizes(read_first("qk_nope_head_dim")(config), read_first("qk_rope_head_dim")(config)),
    "num_kv_heads": read_first(*NUM_HEADS_KEYS), "q_lora_rank": read_or_zero("q_lora_rank"),
    "kv_lora_rank": read_first("kv_lora_rank"),
    "rope_head_dim": read_first("qk_rope_head_dim"), "v_head_dim": read_first("v_head_dim"),
}  # fmt: skip


def _add_sizes(left: Any, right: Any) -> Any:
    return left + right if isinstance(left, int) and isinstance(right, int) else (left, right)


def _read_opt_width(config: TrackedConfig) -> Any:
    width, projected = read_d_model(config), config.first("word_embed_proj_dim")
    if projected not in (None, width):
        raise ValueError(f"word_embed_proj_dim is {projected!r}; a projection behind the embedding is not known here")
    return width


def _read_opt_positions(config: TrackedConfig) -> Any:
    """Return the rows of OPT's table: two more than it has positions."""
    rows = read_first("max_position_embeddings")(config)
    return rows + 2 if isinstance(rows, int) else rows


def _read_falcon_kv_heads(config: TrackedConfig) -> Any:
    if read_flag("new_decoder_architecture", False)(config):
        return read_first("num_kv_heads", "n_head_kv", *NUM_HEADS_KEYS)(config)
    return 1 if read_flag("multi_query", True)(config) else read_first(*NUM_HEADS_KEYS)(config)


def _is_falcon_parallel(config: TrackedConfig) -> bool:
    parallel, new = read_flag("parallel_attn", True)(config), read_flag("new_decoder_architecture", False)(config)
    if new and not parallel:
        raise ValueError("new_decoder_architecture with parallel_attn false is not known here")
    return bool(parallel)


def _has_falcon_separate_norms(config: TrackedConfig) -> bool:
    default = 2 if config.get("new_decoder_architecture") else 1
    norms = config.first("num_ln_in_parallel_attn") or default
    return _is_falcon_parallel(config) and norms == 2


def _read_mpt_width(config: TrackedConfig) -> Any:
    """Return the model width. Checks MPT's own table of attention settings: only what its first models have is known."""
    supported = {"attn_type": "multihead_attention", "alibi": True, "qk_ln": False, "kv_n_heads": config.get("n_heads")}
    attn_config = config.get("attn_config") or {}
    wrong = [
        f"{k} = {attn_config[k]!r}"
        for k, v in supported.items()
        if attn_config.get(k) is not None and attn_config[k] != v
    ]
    if wrong or "alibi" not in attn_config:
        raise ValueError(f"attn_config has {', '.join(wrong) or 'no alibi'}; attention with ALiBi alone is known here")
    return read_d_model(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule:
    """Properties of every model of a family: fields of the architecture, `fixed` or `read` from the config.

    `only` are the supported values of a key: with others the model has weights or operations that are not supported here.
    `tied` is whether the family ties its embeddings when the config does not say. `numerics`: how its config names the
    constants of its arithmetic.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, FieldReader] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tied: bool = False
    numerics: NumericsRule = field(default_factory=NumericsRule)


DEEPSEEK = FamilyRule(
    read={**dense_layer_readers("first_k_dense_replace"), **LATENT_ATTENTION_READERS},
    only={"attention_bias": (False,), "mlp_bias": (False,), "moe_layer_freq": (1,)},
)
FAMILIES: dict[str, FamilyRule] = {
    "llama": FamilyRule(read={"bias": LLAMA_BIASES}),
    "mistral": FamilyRule(read=WINDOW_ON_EVERY_LAYER),
    "qwen2": FamilyRule(read={"bias": read_biases(qkv=True)}, only=FULL_ATTENTION_ONLY),
    "qwen3": FamilyRule(fixed={"qk_norm": True}, read={"bias": ATTENTION_BIASES}, only=FULL_ATTENTION_ONLY),
    "gemma": FamilyRule(
        fixed={"mlp": "geglu"}, read={"bias": ATTENTION_BIASES}, tied=True, numerics=NumericsRule(gemma=True)
    ),
    "gemma2": FamilyRule(
        fixed={"mlp": "geglu", "post_norms": True},
        read={"bias": ATTENTION_BIASES, **window_readers(2)},
        tied=True,
        numerics=NumericsRule(gemma=True, scaled_scores=True),
    ),
    "gemma3_text": FamilyRule(
        fixed={"mlp": "geglu", "post_norms": True, "qk_norm": True},
        read={"bias": ATTENTION_BIASES, **window_readers(6)},
        tied=True,
        numerics=NumericsRule(
            gemma=True, scaled_scores=True, rotary=RotaryRule(theta=1_000_000.0, local_theta=10_000.0)
        ),
    ),
    "phi3": FamilyRule(read=WINDOW_ON_EVERY_LAYER, numerics=NumericsRule(epsilon=1e-5, rotary=RotaryRule(part=1.0))),
    "granite": FamilyRule(read={"bias": LLAMA_BIASES}, numerics=NumericsRule(multipliers=True)),
    "smollm3": FamilyRule(
        read={"bias": LLAMA_BIASES},
        only=FULL_ATTENTION_ONLY,
        tied=True,
        numerics=NumericsRule(rotary=RotaryRule(theta=2_000_000.0)),
    ),
    "olmo2": FamilyRule(
        fixed={"qk_norm": True, "qk_norm_over": "projection", "pre_norms": False, "post_norms": True},
        read={"bias": ATTENTION_BIASES},
        numerics=NumericsRule(epsilon=1e-5),
    ),
    "olmo3": FamilyRule(
        fixed={"qk_norm": True, "qk_norm_over": "projection", "pre_norms": False, "post_norms": True},
        read={"bias": ATTENTION_BIASES, **window_readers(4)},
        numerics=NumericsRule(epsilon=1e-5, rotary=RotaryRule(theta=500_000.0, local_theta=500_000.0)),
    ),
    "starcoder2": FamilyRule(
        fixed={"mlp": "gelu", "norm": "layer", "norm_bias": True},
        read={
            "bias": read_biases(qkv="use_bias", attention_out="use_bias", mlp="use_bias", default=True),
            **WINDOW_ON_EVERY_LAYER,
        },
        tied=True,
        numerics=NumericsRule(epsilon=1e-5),
    ),
    "cohere": FamilyRule(
        fixed={"norm": "layer", "parallel": True},
        read={"bias": ATTENTION_BIASES},
        tied=True,
        numerics=NumericsRule(epsilon=1e-5, rotary=RotaryRule(theta=500_000.0)),
    ),
    "cohere2": FamilyRule(
        fixed={"norm": "layer", "parallel": True},
        read={"bias": ATTENTION_BIASES, **window_readers(4)},
        tied=True,
        numerics=NumericsRule(epsilon=1e-5),
    ),
    "gpt2": FamilyRule(
        fixed={"mlp": "gelu", "norm": "layer", "norm_bias": True, "positions": "learned", "bias": QKV_OUT_MLP},
        read={
            "max_positions": lambda config: config.get("n_positions", 1024),
            "d_ff": read_product(read_default_mlp_ratio, read_d_model, "n_inner"),
        },
        tied=True,
        numerics=NumericsRule(epsilon=1e-5, rotary=None),
    ),
    "gpt_neox": FamilyRule(
        fixed={"mlp": "gelu", "norm": "layer", "norm_bias": True},
        read={
            "bias": read_biases(qkv="attention_bias", attention_out="attention_bias", mlp=True, default=True),
            "parallel": read_flag("use_parallel_residual", True),
            "separate_norms": read_flag("use_parallel_residual", True),
        },
        numerics=NumericsRule(epsilon=1e-5, rotary=RotaryRule(part=0.25)),
    ),
    "opt": FamilyRule(
        fixed={"norm": "layer", "norm_bias": True, "positions": "learned"},
        read={
            "d_model": _read_opt_width,
            "max_positions": _read_opt_positions,
            "mlp": read_choice({"relu": "relu", "gelu": "gelu"}, "activation_function"),
            "bias": read_biases(qkv="enable_bias", attention_out="enable_bias", mlp="enable_bias", default=True),
        },
        only={
            "do_layer_norm_before": (True,),
            "layer_norm_elementwise_affine": (True,),
            "_remove_final_layer_norm": (False,),
        },
        tied=True,
        numerics=NumericsRule(epsilon=1e-5, rotary=None),
    ),
    "bloom": FamilyRule(
        fixed={
            "mlp": "gelu",
            "norm": "layer",
            "norm_bias": True,
            "positions": "none",
            "embedding_norm": True,
            "bias": QKV_OUT_MLP,
        },
        read={"d_ff": read_product(read_default_mlp_ratio, read_d_model, "n_inner")},
        only={"apply_residual_connection_post_layernorm": (False,)},
        tied=True,
        numerics=NumericsRule(epsilon=1e-5, rotary=None, unsupported=("ALiBi",)),
    ),
    "falcon": FamilyRule(
        fixed={"mlp": "gelu", "norm": "layer", "norm_bias": True},
        read={
            "num_kv_heads": _read_falcon_kv_heads,
            "parallel": _is_falcon_parallel,
            "separate_norms": _has_falcon_separate_norms,
            "d_ff": read_product(read_default_mlp_ratio, read_d_model, "ffn_hidden_size"),
            "bias": read_biases(qkv="bias", attention_out="bias", mlp="bias"),
            "positions": lambda config: "none" if read_flag("alibi", False)(config) else "rotary",
        },
        tied=True,
        numerics=NumericsRule(epsilon=1e-5),
    ),
    "mpt": FamilyRule(
        fixed={"mlp": "gelu", "norm": "layer", "positions": "none"},
        read={"d_model": _read_mpt_width, "d_ff": read_product(read_default_mlp_ratio, read_d_model)},
        only={"no_bias": (True,), "expansion_ratio": (4,)},
        tied=True,
        numerics=NumericsRule(epsilon=1e-5, rotary=None, unsupported=("ALiBi",)),
    ),
    "mixtral": FamilyRule(
        read={**expert_readers("num_local_experts"), **WINDOW_ON_EVERY_LAYER},
        numerics=NumericsRule(epsilon=1e-5, rotary=RotaryRule(theta=1_000_000.0)),
    ),
    "granitemoe": FamilyRule(
        read={"bias": ATTENTION_BIASES, **expert_readers("num_local_experts")}, numerics=NumericsRule(multipliers=True)
    ),
    "olmoe": FamilyRule(
        fixed={"qk_norm": True, "qk_norm_over": "projection"},
        read={"bias": ATTENTION_BIASES, **expert_readers("num_experts")},
        numerics=NumericsRule(epsilon=1e-5, gates="norm_topk_prob"),
    ),
    "qwen2_moe": FamilyRule(
        fixed={"shared_gate": True},
        read={
            "bias": read_biases(qkv="qkv_bias", default=True),
            **expert_readers("num_experts", width="moe_intermediate_size"),
            "shared_expert_width": read_first("shared_expert_intermediate_size"),
        },
        only={**EXPERTS_EVERYWHERE, **FULL_ATTENTION_ONLY},
        numerics=NumericsRule(gates="norm_topk_prob"),
    ),
    "qwen3_moe": FamilyRule(
        fixed={"qk_norm": True},
        read={
            "bias": ATTENTION_BIASES,
            **expert_readers("num_experts", "num_local_experts", width="moe_intermediate_size"),
        },
        only={**EXPERTS_EVERYWHERE, **FULL_ATTENTION_ONLY, "use_qk_norm": (True,)},
        numerics=NumericsRule(gates="norm_topk_prob"),
    ),
    "glm4_moe": FamilyRule(
        read={
            "bias": read_biases(qkv="attention_bias"),
            "qk_norm": read_flag("use_qk_norm", False),
            **dense_layer_readers("first_k_dense_replace"),
        },
        only={"moe_layer_freq": (1,)},
        numerics=NumericsRule(epsilon=1e-5, router=SIGMOID_ROUTER, rotary=RotaryRule(part=0.5)),
    ),
    "deepseek_v2": replace(DEEPSEEK, numerics=NumericsRule(router=DEEPSEEK_V2_ROUTER, rotary=RotaryRule(scaled=True))),
    "deepseek_v3": replace(DEEPSEEK, numerics=NumericsRule(router=DEEPSEEK_V3_ROUTER, rotary=RotaryRule(scaled=True))),
    "kimi_k2": replace(DEEPSEEK, numerics=NumericsRule(router=DEEPSEEK_V3_ROUTER, rotary=RotaryRule(scaled=True))),
    "gpt_oss": FamilyRule(
        fixed={"mlp": "clamped_swiglu", "sinks": True},
        read={
            "bias": read_biases(
                qkv="attention_bias", attention_out="attention_bias", router=True, experts=True, default=True
            ),
            **expert_readers("num_local_experts"),
            **window_readers(2),
        },
        numerics=NumericsRule(epsilon=1e-5, rotary=RotaryRule(theta=150_000.0)),
    ),
}
