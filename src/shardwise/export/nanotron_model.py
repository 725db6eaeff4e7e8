"""What of a model's sizes nanotron's configurations say: those of LlamaConfig and of Starcoder2Config.

Source: nanotron 0.4, config/models_config.py, models/llama.py and models/starcoder2.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options, beside
from shardwise.export.launch import Launch
from shardwise.model.architecture import Architecture

CONFIG = "model.model_config"
LLAMA, STARCODER = f"{CONFIG}.is_llama_config", f"{CONFIG}.is_starcoder2_config"
GATED = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}  # LlamaConfig.hidden_act: the MLP is always gated
PLAIN = {"gelu": "gelu_pytorch_tanh", "relu": "relu"}  # Starcoder2Config.activation_function
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu"}
STARCODER_BIASES = ("qkv", "attention_out", "mlp")
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
LLAMA_THETA = 10_000.0  # RotaryEmbedding of models/llama.py, which no option sets


def is_starcoder(model: Architecture) -> bool:
    """Whether a model is one of Starcoder2Config rather than of LlamaConfig: by its norms, which have a bias."""
    return model.norm_bias


def _say(launch: Launch) -> Options:
    model = launch.model
    sizes = {
        "hidden_size": model.d_model, "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "intermediate_size": model.d_ff, "vocab_size": model.vocab_size, "max_position_embeddings": launch.job.seq_len,
    }  # fmt: skip
    own = _starcoder(model) if is_starcoder(model) else _llama(model)
    return {f"{CONFIG}.{name}": value for name, value in {**sizes, **own}.items()}


def _llama(model: Architecture) -> Options:
    activation = {"hidden_act": GATED[model.mlp]} if model.mlp in GATED else {}
    return {
        "is_llama_config": True, "num_key_value_heads": model.num_kv_heads, **activation,
        "rms_norm_eps": model.numerics.norm_epsilon, "tie_word_embeddings": model.tied_embeddings,
    }  # fmt: skip


def _starcoder(model: Architecture) -> Options:
    activation = {"activation_function": PLAIN[model.mlp]} if model.mlp in PLAIN else {}
    heads = (
        {"multi_query": True}
        if model.num_kv_heads == 1
        else {"grouped_query": True, "num_kv_heads": model.num_kv_heads}
    )
    windows: dict[str, object] = {}
    if model.sliding_window:
        every = model.global_every
        windows = {"sliding_window_size": model.sliding_window,
                   "global_attn_layers": [i for i in range(model.num_layers) if every and (i + 1) % every == 0]}  # fmt: skip
    return {
        "is_starcoder2_config": True, **heads, **activation, "layer_norm_epsilon": model.numerics.norm_epsilon, **windows,
        "use_rotary_embeddings": model.structure.rotates, "rope_theta": round(model.numerics.rotary.base),
        **dict.fromkeys(DROPOUTS, 0.0),
    }  # fmt: skip


def _hear(given: Given) -> Mapping[str, Any]:
    llama, starcoder = (bool(given.get(name, False)) for name in (LLAMA, STARCODER))
    if llama is starcoder:
        raise InputError(
            f"{CONFIG}: found {'both' if llama else 'neither'} of is_llama_config and is_starcoder2_config; one of the two, "
            "true, is required"
        )

    def of(name: str, default: Any = None) -> Any:
        return given.get(f"{CONFIG}.{name}", default)

    of("max_position_embeddings")  # rows of the rotary table, which grows as it needs
    return _heard_starcoder(of) if starcoder else _heard_llama(of)


def _heard_llama(of: Any) -> Mapping[str, Any]:
    """Sizes with the defaults of LlamaConfig."""
    activation, heads = of("hidden_act", "silu"), of("num_attention_heads", 32)
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{CONFIG}.hidden_act: found {activation!r}; one of {', '.join(ACTIVATIONS)} is what can be read"
        )
    return {
        **_sizes(of, hidden=4096, layers=32, heads=heads, vocab=32000), "model.d_ff": of("intermediate_size", 11008),
        "model.num_kv_heads": of("num_key_value_heads", heads), "model.mlp": ACTIVATIONS[activation],
        "model.tied_embeddings": bool(of("tie_word_embeddings", False)), "numerics.norm_epsilon": of("rms_norm_eps", 1e-6),
        "numerics.rotary.base": LLAMA_THETA,
    }  # fmt: skip


def _heard_starcoder(of: Any) -> Mapping[str, Any]:
    """Sizes with the defaults of Starcoder2Config; its head and its embedding are one."""
    plain = {theirs: ours for ours, theirs in PLAIN.items()} | {"gelu": "gelu"}
    activation, hidden = of("activation_function", "gelu_pytorch_tanh"), of("hidden_size", 2048)
    if activation not in plain:
        raise InputError(
            f"{CONFIG}.activation_function: found {activation!r}; one of {', '.join(plain)} is what can be read"
        )
    grouped = of("grouped_query", False)
    if grouped and of("multi_query", False):
        raise InputError(f"{CONFIG}: multi_query and grouped_query are both true; one of them is required")
    for name in DROPOUTS:
        of(name)
    layers = of("num_hidden_layers", 24)
    return {
        **_sizes(of, hidden=hidden, layers=layers, heads=of("num_attention_heads", 16), vocab=49280),
        "model.d_ff": of("intermediate_size") or 4 * hidden, "model.num_kv_heads": of("num_kv_heads") if grouped else 1,
        "model.mlp": plain[activation], "model.norm": "layer", "model.norm_bias": True, "model.bias": STARCODER_BIASES,
        "model.tied_embeddings": True, "numerics.norm_epsilon": of("layer_norm_epsilon", 1e-5),
        "model.positions": "rotary" if of("use_rotary_embeddings", True) else "none",
        "numerics.rotary.base": float(of("rope_theta", 10_000)),
        **_windows(of("sliding_window_size"), of("global_attn_layers") or [], layers),
    }  # fmt: skip


def _sizes(of: Any, *, hidden: int, layers: int, heads: int, vocab: int) -> Mapping[str, Any]:
    width = of("hidden_size", hidden)
    if width % heads:
        raise InputError(
            f"{CONFIG}.hidden_size: found {width}; a multiple of num_attention_heads = {heads} is required"
        )
    return {
        "model.d_model": width, "model.num_layers": of("num_hidden_layers", layers), "model.num_heads": heads,
        "model.head_dim": width // heads, "model.vocab_size": of("vocab_size", vocab),
    }  # fmt: skip


def _windows(window: int | None, everything: Sequence[int], layers: int) -> Mapping[str, Any]:
    """A window on all layers, or on all but every so many-th."""
    if window is None:
        return {}
    every = everything[0] + 1 if everything else 0
    if list(everything) != [i for i in range(layers) if every and (i + 1) % every == 0]:
        raise InputError(
            f"{CONFIG}.global_attn_layers: found {list(everything)[:20]}; every so many-th layer, or none, is what can be read"
        )
    return {"model.sliding_window": window, "model.global_every": every}


MODEL: tuple[Field, ...] = (
    Field(_say, _hear),
    beside("model.make_vocab_size_divisible_by", say=lambda launch: {"model.make_vocab_size_divisible_by": 1}),
)


def stages_dealt(model: Architecture, pp: int) -> tuple[int, ...]:
    """The layers of each stage, which nanotron deals out by the products of layers and head.

    Source: models/base.py, build_model, and get_block_compute_costs of the models: a stage takes blocks up to and with the one
    that passes its share.
    """
    matrices = 2 if is_starcoder(model) else 3
    layer = 4 * model.num_heads * model.head_dim * model.d_model + matrices * model.d_ff * model.d_model
    total = layer * model.num_layers + model.vocab_size * model.d_model
    stages, passed = [0] * pp, 0
    at = 0
    for _ in range(model.num_layers):
        stages[at] += 1
        passed += layer
        at += passed > total * ((at + 1) / pp)
    return tuple(stages)
