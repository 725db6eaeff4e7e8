"""Rotary embeddings as a config writes them: `rope_parameters`, or `rope_theta` and `rope_scaling` in older ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.model.numerics import Rotary
from shardwise.train.huggingface.names import StoredFamily

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = ("default", "linear", "llama3")


def read_rotaries(config: Mapping[str, Any], family: StoredFamily) -> tuple[Rotary, Rotary | None]:
    """The angles of all layers, and those of layers with a window where the family has two. Raises `InputError`."""
    found = config.get("rope_parameters") or {}
    if not family.two_rotaries:
        return _read({**_older(config, family), **found}), None
    if FULL in found:
        return _read(found[FULL]), _read(found[SLIDING])
    local = {"rope_theta": _required(config, "rope_local_base_freq")}
    return _read(_older(config, family)), _read(local)


def write_rotaries(rotary: Rotary, local: Rotary | None, family: StoredFamily) -> dict[str, Any]:
    """The value of `rope_parameters`."""
    return {FULL: _written(rotary), SLIDING: _written(local or rotary)} if family.two_rotaries else _written(rotary)


def _older(config: Mapping[str, Any], family: StoredFamily) -> dict[str, Any]:
    """The same from the keys that older configs have."""
    theta = {} if family.theta is None else {"rope_theta": family.theta}
    told = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") else {}
    return {**theta, **told, **(config.get("rope_scaling") or {})}


def _read(found: Mapping[str, Any]) -> Rotary:
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in KINDS or found.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"model: rotary embeddings are {dict(found)}; rope_type {', '.join(KINDS)} over whole heads are known here"
        )
    base = float(_required(found, "rope_theta"))
    if kind == "default":
        return Rotary(base=base)
    factor = float(_required(found, "factor"))
    if kind == "linear":
        return Rotary(base=base, factor=factor)
    low, high = (float(_required(found, f"{name}_freq_factor")) for name in ("low", "high"))
    rows = int(_required(found, "original_max_position_embeddings"))
    return Rotary(base=base, factor=factor, original_positions=rows, low=low, high=high)


def _written(rotary: Rotary) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if rotary.original_positions:
        found |= {
            "rope_type": "llama3", "factor": rotary.factor, "low_freq_factor": rotary.low,
            "high_freq_factor": rotary.high, "original_max_position_embeddings": rotary.original_positions,
        }  # fmt: skip
    elif rotary.factor != 1.0:
        found |= {"rope_type": "linear", "factor": rotary.factor}
    return found


def _required(found: Mapping[str, Any], key: str) -> Any:
    if found.get(key) is None:
        raise InputError(f"model: the config's rotary embeddings lack {key}; found {dict(found) or 'none of them'}")
    return found[key]
