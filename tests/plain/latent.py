"""Queries, keys and values of multi-head latent attention, step by step as the program has them (`model/attention_block.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from plain.functions import project, rms_norm
from plain.places import Rotation, rotate
from plain.weights import UnitModule
from shardwise.model.numerics import Numerics


def latent_heads(
    unit: UnitModule, y: Tensor, angles: Rotation | None, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor]:
    """From y [B, T, D]: queries [B, T, K, G, H], keys [B, T, K, H], values [B, T, K, U] (DeepSeek-AI 2024).

    Of a head's H dims the last R are rotary; those of the keys are one for all heads.
    """
    source = y if unit.optional_parameter("w_q_down") is None else _latent(unit, y, "q", numerics)
    rotary = _placed(project(source, unit.parameter("w_q_rotary")), angles)
    q = torch.cat((project(source, unit.parameter("w_q_plain")), rotary), dim=-1)
    latent = _latent(unit, y, "kv", numerics)
    shared = _placed(project(y, unit.parameter("w_k_rotary")), angles)
    plain = project(latent, unit.parameter("w_k_up"))
    k = torch.cat((plain, shared[:, :, None].expand(-1, -1, plain.shape[2], -1)), dim=-1)
    return q, k, project(latent, unit.parameter("w_v_up"))


def _latent(unit: UnitModule, y: Tensor, name: str, numerics: Numerics) -> Tensor:
    weight = unit.parameter(f"{name}_latent_norm.weight")
    return rms_norm(project(y, unit.parameter(f"w_{name}_down")), weight, numerics.norm_epsilon, numerics.norm_offset)


def _placed(x: Tensor, angles: Rotation | None) -> Tensor:
    return x if angles is None else rotate(x, angles)
