"""Rotary embeddings as a config writes them: `rope_parameters`. They are read in `model/numerics_reader.py`."""

from __future__ import annotations

from typing import Any

from shardwise.model.numerics import Numerics, Rotary
from shardwise.model.numerics_reader import FULL, SLIDING, NumericsRule


def write_rotaries(numerics: Numerics, rule: NumericsRule) -> dict[str, Any]:
    """The value of `rope_parameters`: of a family whose layers with a window have angles of their own, both."""
    whole = _written(numerics.rotary) | ({"partial_rotary_factor": 1.0} if rule.rotary_part != 1.0 else {})
    if rule.local_theta is None:
        return whole
    return {FULL: whole, SLIDING: _written(numerics.local_rotary or numerics.rotary)}


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
