"""Where tokens are in their documents, and the angles of their rotary embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.engine.torch.functions import at_least_fp32
from shardwise.model.numerics import Rotary

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, H/2] or [B, T, H/2]


def positions_of(length: int, document_ids: Tensor | None, device: torch.device) -> Tensor:
    """Positions [T] in a sequence of a length, or [B, T] from the beginning of each token's document."""
    places = torch.arange(length, device=device)
    if document_ids is None:
        return places
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=-1).values


def frequencies(head_dim: int, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle of each pair of a head per position, [H/2]."""
    half = head_dim // 2
    found = rotary.base ** (-torch.arange(half, dtype=dtype, device=device) / half)
    if not rotary.original_positions:
        return found / rotary.factor
    turns = rotary.original_positions * found / (2.0 * math.pi)
    kept = ((turns - rotary.low) / (rotary.high - rotary.low)).clamp(0.0, 1.0)
    return found * (kept + (1.0 - kept) / rotary.factor)


def rotation(positions: Tensor, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of all angles: made in fp32 at least, given in `dtype`."""
    fine = at_least_fp32(dtype)
    angles = positions[..., None].to(fine) * frequencies(head_dim, rotary, fine, positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)
