"""Architectures from a Hugging Face `config.json`: one table of families, one of spellings.

An architecture that is not in the table is refused, never guessed: its blocks might hold weights that we do not know of.
Sources: the modelling code of `transformers` for each family; a test compares the parameter counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import InputError
from shardwise.model.architecture import Architecture

Config = Mapping[str, Any]

# Spellings of one size, in the order in which they are looked for.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "d_ff": ("intermediate_size", "n_inner"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule:
    """What every model of a family has: fields of the architecture, fixed or read from the config.

    `tied` is whether the family ties its embeddings when the config does not say, `experts` the key of their number.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    tied: bool = False
    experts: str = ""


def _number(*keys: str) -> Callable[[Config], Any]:
    """The value under the first of some keys that the config has; what is no count is refused by the architecture."""
    return lambda config: _first(config, keys)


def _biases(
    *, qkv: str | bool = False, out: str | bool = False, mlp: str | bool = False, default: bool = False
) -> Callable[[Config], tuple[str, ...]]:
    """Names of the projections with a bias: always, never, or as a key of the config says (`default` where it does not)."""
    flags = {"qkv": qkv, "attention_out": out, "mlp": mlp}

    def read(config: Config) -> tuple[str, ...]:
        return tuple(n for n, flag in flags.items() if (config.get(flag, default) if isinstance(flag, str) else flag))

    return read


def _window(config: Config) -> int | None:
    """The sliding window, where the config has one and uses it."""
    used = config.get("use_sliding_window", True)
    window = config.get("sliding_window")
    return int(window) if window and used else None


def _global_every(default: int) -> Callable[[Config], int]:
    """Every how many layers one attends to everything."""

    def read(config: Config) -> int:
        kinds = config.get("layer_types")
        if kinds:
            full = [kind == "full_attention" for kind in kinds]
            return round(len(full) / sum(full)) if any(full) else 0
        return int(config.get("sliding_window_pattern", default))

    return read


LLAMA = _biases(qkv="attention_bias", out="attention_bias", mlp="mlp_bias")
FAMILIES: Mapping[str, FamilyRule] = {
    "llama": FamilyRule(read={"bias": LLAMA}),
    "mistral": FamilyRule(read={"sliding_window": _window}),
    "qwen2": FamilyRule(read={"bias": _biases(qkv=True)}),
    "qwen3": FamilyRule(fixed={"qk_norm": True}, read={"bias": _biases(qkv="attention_bias", out="attention_bias")}),
    "gemma": FamilyRule(fixed={"mlp": "geglu"}, read={"bias": _biases(qkv="attention_bias", out="attention_bias")}, tied=True),
    "gemma2": FamilyRule(
        fixed={"mlp": "geglu", "post_norms": True},
        read={"sliding_window": _window, "global_every": _global_every(2)},
        tied=True,
    ),
    "gemma3_text": FamilyRule(
        fixed={"mlp": "geglu", "post_norms": True, "qk_norm": True},
        read={"sliding_window": _window, "global_every": _global_every(6)},
        tied=True,
    ),
    "mixtral": FamilyRule(
        read={
            "num_experts": _number("num_local_experts"), "experts_per_token": _number("num_experts_per_tok"),
            "sliding_window": _window,
        },
        experts="num_local_experts",
    ),
    "qwen3_moe": FamilyRule(
        fixed={"qk_norm": True},
        read={
            "bias": _biases(qkv="attention_bias", out="attention_bias"), "d_ff": _number("moe_intermediate_size"),
            "num_experts": _number("num_experts"), "experts_per_token": _number("num_experts_per_tok"),
        },
        experts="num_experts",
    ),
    "phi3": FamilyRule(read={"sliding_window": _window}),
    "granite": FamilyRule(read={"bias": LLAMA}),
    "gpt2": FamilyRule(
        fixed={
            "mlp": "gelu", "norm": "layer", "norm_bias": True, "positions": "learned",
            "bias": ("qkv", "attention_out", "mlp"),
        },
        read={"max_positions": lambda config: config.get("n_positions", 1024)},
        tied=True,
    ),
    "starcoder2": FamilyRule(
        fixed={"mlp": "gelu", "norm": "layer", "norm_bias": True},
        read={"bias": _biases(qkv="use_bias", out="use_bias", mlp="use_bias", default=True), "sliding_window": _window},
        tied=True,
    ),
    "cohere": FamilyRule(
        fixed={"norm": "layer", "parallel": True},
        read={"bias": _biases(qkv="attention_bias", out="attention_bias")},
        tied=True,
    ),
}  # fmt: skip


