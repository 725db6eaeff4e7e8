"""The angles of rotary embeddings from a Hugging Face config.json, and those that our arithmetic lacks.

Source: `modeling_rope_utils.py` of `transformers` 5.23 and the modelling code of each family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import InputError
from shardwise.model.numerics import INDEX, Rotary

FULL, SLIDING = "full_attention", "sliding_attention"
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")
BETA_SLOW, BETA_FAST = 1.0, 32.0  # YaRN's α and β (Peng et al. 2023, 3.2), as `_compute_yarn_parameters` has them
MSCALE = 0.1  # of the logarithm of the factor (Peng et al. 2023, equation 22)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryRule:
    """How a family spells its angles.

    `theta` is the default of their base, `local_theta` that of layers with a window, where they have angles of their own, `part`
    that of the share of a head's width that they turn (None: its code turns all of it, whatever a config says). `scaled`: the
    family multiplies scores by the square of YaRN's `mscale_all_dim`.
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    part: float | None = None
    scaled: bool = False


def read_rotaries(config: Mapping[str, Any], rule: RotaryRule | None) -> tuple[Rotary, Rotary | None, tuple[str, ...]]:
    """The angles of all layers, those of layers with a window where the family has two, and what of them is not modelled.

    >>> read_rotaries({"rope_theta": 500000.0}, RotaryRule())[0].base
    500000.0
    """
    if rule is None:
        return Rotary(), None, ()
    found = config.get("rope_parameters") or {}
    whole = _older(config, rule)
    if rule.local_theta is None:
        rotary, unread = _rotary({**whole, **found}, config, rule)
        return rotary, None, unread
    local = {"rope_theta": config.get("rope_local_base_freq") or rule.local_theta}
    (rotary, unread), (near, also) = (
        _rotary(one, config, rule) for one in (found.get(FULL, whole), found.get(SLIDING, local))
    )
    return rotary, near, (*unread, *also)


def score_factor(config: Mapping[str, Any], rule: RotaryRule | None) -> float:
    """The factor of a family with YaRN's angles on 1/√H: the square of the magnitude of `mscale_all_dim`."""
    if rule is None or not rule.scaled:
        return 1.0
    found = _older(config, rule) | (config.get("rope_parameters") or {})
    if _kind(found) == "default" or not found.get("mscale_all_dim"):
        return 1.0
    return magnitude(_number(found, "factor"), _number(found, "mscale_all_dim")) ** 2


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on cosines and sines for `factor` times as many positions."""
    return MSCALE * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _older(config: Mapping[str, Any], rule: RotaryRule) -> dict[str, Any]:
    """The parameters under the keys of older configs: `rope_theta` and `rope_scaling`."""
    keys = ("partial_rotary_factor", "rotary_pct")
    part = next((config[key] for key in keys if config.get(key) is not None), rule.part)
    named = {} if part is None else {"partial_rotary_factor": part}
    return {"rope_theta": config.get("rope_theta") or rule.theta, **named, **(config.get("rope_scaling") or {})}


def _kind(found: Mapping[str, Any]) -> Any:
    return found.get("rope_type", found.get("type", "default"))


def _rotary(found: Mapping[str, Any], config: Mapping[str, Any], rule: RotaryRule) -> tuple[Rotary, tuple[str, ...]]:
    part = _number({"partial_rotary_factor": 1.0, **found}, "partial_rotary_factor")
    rotary, unread = _angles(found, config)
    if rule.part is not None:
        return replace(rotary, part=part), unread
    return rotary, (*((f"rotary angles on {part:g} of a head's width",) if part != 1.0 else ()), *unread)


def _angles(found: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Rotary, tuple[str, ...]]:
    kind, base = _kind(found), _number(found, "rope_theta")
    if kind not in ROTARY_KINDS:
        return Rotary(base=base), (f"rotary angles of type {kind!r}",)
    if kind == "default":
        return Rotary(base=base), ()
    factor = _number(found, "factor")
    if kind == "linear":
        return Rotary(base=base, factor=factor), ()
    return (_llama3 if kind == "llama3" else _yarn)(found, config, base, factor), ()


def _llama3(found: Mapping[str, Any], config: Mapping[str, Any], base: float, factor: float) -> Rotary:
    low, high = (_number(found, f"{name}_freq_factor") for name in ("low", "high"))
    rows = int(_number(found, "original_max_position_embeddings"))
    return Rotary(base=base, factor=factor, original_positions=rows, low=low, high=high)


def _yarn(found: Mapping[str, Any], config: Mapping[str, Any], base: float, factor: float) -> Rotary:
    """YaRN's, for the config's number of positions where it does not give the number that the model was trained on."""
    rows = found if found.get("original_max_position_embeddings") else {
        "original_max_position_embeddings": config.get("max_position_embeddings")
    }  # fmt: skip
    low, high = found.get("beta_slow") or BETA_SLOW, found.get("beta_fast") or BETA_FAST
    return Rotary(
        base=base, factor=factor, original_positions=int(_number(rows, "original_max_position_embeddings")),
        low=_number({"beta_slow": low}, "beta_slow"), high=_number({"beta_fast": high}, "beta_fast"), ramp=INDEX,
        rounded=bool(found.get("truncate", True)), amplitude=_amplitude(found, factor),
    )  # fmt: skip


def _amplitude(found: Mapping[str, Any], factor: float) -> float:
    if found.get("attention_factor") is not None:
        return _number(found, "attention_factor")
    if found.get("mscale") and found.get("mscale_all_dim"):
        of, by = (magnitude(factor, _number(found, key)) for key in ("mscale", "mscale_all_dim"))
        return of / by
    return magnitude(factor)


def _number(found: Mapping[str, Any], key: str) -> float:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"model: the config's rotary embeddings have {key} = {value!r}; a number above 0 is required")
    return float(value)
