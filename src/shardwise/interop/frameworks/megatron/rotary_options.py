"""Megatron-LM's arguments for rotary embeddings: base, scaled angles and YaRN's magnitudes.

Sources: megatron/training/arguments.py and argument_utils.py, megatron/core/models/common/embeddings (rotary_pos_embedding.py,
yarn_rotary_pos_embedding.py), MLATransformerConfig; at d98e8a64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import OptionReader
from shardwise.interop.text_formats.option_tables import Options
from shardwise.model import RAMP_OVER_INDEX, Architecture, Rotary, yarn_magnitude

LLAMA3_CONSTANTS = (1.0, 4.0, 8192)  # low, high and original positions, which are in its code
# Defaults of MLATransformerConfig that no argument changes.
LATENT_YARN_CONSTANTS = (1.0, 32.0, 4096)
YARN_DEFAULTS = (1.0, 32.0, 4096)  # beta-slow, beta-fast and original positions of other attention
DIGITS = 6  # of mscale, which is recovered from magnitudes


def write_rotary(launch: Launch) -> Options:
    """Return the arguments of a model's angles; constants that Megatron-LM has in its code come back as these."""
    model = launch.model
    if not model.structure.has_rotary:
        return {}
    rotary = model.numerics.rotary
    options: dict[str, Any] = {"rotary-base": round(rotary.base)}
    if rotary.part != 1.0:
        options["rotary-percent"] = rotary.part
    if model.kv_lora_rank:
        return {**options, "rotary-scaling-factor": 1.0, **(yarn_options(model) if is_yarn(rotary) else {})}
    if is_yarn(rotary):
        return {**options, "position-embedding-type": "yarn", **yarn_options(model), **_yarn_constants(rotary)}
    if rotary.original_positions:
        return {**options, "use-rope-scaling": True, "rope-scaling-factor": rotary.factor}
    if rotary.factor != 1.0 and rotary.factor.is_integer():
        options["rotary-seq-len-interpolation-factor"] = round(rotary.factor)
    return options


def is_yarn(rotary: Rotary) -> bool:
    """Return whether angles are scaled as YaRN does."""
    return rotary.original_positions > 0 and rotary.ramp == RAMP_OVER_INDEX


def yarn_options(model: Architecture) -> Options:
    """Return the factor, and both mscales from the magnitudes of scores and of cosines and sines."""
    rotary, scale = model.numerics.rotary, model.numerics.attention_scale
    of_all = 1.0 if scale is None else math.sqrt(scale * math.sqrt(model.head_dim))
    mscale_all_dim, mscale = (_mscale(rotary.factor, magnitude) for magnitude in (of_all, rotary.amplitude * of_all))
    return {"rotary-scaling-factor": rotary.factor, "mscale": mscale, "mscale-all-dim": mscale_all_dim}


def _mscale(factor: float, magnitude: float) -> float:
    unit = yarn_magnitude(factor) - 1.0
    return round((magnitude - 1.0) / unit, DIGITS) if unit else 1.0


def _yarn_constants(rotary: Rotary) -> Options:
    rounding = {} if rotary.rounded else {"no-yarn-correction-range-round-to-int": True}
    return {"yarn-original-max-position-embeddings": rotary.original_positions, "yarn-beta-fast": rotary.high,
            "yarn-beta-slow": rotary.low, **rounding}  # fmt: skip


def read_rotary(reader: OptionReader) -> Mapping[str, Any]:
    """Return the angles of the arguments."""
    latent = bool(reader.get("multi-latent-attention", False))
    part = {"numerics.rotary.part": reader.get("rotary-percent", 1.0)}
    rotary: dict[str, Any] = {"base": float(reader.get("rotary-base", 10_000))}
    reader.acknowledge(
        "rope-type", "rotary-interleaved", "mscale", "mscale-all-dim", "yarn-correction-range-round-to-int"
    )
    factor = float(reader.get("rotary-scaling-factor", 1.0))
    has_yarn = reader.get("position-embedding-type") == "yarn" or (latent and reader.get("rope-type") != "rope")
    scores: dict[str, Any] = {}
    if has_yarn and factor != 1.0:
        rotary |= _read_yarn(reader, factor, latent=latent)
        magnitude = yarn_magnitude(factor, float(reader.get("mscale-all-dim", 0.0)))
        if latent and magnitude != 1.0:
            head_dim = reader.get("qk-head-dim", 128) + reader.get("qk-pos-emb-head-dim", 64)
            scores = {"numerics.attention_scale": magnitude**2 / math.sqrt(head_dim)}
    elif reader.get("use-rope-scaling", False):
        low, high, positions = LLAMA3_CONSTANTS
        scaled = float(reader.get("rope-scaling-factor", 8.0))
        rotary |= {"factor": scaled, "low": low, "high": high, "original_positions": positions}
    elif reader.get("rotary-seq-len-interpolation-factor"):
        rotary["factor"] = float(reader.get("rotary-seq-len-interpolation-factor"))
    reader.acknowledge("rope-scaling-factor", "rotary-seq-len-interpolation-factor")
    return {**{f"numerics.rotary.{name}": value for name, value in rotary.items()}, **part, **scores}


def _read_yarn(reader: OptionReader, factor: float, *, latent: bool) -> dict[str, Any]:
    low, high, positions = LATENT_YARN_CONSTANTS if latent else YARN_DEFAULTS
    if not latent:
        low, high = reader.get("yarn-beta-slow") or low, reader.get("yarn-beta-fast") or high
        positions = reader.get("yarn-original-max-position-embeddings") or positions
    mscale, mscale_all_dim = float(reader.get("mscale", 1.0)), float(reader.get("mscale-all-dim", 0.0))
    return {
        "factor": factor, "original_positions": positions, "low": float(low), "high": float(high), "ramp": RAMP_OVER_INDEX,
        "rounded": not reader.get("no-yarn-correction-range-round-to-int", False),
        "amplitude": yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim),
    }  # fmt: skip
