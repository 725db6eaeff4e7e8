"""Where tokens are in their documents, what they may see, and the angles of their rotary embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plain.gradients import at_least_fp32
from shardwise.model.numerics import Rotary

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [T, H/2] or [B, T, H/2]


def positions_of(ids: Tensor, document_ids: Tensor | None) -> Tensor:
    """Positions [T] in the sequence, or [B, T] from the beginning of each token's document."""
    places = torch.arange(ids.shape[-1], device=ids.device)
    if document_ids is None:
        return places
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=-1).values


def mask_of(ids: Tensor, window: int | None, document_ids: Tensor | None) -> Tensor | None:
    """Which keys each query sees, [T, T] or [B, 1, T, T]; None where it is all up to its own."""
    length = ids.shape[-1]
    reach = length if window is None else min(window, length)
    if reach == length and document_ids is None:
        return None
    places = torch.arange(length, device=ids.device)
    distance = places[:, None] - places[None, :]
    visible = (distance >= 0) & (distance < reach)
    if document_ids is None:
        return visible
    return (visible & (document_ids[:, :, None] == document_ids[:, None, :]))[:, None]


def frequencies(head_dim: int, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle of each pair of a head per position, [H/2]."""
    half = int(head_dim * rotary.part) // 2
    angles = rotary.base ** (-torch.arange(half, dtype=dtype, device=device) / half)
    if not rotary.original_positions:
        return angles / rotary.factor
    turns = rotary.original_positions * angles / (2.0 * math.pi)
    kept = ((turns - rotary.low) / (rotary.high - rotary.low)).clamp(0.0, 1.0)
    return angles * (kept + (1.0 - kept) / rotary.factor)


def rotation(positions: Tensor, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of all angles: made in fp32 at least, given in `dtype`."""
    fine = at_least_fp32(dtype)
    angles = positions[..., None].to(fine) * frequencies(head_dim, rotary, fine, positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, angles: Rotation) -> Tensor:
    """x [B, T, ..., H] with the first half of each head turned against the second; of a head with more dims than two for each
    angle, of the first ones alone."""
    cos, sin = (table.reshape(*table.shape[:-1], *(1,) * (x.dim() - 3), table.shape[-1]) for table in angles)
    turned, unturned = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos, unturned), dim=-1)
