"""Positions of tokens in their documents, rotary embeddings, and attention masks between parts of a sequence.

Masks are causal, windowed, or limited to documents. Letters: B sequences, T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.model import Rotary
from shardwise.model.numerics import RAMP_OVER_FREQUENCY, RAMP_OVER_INDEX
from shardwise.run.kernels.device_dispatch import at_least_fp32, has_triton

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
    if has_triton(x):
        from shardwise.run.triton_kernels import rotary as fused

        return fused.rotate(x, angles, sign)
    cos, sin = (table.reshape(*table.shape[:-1], *(1,) * (x.dim() - 3), table.shape[-1]) for table in angles)
    half = cos.shape[-1]
    parts = half, half, x.shape[-1] - 2 * half
    first, second, rest = torch.split_with_sizes(x, parts, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to_first, to_second, to_rest = torch.split_with_sizes(out, parts, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=sign)
    to_rest.copy_(rest)
    return out


def rotate_back(dy: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the transpose of `rotate`."""
    return rotate(dy, angles, -1.0)


PositionRange = tuple[int, int]  # consecutive positions of a sequence: the first one, and how many
MIN_QUERY_BLOCK = 512  # queries of a block at least, where queries run in blocks


class QueryBlock(NamedTuple):
    """Queries in a range of rows, the first at `position`, and keys in a range of sorted rows.

    `causal`: the first query sees the first key, and each query one key more than the one before. `masked`: a mask
    tensor says what is visible. Otherwise all keys are.
    """

    rows: slice
    position: int
    keys: slice
    causal: bool = False
    masked: bool = False


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Mask of attention: which keys up to its own position each query sees.

    Those less than `window` positions away (None: all), in the same document by `documents` [B, full sequence] (None:
    all). `queries` and `keys` are their position ranges (None: the full sequence, in order).
    """

    window: int | None = None
    documents: Tensor | None = None
    queries: tuple[PositionRange, ...] | None = None
    keys: tuple[PositionRange, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """True if every query sees all keys up to its own position."""
        return self.window is None and self.documents is None

    @property
    def is_whole(self) -> bool:
        """True if queries and keys cover the full sequence, in order."""
        return self.queries is None and self.keys is None

    def sort_keys(self, keys: Tensor, dim: int) -> Tensor:
        """Return keys, or values, sorted by position along `dim`."""
        rows_of = _rows_if_unsorted(self.keys or ())
        return (
            keys
            if rows_of is None
            else torch.cat([keys.narrow(dim, *rows_of[key_range]) for key_range in sorted(rows_of)], dim=dim)
        )

    def unsort_keys(self, keys: Tensor, dim: int) -> Tensor:
        """Return sorted keys, or values, in the order of `keys` again."""
        rows_of = _rows_if_unsorted(self.keys or ())
        if rows_of is None:
            return keys
        first_rows = _first_rows(sorted(self.keys or ()))
        return torch.cat(
            [keys.narrow(dim, first_rows[key_range], key_range[1]) for key_range in self.keys or ()], dim=dim
        )

    def blocks(self, num_queries: int, num_keys: int, *, masked: bool) -> Iterator[QueryBlock]:
        """Yield all queries in blocks; blocks of the same rows see disjoint keys. With `masked`, each range of rows is
        in one block only.

        Queries that see no key are in no block.
        """
        query_ranges, key_ranges = self.queries or ((0, num_queries),), sorted(self.keys or ((0, num_keys),))
        row = 0
        for position, length in query_ranges:
            if masked or not self.is_plain:
                size = max(MIN_QUERY_BLOCK, self.window or 0)
                for start in range(0, length, size):
                    stop = min(start + size, length)
                    first_key = 0 if self.window is None else max(position + start - self.window + 1, 0)
                    key_rows = slice(_num_before(key_ranges, first_key), _num_before(key_ranges, position + stop))
                    if key_rows.start < key_rows.stop:  # kernels need at least one key
                        yield QueryBlock(slice(row + start, row + stop), position + start, key_rows, masked=True)
            else:
                yield from _causal_blocks(slice(row, row + length), position, key_ranges)
            row += length

    def mask(self, block: QueryBlock, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what is added to a block's scores, [T, S] or [B, 1, T, S]: minus infinity where a key is not visible."""
        queries = torch.arange(block.position, block.position + block.rows.stop - block.rows.start, device=device)
        keys = self._places(block.keys, device)
        distance = queries[:, None] - keys
        visible = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        if self.documents is not None:
            query_documents, key_documents = self.documents[:, queries], self.documents[:, keys]
            visible = (visible & (query_documents[:, :, None] == key_documents[:, None, :]))[:, None]
        return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))

    def _places(self, rows: slice, device: torch.device) -> Tensor:
        """Return the positions of sorted keys."""
        if self.keys is None:
            return torch.arange(rows.start, rows.stop, device=device)
        ranges = [torch.arange(position, position + length, device=device) for position, length in sorted(self.keys)]
        return torch.cat(ranges)[rows]


def _causal_blocks(rows: slice, position: int, key_ranges: Sequence[PositionRange]) -> Iterator[QueryBlock]:
    """Yield blocks of queries at consecutive positions: with all earlier keys, and with keys of these positions."""
    num_earlier = _num_before(key_ranges, position)
    num_visible = _num_before(key_ranges, position + rows.stop - rows.start)
    if num_earlier:
        yield QueryBlock(rows, position, slice(0, num_earlier))
    if num_visible > num_earlier:
        is_square = num_visible - num_earlier == rows.stop - rows.start
        yield QueryBlock(rows, position, slice(num_earlier, num_visible), causal=is_square, masked=not is_square)


def _num_before(ranges: Sequence[PositionRange], position: int) -> int:
    """Return how many positions of some ranges are before a position."""
    return sum(min(max(position - start, 0), length) for start, length in ranges)


def _first_rows(ranges: Sequence[PositionRange]) -> dict[PositionRange, int]:
    """Return the first row of each range."""
    first_rows, row = {}, 0
    for position_range in ranges:
        first_rows[position_range] = row
        row += position_range[1]
    return first_rows


def _rows_if_unsorted(ranges: Sequence[PositionRange]) -> dict[PositionRange, tuple[int, int]] | None:
    """Return first row and number of rows of each range; None where the ranges are sorted."""
    if list(ranges) == sorted(ranges):
        return None
    return {position_range: (row, position_range[1]) for position_range, row in _first_rows(ranges).items()}
