"""The sequences of one split: sequence k is tokens k·T to (k + 1)·T as inputs, and the ones behind them as targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwise.data.order import Int64s
from shardwise.data.shards import TokenShards
from shardwise.errors import InputError

Places = Sequence[tuple[int, int]]  # parts of each sequence: the first place of each, and how many
IGNORED = -100  # the target that PyTorch's cross_entropy leaves out (its `ignore_index`)


class Row(NamedTuple):
    """A sequence, or some places of it, with the names of a `Batch`."""

    inputs_T: Int64s
    targets_T: Int64s
    documents_T: Int64s
    begins_N: Int64s


class Sequences:
    """Sequences of `seq_len` tokens; documents follow on each other, and tokens at the end that fill no sequence are left out."""

    def __init__(self, shards: TokenShards, seq_len: int, *, ignore_boundaries: bool = False) -> None:
        """Raises `InputError` for a split that is too short for one sequence."""
        if seq_len < 1:
            raise InputError(f"seq_len: found {seq_len}; at least 1 is required")
        if shards.num_tokens <= seq_len:
            raise InputError(
                f"{shards.folder}: {shards.name} has {shards.num_tokens:,} tokens; sequences of {seq_len:,} require at least "
                f"{seq_len + 1:,}: give more text"
                f"{', a larger --held-out' if shards.name == 'held_out' else ''} or shorter sequences"
            )
        self.shards, self.seq_len, self.ignore_boundaries = shards, seq_len, ignore_boundaries

    def __len__(self) -> int:
        """Sequences of one epoch."""
        return (self.shards.num_tokens - 1) // self.seq_len

    def num_targets(self, numbers: Int64s) -> int:
        """Targets of these sequences that count in the loss; no token is read."""
        starts = numbers * self.seq_len
        num_boundaries = 0
        if self.ignore_boundaries:
            num_boundaries = (self.shards.num_ends(starts + self.seq_len) - self.shards.num_ends(starts)).sum()
        return len(starts) * self.seq_len - int(num_boundaries)

    def read(self, number: int, places: Places | None = None) -> Row:
        """A sequence, or some `places` of it: no other token is read but the one behind each part, its last target."""
        parts, start = places or ((0, self.seq_len),), number * self.seq_len
        place_T = np.concatenate([np.arange(first, first + count) for first, count in parts])
        tokens = [self.shards.tokens(start + first, start + first + count + 1) for first, count in parts]
        inputs, targets = (np.concatenate([one[cut] for one in tokens]) for cut in (np.s_[:-1], np.s_[1:]))
        document, ends = self.shards.begins(start, start + self.seq_len + 1)
        begins = ends - start
        if self.ignore_boundaries:
            targets[np.isin(place_T + 1, begins)] = IGNORED
        return Row(inputs, targets, document + np.searchsorted(begins, place_T, side="right"), begins)
