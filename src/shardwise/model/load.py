"""Models from the catalogue's TOML files, by name or by Hugging Face id, or by the path of a `config.json`."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from shardwise.model.adapters import with_default_targets
from shardwise.model.architecture import Architecture
from shardwise.model.huggingface.config import add_numerics, load_config
from shardwise.model.parameters_and_flops import require_adapters
from shardwise.values import InputError, apply_overrides, did_you_mean

HUB = "https://huggingface.co"
_SOURCE_ID = re.compile(r"^config\.json of (\S+/[\w.-]+?)[,;]?(?:\s|$)")
_FLAGS = {field.name for field in dataclasses.fields(Architecture) if isinstance(field.default, bool)}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@lru_cache(maxsize=1)
def _read_catalogue() -> Mapping[str, Mapping[str, Any]]:
    tables: dict[str, Mapping[str, Any]] = {}
    for file in sorted(resources.files("shardwise.model").joinpath("catalog").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            tables |= tomllib.loads(file.read_text(encoding="utf-8"))
    return tables


def model_names() -> tuple[str, ...]:
    """Return the names of the models in the catalogue."""
    return tuple(_read_catalogue())


def source_hub_id(source: str) -> str | None:
    """Return the Hugging Face id in the source of a model that was read from a config.json on the hub, or None.

    >>> source_hub_id("config.json of google/gemma-3-4b-pt, without its vision tower")
    'google/gemma-3-4b-pt'
    """
    match = _SOURCE_ID.match(source)
    return match[1] if match else None


def hub_ids(name: str) -> tuple[str, ...]:
    """Return the Hugging Face ids of a model of the catalogue: the one in its source, then those that the entry lists.

    >>> hub_ids("qwen3-8b"), hub_ids("llama-3-8b"), hub_ids("gpt-3-175b")
    (('Qwen/Qwen3-8B',), ('meta-llama/Meta-Llama-3-8B',), ())
    """
    table = _read_catalogue().get(name, {})
    ids = (source_hub_id(table.get("source", "")), *table.get("ids", ()))
    return tuple(filter(None, ids))


@lru_cache(maxsize=1)
def _names_by_hub_id() -> Mapping[str, str]:
    """Return the names of models by Hugging Face id in small letters; an id in a source goes before the same one in a list."""
    names: dict[str, str] = {}
    for name, table in _read_catalogue().items():
        names |= {hub_id.lower(): name for hub_id in table.get("ids", ()) if hub_id.lower() not in names}
    in_sources = {source_hub_id(table["source"]): name for name, table in _read_catalogue().items()}
    return names | {hub_id.lower(): name for hub_id, name in in_sources.items() if hub_id}


def find_model_name(text: str) -> str | None:
    """Return the catalogue's name of a model by name or Hugging Face id, in capitals or small letters; None for any other.

    >>> find_model_name("Llama-3-8B"), find_model_name("qwen/qwen3-8b"), find_model_name("Qwen/Qwen9-8B")
    ('llama-3-8b', 'qwen3-8b', None)
    """
    name = text.strip().lower()
    return name if name in _read_catalogue() else _names_by_hub_id().get(name)


def load_model(name: str) -> Architecture:
    """Return a model from the catalogue by name or Hugging Face id, or from a config.json (or its folder) by path.

    Raises `InputError` that lists the names and suggests the nearest, or says what is wrong with the file. Nothing is fetched:
    an id is that of an entry of the catalogue ("meta-llama/Llama-3.1-8B"), or is refused.

    >>> model = load_model("llama-3-8b")
    >>> model.num_layers, model.d_model, model.num_kv_heads
    (32, 4096, 8)
    >>> load_model("Qwen/Qwen3-30B-A3B").name
    'qwen3-30b-a3b'
    """
    if name.endswith(".json") or os.path.isdir(name):
        return load_config(name)
    catalog_name = find_model_name(name)
    if catalog_name is None:
        raise InputError(_describe_unknown(name))
    return _architecture_from_table(catalog_name, _read_catalogue()[catalog_name])


def override_architecture(architecture: Architecture, settings: Mapping[str, str]) -> Architecture:
    """Return a model with fields replaced by the texts of `--set`; adapters of a rank alone are those of all linear layers.

    Raises `InputError` for fields that do not go together, and for adapters of matrices that the model lacks.

    >>> override_architecture(load_model("llama-3-8b"), {"lora_rank": "16"}).lora_targets
    ('all-linear',)
    """
    changed: Architecture = apply_overrides(
        architecture, with_default_targets(settings, architecture.lora_targets), "model"
    )
    require_adapters(changed)
    return changed


def _describe_unknown(name: str) -> str:
    """Return the error about a text that names no model of the catalogue: the nearest names, and what to give instead."""
    names = model_names()
    unknown = f"model: found {name!r}{did_you_mean(name, names)}"
    if _HUB_ID.fullmatch(name.strip()):
        return (
            f"{unknown}; the catalogue has no model of this Hugging Face id, and nothing is fetched from a hub: download its "
            f"config.json, such as {HUB}/{name.strip()}/resolve/main/config.json, and give the path of the file"
        )
    return (
        f"{unknown}; one of the catalogue's {len(names)} models is required (`shardwise show models` lists them), or the path of "
        "a Hugging Face config.json or of its folder (nothing is fetched from a hub)"
    )


def _architecture_from_table(name: str, table: Mapping[str, Any]) -> Architecture:
    """Return a model from its table, whose `config` has the constants of its arithmetic under the keys of a config.json.

    What a kind of layer lacks and the base layer has (a recurrence, a window) is `false` there, as TOML has no value for nothing.
    """
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    config = fields.pop("config", None)
    fields.pop("ids", None)
    if "layer_kinds" in fields:
        fields["layer_kinds"] = {
            kind: {key: None if value is False and key not in _FLAGS else value for key, value in settings.items()}
            for kind, settings in fields["layer_kinds"].items()
        }
    architecture = Architecture(name=name, **fields)
    return architecture if config is None else add_numerics(architecture, config)
