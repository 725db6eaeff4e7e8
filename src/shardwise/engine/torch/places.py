"""Where tokens are in their documents, and the angles of their rotary embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.engine.torch.functions import at_least_fp32
from shardwise.model.numerics import FREQUENCY, INDEX, Rotary

Rotation = tuple[
    Tensor, Tensor
]  # cosines and sines of the pairs that turn, at most H/2 of them: [T, H/2] or [B, T, H/2]
NO_WIDTH = 0.001  # of a ramp whose ends are one index: a step (`_compute_yarn_parameters` of transformers 5.23)


def positions_of(length: int, document_ids: Tensor | None, device: torch.device) -> Tensor:
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
    kept = KEPT[rotary.ramp](found, rotary)
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
    width = (last - first) or NO_WIDTH
    return 1.0 - ((index - first) / width).clamp(0.0, 1.0)


KEPT = {FREQUENCY: _kept_by_frequency, INDEX: _kept_by_index}


def rotation(positions: Tensor, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of all angles: made in fp32 at least, given in `dtype`."""
    fine = at_least_fp32(dtype)
    angles = positions[..., None].to(fine) * frequencies(head_dim, rotary, fine, positions.device)
    return (rotary.amplitude * angles.cos()).to(dtype), (rotary.amplitude * angles.sin()).to(dtype)
