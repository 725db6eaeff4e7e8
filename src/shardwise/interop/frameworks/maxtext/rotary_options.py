"""MaxText's options for rotary embeddings: base, scaled angles and YaRN's magnitudes.

Source: MaxText at e591f30 (2026-08-22), src/maxtext/configs/base.yml, layers/attentions.py (init_rotary_embedding),
layers/embeddings.py (LLaMARotaryEmbedding, YarnRotaryEmbedding) and layers/attention_mla.py, which scales the scores of latent
attention where positions are more than the original ones, whatever the type of the angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.interop.text_formats.option_tables import Options
from shardwise.model import RAMP_OVER_INDEX, Architecture, Rotary, yarn_magnitude

ROTARY_DEFAULTS: Mapping[str, Any] = {
    "rope_max_timescale": 10_000, "rope_type": "default", "rope_linear_scaling_factor": 1.0, "max_position_embeddings": 163_840,
    "original_max_position_embeddings": 4096, "rope_factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "rope_truncate": True, "rope_attention_scaling": False, "local_rope_max_timescale": -1,
}  # fmt: skip
LLAMA3_ANGLES = Rotary(factor=8.0, low=1.0, high=4.0, original_positions=8192)  # constants of LLaMARotaryEmbedding
DIGITS = 6  # of mscale, which is recovered from a magnitude


def write_rotary(model: Architecture) -> Options:
    """Return the options of a model's angles; constants that MaxText has in its code come back as these."""
    numerics, rotary = model.numerics, model.numerics.rotary
    options: dict[str, Any] = {"rope_max_timescale": round(rotary.base)}
    if numerics.local_rotary:
        options["local_rope_max_timescale"] = round(numerics.local_rotary.base)
    if not model.structure.has_rotary or not rotary.original_positions:
        plain = (
            {"max_position_embeddings": ROTARY_DEFAULTS["original_max_position_embeddings"]}
            if model.kv_lora_rank
            else {}
        )
        return {**options, **plain, "rope_linear_scaling_factor": rotary.factor}
    if rotary.ramp != RAMP_OVER_INDEX:
        return {**options, "rope_type": "llama3.1"}
    return {
        **options, "rope_type": "yarn", "rope_factor": round(rotary.factor), "beta_fast": round(rotary.high),
        "beta_slow": round(rotary.low), "original_max_position_embeddings": rotary.original_positions,
        "max_position_embeddings": round(rotary.factor) * rotary.original_positions, "rope_truncate": rotary.rounded,
        "rope_attention_scaling": rotary.amplitude != 1.0, **({"mscale": _mscale(model)} if model.kv_lora_rank else {}),
    }  # fmt: skip


def _mscale(model: Architecture) -> float:
    """Return the `mscale` whose squared magnitude scales the scores of latent attention."""
    scale, unit = model.numerics.attention_scale, yarn_magnitude(model.numerics.rotary.factor) - 1.0
    magnitude = 1.0 if scale is None else math.sqrt(scale * math.sqrt(model.head_dim))
    return round((magnitude - 1.0) / unit, DIGITS) if unit else 1.0


def read_rotary(options: Options, head_dim: int) -> Mapping[str, Any]:
    """Return the angles of options that are complete; `head_dim` is the width of a head with latent attention, else 0."""
    rotary: dict[str, Any] = {"base": float(options["rope_max_timescale"])}
    fields: dict[str, Any] = {}
    kind, factor = options["rope_type"], float(options["rope_factor"])
    if kind == "yarn":
        rotary |= {
            "factor": factor, "low": float(options["beta_slow"]), "high": float(options["beta_fast"]), "ramp": RAMP_OVER_INDEX,
            "original_positions": options["original_max_position_embeddings"], "rounded": options["rope_truncate"],
            "amplitude": yarn_magnitude(factor) if options["rope_attention_scaling"] else 1.0,
        }  # fmt: skip
    elif kind == "llama3.1":
        angles = LLAMA3_ANGLES
        rotary |= {
            "factor": angles.factor,
            "low": angles.low,
            "high": angles.high,
            "original_positions": angles.original_positions,
        }
    else:
        rotary["factor"] = float(options["rope_linear_scaling_factor"])
    magnitude = yarn_magnitude(factor, options["mscale"])
    if (
        head_dim
        and options["max_position_embeddings"] > options["original_max_position_embeddings"]
        and magnitude != 1.0
    ):
        fields["numerics.attention_scale"] = magnitude**2 / math.sqrt(head_dim)
    if options["local_rope_max_timescale"] > 0:
        fields["numerics.local_rotary"] = Rotary(base=float(options["local_rope_max_timescale"]))
    return {**fields, **{f"numerics.rotary.{name}": value for name, value in rotary.items()}}
