"""Read an `Architecture` from a Hugging Face `config.json`.

A `model_type` outside the table of families is refused, never guessed, since its blocks might have weights that are not known
here. A config with settings that its family's rule does not support is refused as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.model.architecture import Architecture
from shardwise.model.huggingface.family_rules import FAMILIES, FamilyRule, unsupported_families
from shardwise.model.huggingface.field_readers import (
    MAX_SHOWN_CHARS,
    SIZE_READERS,
    MissingKey,
    TrackedConfig,
    read_boolean,
    shorten,
)
from shardwise.model.huggingface.layer_lists import arrange_layers
from shardwise.model.huggingface.numerics_reader import read_numerics
from shardwise.model.huggingface.towers import find_omitted_parts
from shardwise.values import FileMessages, InputError, did_you_mean, read_json, require_number


def load_config(path: str | Path) -> Architecture:
    """Return the architecture of a config.json, or of the folder that holds one. Raises `InputError`."""
    source = Path(path)
    source = source / "config.json" if os.path.isdir(source) else source
    config = read_json(source, FileMessages("model: "))
    if not isinstance(config, dict):
        raise InputError(f"model: {source} holds a {type(config).__name__}; an object with a model_type is required")
    name = source.parent.name if source.name == "config.json" else source.stem
    return parse_config(config, name=name or "model")


POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def parse_config(values: Mapping[str, Any], *, name: str = "model") -> Architecture:
    """Return the architecture of a config as a mapping. Raises `InputError` that names what is missing or not known."""
    complete_config, values = values, _language_model_config(values)
    kind = values.get("model_type")
    rule = FAMILIES.get(str(kind), FamilyRule())
    config = TrackedConfig({**rule.defaults, **values}, rule.names)
    if kind not in FAMILIES:
        raise InputError(_describe_unknown(config, kind))
    fields = _arrange_layers(config, rule, {**read_fields(config, rule), **rule.fixed})
    unknown = list(unsupported_settings(config, rule))
    if unknown:
        raise InputError(f"model: a {kind} with {', '.join(unknown)}: this family is not known with that")
    tied = read_boolean(config, "tie_word_embeddings", rule.tied)
    for key in POSITION_KEYS:  # weights do not depend on it, but runs and exports take it for the longest sequence
        if config.values_by_key.get(key) is not None:
            require_number(config.values_by_key[key], key, FileMessages("model: "), is_integer=True)
    source = f"config.json of model_type {kind}"
    quantization = config.get("quantization_config") or complete_config.get("quantization_config")
    architecture = Architecture(
        name=name, **fields, tied_embeddings=tied, source=source, stored_format=describe_quantization(quantization),
        omitted_parts=tuple(find_omitted_parts(complete_config, config.values_by_key)),
        max_context=read_max_context(config.values_by_key),
    )  # fmt: skip
    architecture = add_numerics(architecture, config)
    unread = (*architecture.numerics.unread, *_unread_outside_text(complete_config, rule))
    return replace(architecture, numerics=replace(architecture.numerics, unread=unread))


SCALED_LATER = ("linear", "dynamic")  # angles whose factor the config's number of positions leaves out
SCALED_BEFORE = ("gemma3", "gemma3_text")  # families in which it has that factor already


def read_max_context(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that a config says: its number of positions, with the factor of scaled angles; None without.

    Source: vLLM 0.32.0, vllm/config/model.py, whose default limit is the same.

    >>> read_max_context({"max_position_embeddings": 40960})
    40960
    >>> scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> read_max_context({"max_position_embeddings": 40960, "rope_scaling": scaling})
    131072
    """
    rows: int | None = next((config[key] for key in POSITION_KEYS if isinstance(config.get(key), int)), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    if rows is None or not isinstance(scaling, Mapping) or not isinstance(factor, (int, float)):
        return rows
    kind, trained = scaling.get("rope_type", scaling.get("type")), scaling.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(trained, int):
        return max(rows, round(trained * factor))
    scales = kind in SCALED_LATER and config.get("model_type") not in SCALED_BEFORE
    return round(rows * factor) if scales else rows


QUANTIZATION_KEYS = ("quant_algo", "quant_method", "format", "fmt")  # of a quantization_config, the most exact first


def describe_quantization(config: Any) -> str:
    """Return the format of the weights of a quantization_config, as far as it names one; empty without such a config.

    >>> describe_quantization({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    'fp8 (e4m3, blocks of 128x128)'
    >>> describe_quantization({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    'NVFP4 (modelopt)'
    """
    if not isinstance(config, Mapping) or not config:
        return ""
    names = dict.fromkeys(str(config[key]) for key in QUANTIZATION_KEYS if isinstance(config.get(key), str))
    name, *details = [*names] or ["a quantised format"]
    block = config.get("weight_block_size")
    details += [f"blocks of {'x'.join(map(str, block))}"] if isinstance(block, list) and block else []
    text = f"{name} ({', '.join(details)})" if details else name
    return text[:MAX_SHOWN_CHARS]


WELL_KNOWN_TYPES = ("llama", "mistral", "qwen3", "deepseek_v3")


def _describe_unknown(config: TrackedConfig, kind: Any) -> str:
    """Return the error about a model_type without a rule: what its models have, or the nearest known ones."""
    reason = unsupported_families().get(kind) if isinstance(kind, str) else None
    if reason:
        return f"model: model_type is {kind!r}, which is not planned for: it has {reason}; another model is required"
    set_keys = [key for key in WEIGHT_KEYS if config.get(key)]
    hint = f" (its config sets {', '.join(set_keys)})" if set_keys else ""
    nearest = did_you_mean(kind, tuple(FAMILIES)) if isinstance(kind, str) else ""
    return (
        f"model: model_type is {kind!r}{nearest}{hint}, which is not known; one of {len(FAMILIES)}, such as "
        f"{', '.join(WELL_KNOWN_TYPES)}, is required"
    )


def add_numerics(architecture: Architecture, config: Mapping[str, Any]) -> Architecture:
    """Return the model with the constants of its arithmetic as a config gives them. Raises `InputError`."""
    rule = FAMILIES[str(config["model_type"])].numerics
    numerics = read_numerics(
        config, rule, d_model=architecture.d_model, head_dim=architecture.head_dim, mlp=architecture.mlp
    )
    return replace(architecture, numerics=numerics)


# Keys of the language model's part in a config that nests it beside towers of images or sound, the outermost first.
LANGUAGE_KEYS = ("thinker_config", "text_config", "language_config", "llm_config")


TEXT_SUFFIX = "_text"  # of the model_type of a nested language model
TEXT_KEY = "text_config"
TIED_KEY = "tie_word_embeddings"
# Families whose code reads a language model's sizes from its text_config alone, and without one takes its defaults.
NESTED_ONLY_TYPES = ("step3p7",)
# Families with one class, whose head is tied as the whole config says, whatever its language part does. Source: their modelling
# code in transformers 5.23; of others AutoModelForCausalLM builds the language part alone, which its own config ties.
TIED_BY_WHOLE_TYPES = ("moss_transcribe_diarize",)


def _language_model_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config that nests it; the whole config says whether its head is tied."""
    for key in LANGUAGE_KEYS:
        inner = config.get(key)
        if isinstance(inner, dict) and inner.keys() & {"model_type", "hidden_size", *LANGUAGE_KEYS}:
            inner = {"model_type": f"{config.get('model_type')}{TEXT_SUFFIX}", **inner}
            return _language_model_config({**inner, **_tied_head(config, inner, key)})
    if config.get("model_type") in NESTED_ONLY_TYPES:
        return {"model_type": f"{config['model_type']}{TEXT_SUFFIX}", **(config.get(TEXT_KEY) or {})}
    return config


def _tied_head(config: Mapping[str, Any], inner: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return whether the head is tied, as the whole config says it. Raises `InputError` where its language part denies it."""
    tied = config.get(TIED_KEY)
    if tied is None:
        return {}
    if inner.get(TIED_KEY) is False and tied is True and config.get("model_type") not in TIED_BY_WHOLE_TYPES:
        raise InputError(
            f"model: {TIED_KEY} is true, and false in {key}; the same is required, since the head is either or not"
        )
    return {TIED_KEY: tied}


def _unread_outside_text(config: Mapping[str, Any], rule: FamilyRule) -> Iterator[str]:
    """Yield sizes that a config has outside the text_config from which alone its family's code reads them."""
    if config.get("model_type") in NESTED_ONLY_TYPES:
        for key, default in {"layer_types": None, "sliding_window": None, **rule.defaults}.items():
            if config.get(key, default) != default and key not in (config.get(TEXT_KEY) or {}):
                yield f"{key} = {shorten(config[key])} outside text_config, where its code takes {default}"


# Keys that stand for weights which most families lack: one that is set and that the family's rule does not ask for means
# a model that is not known.
WEIGHT_KEYS = (
    "num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts", "num_shared_experts",
    "shared_expert_intermediate_size", "shared_intermediate_size", "moe_intermediate_size", "first_k_dense_replace",
    "mlp_only_layers", "moe_layer_freq", "q_lora_rank", "kv_lora_rank", "full_attention_interval",
    "linear_num_value_heads", "mamba_num_heads", "index_topk", "use_qk_norm", "qk_layernorm", "cross_attention_layers",
    "add_cross_attention",
)  # fmt: skip


def unsupported_settings(config: TrackedConfig, rule: FamilyRule) -> Iterator[str]:
    """Yield a config's settings that its family's rule does not support: unknown values, and keys that imply weights."""
    for key, supported in rule.only.items():
        setting = config.first(key)
        if setting is not None and setting not in supported:
            yield f"{key} = {shorten(setting)} (known: {', '.join(map(repr, supported))})"
    yield from (
        f"{key} = {shorten(config[key])}" for key in WEIGHT_KEYS if key not in config.read_keys and config.get(key)
    )
    kinds = None if "layer_types" in config.read_keys else config.get("layer_types")
    if kinds and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        yield f"layer_types = {shorten(kinds)}"


def _arrange_layers(config: TrackedConfig, rule: FamilyRule, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with those of layers that differ. Raises `InputError`."""
    try:
        return arrange_layers(config, rule.layers, fields)
    except MissingKey as missing_key:
        raise InputError(f"model: the config lacks {missing_key}") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InputError(f"model: the config's values for its layers cannot be read: {error}") from None


def read_fields(config: TrackedConfig, rule: FamilyRule) -> dict[str, Any]:
    """Return the architecture's fields that a config gives. Raises `InputError` with every key that is missing."""
    fields: dict[str, Any] = {}
    missing: list[str] = []
    for name, read in {**SIZE_READERS, **rule.read}.items():
        if name in rule.fixed:
            continue
        try:
            fields[name] = read(config)
        except MissingKey as missing_key:
            missing.append(str(missing_key))
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InputError(f"model: the config's values for {name} cannot be read: {error}") from None
    if missing:
        raise InputError(f"model: the config lacks {', '.join(dict.fromkeys(missing))}")
    return fields