def load_config(path: str | Path) -> Architecture:
    """An architecture from a config.json, or from the folder that holds one. Raises `InputError`."""
    source = Path(path)
    try:
        source = source / "config.json" if source.is_dir() else source
        config = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: cannot read {source}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a null byte in the path, nested too deeply
        raise InputError(f"model: {source} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"model: {source} holds a {type(config).__name__}; an object with a model_type is required")
    name = source.parent.name if source.name == "config.json" else source.stem
    return parse_config(config, name=name or "model")


def parse_config(config: Config, *, name: str = "model") -> Architecture:
    """An architecture from a config as a mapping. Raises `InputError` that names what is missing or not known."""
    config = _text_part(config)
    kind = config.get("model_type")
    rule = FAMILIES.get(str(kind))
    if rule is None:
        raise InputError(f"model: model_type is {kind!r}; one of {', '.join(FAMILIES)} is required")
    sizes = _sizes(config)
    _refuse_unknown(config, str(kind))
    own: dict[str, Any] = {**sizes, **rule.fixed, **{key: _read(config, key, read) for key, read in rule.read.items()}}
    tied = bool(config.get("tie_word_embeddings", rule.tied))
    return Architecture(name=name, **own, tied_embeddings=tied, source=f"config.json of model_type {kind}")


def _read(config: Config, key: str, read: Callable[[Config], Any]) -> Any:
    try:
        return read(config)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"model: the config's values for {key} cannot be read: {error}") from None


def _text_part(config: Config) -> Config:
    """The language model of a config that nests it beside a vision tower."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and "model_type" in inner else config


def _sizes(config: Config) -> dict[str, Any]:
    found = {name: _first(config, keys) for name, keys in ALIASES.items()}
    heads, width = found["num_heads"], found["d_model"]
    if found["num_kv_heads"] is None:
        found["num_kv_heads"] = heads
    if found["head_dim"] is None:
        whole = isinstance(heads, int) and isinstance(width, int) and heads > 0
        found["head_dim"] = width // heads if whole else width  # what is no number is refused by the architecture
    if found["d_ff"] is None and config.get("model_type") == "gpt2" and isinstance(width, int):
        found["d_ff"] = 4 * width
    missing = [" or ".join(ALIASES[name]) for name, value in found.items() if value is None]
    if missing:
        raise InputError(f"model: the config lacks {', '.join(missing)}")
    return {name: value for name, value in found.items() if value is not None}


def _first(config: Config, keys: tuple[str, ...]) -> Any:
    """The value under the first of several spellings that the config has."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _refuse_unknown(config: Config, kind: str) -> None:
    """Keys that change the weights in a way that the family's rule does not cover."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank")
    expected = FAMILIES[kind].experts
    foreign = [key for key in keys if config.get(key) and key != expected]
    if foreign:
        raise InputError(f"model: a {kind} with {', '.join(foreign)}: this family is not known with them")
    if expected and not config.get(expected):
        raise InputError(f"model: a {kind} without {expected}; the number of experts is required")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise InputError(
            f"model: a {kind} with mlp_only_layers or decoder_sparse_step: experts on all layers are required"
        )
    if kind == "cohere" and config.get("use_qk_norm"):
        raise InputError("model: a cohere model with use_qk_norm normalises per head, which is not known here")
