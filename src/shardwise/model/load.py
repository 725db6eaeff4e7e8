"""Models by name from the catalogue's TOML files, or by the path of a `config.json`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from shardwise.model.architecture import Architecture
from shardwise.model.huggingface.config import add_numerics, load_config
from shardwise.values import InputError, did_you_mean


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


def load_model(name: str) -> Architecture:
    """Return a model from the catalogue by name, or from a Hugging Face config.json (or its folder) by path.

    Raises `InputError` that lists the names and suggests the nearest, or says what is wrong with the file. Nothing is fetched:
    a name on a hub, such as "meta-llama/Llama-3.1-8B", is not looked up.

    >>> model = load_model("llama-3-8b")
    >>> model.num_layers, model.d_model, model.num_kv_heads
    (32, 4096, 8)
    """
    if name.endswith(".json") or os.path.isdir(name):
        return load_config(name)
    table = _read_catalogue().get(name.strip().lower())
    if table is None:
        names = model_names()
        raise InputError(
            f"model: found {name!r}{did_you_mean(name, names)}; the catalogue has {', '.join(names)}; or give the path of a "
            "Hugging Face config.json or of its folder (nothing is fetched from a hub)"
        )
    return _architecture_from_table(name.strip().lower(), table)


def _architecture_from_table(name: str, table: Mapping[str, Any]) -> Architecture:
    """Return a model from its table, whose `config` has the constants of its arithmetic under the keys of a config.json."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    config = fields.pop("config", None)
    architecture = Architecture(name=name, **fields)
    return architecture if config is None else add_numerics(architecture, config)
