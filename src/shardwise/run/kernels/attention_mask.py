"""What queries see of keys, where a rank has parts of a sequence of either. Letters: B sequences, T queries, S keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PositionRange = tuple[int, int]  # neighbouring places of a sequence: the first one, and how many
MIN_QUERY_BLOCK = 512  # queries that go together at least, where they go in blocks


class QueryBlock(NamedTuple):
    """Queries of a range of rows, which begin at a place, and the keys of a range of rows, which are in order.

    `causal`: the first query sees the first key, and each sees one more than the one before. `masked`: a mask says what is seen.
    Otherwise all is.
    """

    rows: slice
    place: int
    keys: slice
    causal: bool = False
    masked: bool = False


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """What queries see of the keys up to their own: those less than `window` away (None: all), of the same document by
    `documents` [B, whole sequence] (None: all). `queries` and `keys` are the places of either (None: all, in order)."""

    window: int | None = None
    documents: Tensor | None = None
    queries: tuple[PositionRange, ...] | None = None
    keys: tuple[PositionRange, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every query sees all keys up to its own."""
        return self.window is None and self.documents is None

    @property
    def is_whole(self) -> bool:
        """Whether queries and keys are those of the whole sequence, in order."""
        return self.queries is None and self.keys is None

    def sort_keys(self, keys: Tensor, dim: int) -> Tensor:
        """Keys, or values, by their places."""
        parts = _rows_if_unsorted(self.keys or ())
        return keys if parts is None else torch.cat([keys.narrow(dim, *parts[one]) for one in sorted(parts)], dim=dim)

    def unsort_keys(self, keys: Tensor, dim: int) -> Tensor:
        """Keys, or values, by their places as they came."""
        parts = _rows_if_unsorted(self.keys or ())
        if parts is None:
            return keys
        begins = _first_rows(sorted(self.keys or ()))
        return torch.cat([keys.narrow(dim, begins[one], one[1]) for one in self.keys or ()], dim=dim)

    def blocks(self, queries: int, keys: int, *, masked: bool) -> Iterator[QueryBlock]:
        """All queries in blocks, of which those of the same rows see different keys; with `masked` those of any rows are one.
        Queries that see no key are in none of them."""
        own, other = self.queries or ((0, queries),), sorted(self.keys or ((0, keys),))
        row = 0
        for place, length in own:
            if masked or not self.is_plain:
                size = max(MIN_QUERY_BLOCK, self.window or 0)
                for start in range(0, length, size):
                    stop = min(start + size, length)
                    first = 0 if self.window is None else max(place + start - self.window + 1, 0)
                    seen = slice(_num_before(other, first), _num_before(other, place + stop))
                    if seen.start < seen.stop:  # kernels take no block without a key
                        yield QueryBlock(slice(row + start, row + stop), place + start, seen, masked=True)
            else:
                yield from _causal_blocks(slice(row, row + length), place, other)
            row += length

    def mask(self, block: QueryBlock, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is added to a block's scores, [T, S] or [B, 1, T, S]: minus infinity for what is not seen."""
        queries = torch.arange(block.place, block.place + block.rows.stop - block.rows.start, device=device)
        keys = self._places(block.keys, device)
        distance = queries[:, None] - keys
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        if self.documents is not None:
            own, other = self.documents[:, queries], self.documents[:, keys]
            seen = (seen & (own[:, :, None] == other[:, None, :]))[:, None]
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))

    def _places(self, rows: slice, device: torch.device) -> Tensor:
        """Of keys that are in order."""
        if self.keys is None:
            return torch.arange(rows.start, rows.stop, device=device)
        runs = [torch.arange(place, place + length, device=device) for place, length in sorted(self.keys)]
        return torch.cat(runs)[rows]


def _causal_blocks(rows: slice, place: int, keys: Sequence[PositionRange]) -> Iterator[QueryBlock]:
    """Queries of neighbouring places: all keys before them, and those of their own places."""
    before, own = _num_before(keys, place), _num_before(keys, place + rows.stop - rows.start)
    if before:
        yield QueryBlock(rows, place, slice(0, before))
    if own > before:
        is_square = own - before == rows.stop - rows.start
        yield QueryBlock(rows, place, slice(before, own), causal=is_square, masked=not is_square)


def _num_before(runs: Sequence[PositionRange], place: int) -> int:
    """How many places of some runs are before a place."""
    return sum(min(max(place - start, 0), length) for start, length in runs)


def _first_rows(runs: Sequence[PositionRange]) -> dict[PositionRange, int]:
    """At which row each of some runs begins."""
    found, row = {}, 0
    for one in runs:
        found[one] = row
        row += one[1]
    return found


def _rows_if_unsorted(runs: Sequence[PositionRange]) -> dict[PositionRange, tuple[int, int]] | None:
    """Rows of each run, first and number, where they are not in order."""
    if list(runs) == sorted(runs):
        return None
    return {one: (row, one[1]) for one, row in _first_rows(runs).items()}


def list_positions(runs: Sequence[PositionRange], device: torch.device) -> Tensor:
    """The places [n] of some runs."""
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in runs])
