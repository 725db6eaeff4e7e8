"""Positions of tokens in their documents, the angles of rotary embeddings, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.model.numerics import RAMP_OVER_FREQUENCY, RAMP_OVER_INDEX, Rotary
from shardwise.run.kernels.device_dispatch import at_least_fp32

Rotation = tuple[
    Tensor, Tensor
]  # cosines and sines of the pairs that turn, at most H/2 of them: [T, H/2] or [B, T, H/2]
MIN_RAMP_WIDTH = 0.001  # of a ramp whose ends are one index: a step (`_compute_yarn_parameters` of transformers 5.23)


def document_positions(length: int, document_ids: Tensor | None, device: torch.device) -> Tensor:
    """Positions [T] in a sequence of a length, or [B, T] from the beginning of each token's document."""
    places = torch.arange(length, device=device)
    if document_ids is None:
        return places
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=-1).values


def frequencies(head_dim: int, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle per position of each pair of a head that turns, [H/2] where all of it does."""
    half = rotary.width(head_dim) // 2
    found = rotary.base ** (-torch.arange(half, dtype=dtype, device=device) / half)
    if not rotary.original_positions:
        return found / rotary.factor
    kept = KEPT_SHARE[rotary.ramp](found, rotary)
    return found * (kept + (1.0 - kept) / rotary.factor)


def _kept_by_frequency(frequency: Tensor, rotary: Rotary) -> Tensor:
    """Llama 3.1: 0 where a pair turns `low` times over the original positions, 1 where it turns `high` times."""
    turns = rotary.original_positions * frequency / (2.0 * math.pi)
    return ((turns - rotary.low) / (rotary.high - rotary.low)).clamp(0.0, 1.0)


def _kept_by_index(frequency: Tensor, rotary: Rotary) -> Tensor:
    """YaRN: 1 up to the pair that turns `high` times, 0 from the one that turns `low` times. No index lies outside the head."""
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
    """Cosines and sines of all angles: made in fp32 at least, given in `dtype`."""
    fine = at_least_fp32(dtype)
    angles = positions[..., None].to(fine) * frequencies(head_dim, rotary, fine, positions.device)
    return (rotary.amplitude * angles.cos()).to(dtype), (rotary.amplitude * angles.sin()).to(dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor], sign: float = 1.0) -> Tensor:
    """x [B, T, ..., H] with the first half of each head turned against the second, by cosines and sines [T or B T, ..., H/2].

    With fewer of these the first dims of a head alone are turned, two for each angle, and the others stay as they are.
    """
    cos, sin = (table.reshape(*table.shape[:-1], *(1,) * (x.dim() - 3), table.shape[-1]) for table in angles)
    half = cos.shape[-1]
    parts = half, half, x.shape[-1] - 2 * half
    first, second, rest = torch.split_with_sizes(x, parts, dim=-1)
    if torch.compiler.is_compiling():  # which loses what is written through `out=` to a view
        return torch.cat((first * cos - sign * second * sin, second * cos + sign * first * sin, rest), dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to_first, to_second, to_rest = torch.split_with_sizes(out, parts, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=sign)
    to_rest.copy_(rest)
    return out


def rotate_back(dy: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """The transpose of `rotate`."""
    return rotate(dy, angles, -1.0)
