"""Positions of tokens in their documents, angles of rotary embeddings, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.model import Rotary
from shardwise.model.numerics import RAMP_OVER_FREQUENCY, RAMP_OVER_INDEX
from shardwise.run.kernels.device_dispatch import at_least_fp32

Rotation = tuple[Tensor, Tensor]  # cosines and sines of the rotated pairs, at most H/2: [T, H/2] or [B, T, H/2]
MIN_RAMP_WIDTH = 0.001  # makes a ramp between equal indices a step (`_compute_yarn_parameters` of transformers 5.23)


def document_positions(length: int, document_ids: Tensor | None, device: torch.device) -> Tensor:
    """Return positions [T] in a sequence, or [B, T] from the start of each token's document."""
    positions = torch.arange(length, device=device)
    if document_ids is None:
        return positions
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return positions - torch.where(is_first, positions, 0).cummax(dim=-1).values


def frequencies(head_dim: int, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the angle per position of each rotated pair of a head, [H/2] where the whole head is rotated."""
    half = rotary.width(head_dim) // 2
    frequency = rotary.base ** (-torch.arange(half, dtype=dtype, device=device) / half)
    if not rotary.original_positions:
        return frequency / rotary.factor
    kept_share = KEPT_SHARE[rotary.ramp](frequency, rotary)
    return frequency * (kept_share + (1.0 - kept_share) / rotary.factor)


def _kept_by_frequency(frequency: Tensor, rotary: Rotary) -> Tensor:
    """Llama 3.1: 0 where a pair turns `low` times over the original positions, 1 where it turns `high` times."""
    turns = rotary.original_positions * frequency / (2.0 * math.pi)
    return ((turns - rotary.low) / (rotary.high - rotary.low)).clamp(0.0, 1.0)


def _kept_by_index(frequency: Tensor, rotary: Rotary) -> Tensor:
    """YaRN: 1 up to the pair that turns `high` times, 0 from the one that turns `low` times, within the head."""
    half = len(frequency)
    first, last = (
        half * math.log(rotary.original_positions / (2.0 * math.pi * turns)) / math.log(rotary.base)
        for turns in (rotary.high, rotary.low)
    )
    if rotary.rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    index = torch.arange(half, dtype=frequency.dtype, device=frequency.device)
    width = (last - first) or MIN_RAMP_WIDTH
    return 1.0 - ((index - first) / width).clamp(0.0, 1.0)


KEPT_SHARE = {RAMP_OVER_FREQUENCY: _kept_by_frequency, RAMP_OVER_INDEX: _kept_by_index}


def rotation(positions: Tensor, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> Rotation:
    """Return cosines and sines of all angles, computed in fp32 or wider and returned in `dtype`."""
    angle_dtype = at_least_fp32(dtype)
    angles = positions[..., None].to(angle_dtype) * frequencies(head_dim, rotary, angle_dtype, positions.device)
    return (rotary.amplitude * angles.cos()).to(dtype), (rotary.amplitude * angles.sin()).to(dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor], sign: float = 1.0) -> Tensor:
    """Rotate the first half of each head of x [B, T, ..., H] against the second, by cosines and sines [T or B T, ...,
    H/2].

    With fewer angles only the first dims of a head are rotated, two for each angle; the others stay as they are.
    """
    cos, sin = (table.reshape(*table.shape[:-1], *(1,) * (x.dim() - 3), table.shape[-1]) for table in angles)
    half = cos.shape[-1]
    parts = half, half, x.shape[-1] - 2 * half
    first, second, rest = torch.split_with_sizes(x, parts, dim=-1)
    if torch.compiler.is_compiling():  # torch.compile loses writes through `out=` to a view
        return torch.cat((first * cos - sign * second * sin, second * cos + sign * first * sin, rest), dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to_first, to_second, to_rest = torch.split_with_sizes(out, parts, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=sign)
    to_rest.copy_(rest)
    return out


def rotate_back(dy: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the transpose of `rotate`."""
    return rotate(dy, angles, -1.0)
