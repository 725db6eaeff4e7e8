"""Rotary embeddings as a config writes them: `rope_parameters`. They are read in `model/rotary_reader.py`."""

from __future__ import annotations

import math
from typing import Any

from shardwise.model.numerics import FREQUENCY, INDEX, Numerics, Rotary
from shardwise.model.rotary_reader import FULL, MSCALE, SLIDING, RotaryRule

MSCALE_DIGITS = 9  # more than any config has


def write_rotaries(numerics: Numerics, rule: RotaryRule, head_dim: int) -> dict[str, Any]:
    """The value of `rope_parameters`: of a family whose layers with a window have angles of their own, both."""
    whole = _written(numerics.rotary)
    if rule.part is not None:
        whole["partial_rotary_factor"] = numerics.rotary.part
    if rule.local_theta is not None:
        return {FULL: whole, SLIDING: _written(numerics.local_rotary or numerics.rotary)}
    if rule.scaled and numerics.attention_scale is not None and numerics.rotary.factor > 1.0:
        whole["mscale_all_dim"] = _mscale(numerics.attention_scale * math.sqrt(head_dim), numerics.rotary.factor)
    return whole


def _mscale(score_factor: float, factor: float) -> float:
    """The `mscale_all_dim` whose magnitude has this square, without the last digits, which a square root does not keep."""
    return round((math.sqrt(score_factor) - 1.0) / (MSCALE * math.log(factor)), MSCALE_DIGITS)


def _written(rotary: Rotary) -> dict[str, Any]:
    written: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if rotary.original_positions:
        return written | {
            "factor": rotary.factor, "original_max_position_embeddings": rotary.original_positions, **WRITE[rotary.ramp](rotary)
        }  # fmt: skip
    return written | ({"rope_type": "linear", "factor": rotary.factor} if rotary.factor != 1.0 else {})


def _llama3(rotary: Rotary) -> dict[str, Any]:
    return {"rope_type": "llama3", "low_freq_factor": rotary.low, "high_freq_factor": rotary.high}


def _yarn(rotary: Rotary) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "beta_slow": rotary.low, "beta_fast": rotary.high, "truncate": rotary.rounded,
        "attention_factor": rotary.amplitude,
    }  # fmt: skip


WRITE = {FREQUENCY: _llama3, INDEX: _yarn}
