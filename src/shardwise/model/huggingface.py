"""Architectures from a Hugging Face `config.json`.

An architecture outside the table of families is refused, never guessed: its blocks might hold unknown weights. So is a config
with settings that its family's rule does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.model.families import FAMILIES
from shardwise.model.family import WEIGHTY, read_fields, unknown_parts
from shardwise.model.numerics_reader import read_numerics
from shardwise.model.readers import Config


def load_config(path: str | Path) -> Architecture:
    """An architecture from a config.json, or from the folder that holds one. Raises `InputError`."""
    source = Path(path)
    try:
        source = source / "config.json" if source.is_dir() else source
        config = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: cannot read {source}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a null byte in the path, nested too deeply
        raise InputError(f"model: {source} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"model: {source} holds a {type(config).__name__}; an object with a model_type is required")
    name = source.parent.name if source.name == "config.json" else source.stem
    return parse_config(config, name=name or "model")


def parse_config(values: Mapping[str, Any], *, name: str = "model") -> Architecture:
    """An architecture from a config as a mapping. Raises `InputError` that names what is missing or not known."""
    config = Config(_text_part(values))
    kind = config.get("model_type")
    rule = FAMILIES.get(str(kind))
    if rule is None:
        sets = [key for key in WEIGHTY if config.get(key)]
        also = f" (its config sets {', '.join(sets)})" if sets else ""
        raise InputError(
            f"model: model_type is {kind!r}{also}, which is not known; one of {', '.join(FAMILIES)} is required"
        )
    fields = {**read_fields(config, rule), **rule.fixed}
    unknown = list(unknown_parts(config, rule))
    if unknown:
        raise InputError(f"model: a {kind} with {', '.join(unknown)}: this family is not known with that")
    tied = bool(config.get("tie_word_embeddings", rule.tied))
    source = f"config.json of model_type {kind}"
    return with_numerics(Architecture(name=name, **fields, tied_embeddings=tied, source=source), config)


def with_numerics(model: Architecture, config: Mapping[str, Any]) -> Architecture:
    """The model with the constants of its arithmetic as a config says them. Raises `InputError`."""
    rule = FAMILIES[str(config["model_type"])].numerics
    numerics = read_numerics(config, rule, d_model=model.d_model, head_dim=model.head_dim, mlp=model.mlp)
    return replace(model, numerics=numerics)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model of a config that nests it beside a vision tower."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and "model_type" in inner else config
