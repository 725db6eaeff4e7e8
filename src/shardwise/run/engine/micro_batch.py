"""A micro-batch, and the parts, attention masks and rotary angles that units read of it. Letters: B sequences, T
positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.model import Architecture, Rotary
from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.engine.calls import MASK, RING_MASKS
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.kernels.positions_and_masks import (
    AttentionMask,
    PositionRange,
    Rotation,
    document_positions,
    rotation,
)
from shardwise.sharding import Axes


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Token ids and targets [B, T]; where attention is limited to documents, also the document number of each position
    [B, full sequence].

    T are all positions of a sequence, or the `runs` (position ranges) that a rank reads (`positions_read`) of `length`
    positions in all.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None = None
    runs: tuple[PositionRange, ...] | None = None
    length: int | None = None

    @property
    def seq_len(self) -> int:
        """Number of positions of a full sequence."""
        return self.ids_BT.shape[-1] if self.length is None else self.length

    @property
    def ranges(self) -> tuple[PositionRange, ...]:
        """Position ranges that ids and targets cover."""
        return self.runs or ((0, self.seq_len),)

    def restrict_to(self, runs: tuple[PositionRange, ...] | None) -> MicroBatch:
        """Return the micro-batch with the ids and targets of some position ranges of a full sequence; None: of all."""
        if runs is None:
            return self
        ids, targets = (
            torch.cat([tensor.narrow(1, *run) for run in runs], dim=1) for tensor in (self.ids_BT, self.targets_BT)
        )
        return replace(self, ids_BT=ids, targets_BT=targets, runs=runs, length=self.seq_len)

    def rows(self, runs: Iterable[PositionRange]) -> list[PositionRange]:
        """Return where the ids and targets of some position ranges are stored: first row and number of rows of each.

        Raises `ValueError` where this rank does not have them.
        """
        row_ranges = []
        for position, length in runs:
            row, first, count = max(
                (run for run in self._ranges_with_first_row() if run[1] <= position),
                key=lambda run: run[1],
                default=(0, 0, 0),
            )
            if position + length > first + count:
                raise ValueError(
                    f"places {position} to {position + length} of a sequence are required; {self.ranges} are there"
                )
            row_ranges.append((row + position - first, length))
        return row_ranges

    def _ranges_with_first_row(self) -> Iterator[tuple[int, int, int]]:
        """Yield each range with the number of its first row."""
        row = 0
        for position, length in self.ranges:
            yield row, position, length
            row += length

    def shift_to_next_token(self) -> MicroBatch:
        """Return the micro-batch one token on: each position takes the next one's id and target.

        The last position of a range repeats its id and has no target, nor has a position whose target this batch
        ignores, so that no target is in another document.
        """
        ids, targets = (tensor.roll(-1, dims=1) for tensor in (self.ids_BT, self.targets_BT))
        for row, _, length in self._ranges_with_first_row():
            last = slice(row + length - 1, row + length)
            ids[:, last], targets[:, last] = self.ids_BT[:, last], IGNORE_INDEX
        targets.masked_fill_(self.targets_BT == IGNORE_INDEX, IGNORE_INDEX)
        return replace(self, ids_BT=ids, targets_BT=targets)


def positions_read(rank: Rank, length: int, num_predicted: int) -> tuple[PositionRange, ...] | None:
    """Return the position ranges whose ids and targets a rank reads: its part along `cp`, and after each range as many
    positions as multi-token prediction looks ahead (`num_predicted`). None: all.

    Raises `ValueError` where the chunks do not divide the sequence.
    """
    local_ranges = rank.sequence_ranges(length, tuple({"cp"} & set(rank.mesh.names)))
    return local_ranges and tuple(
        (position, min(count + num_predicted, length - position)) for position, count in local_ranges
    )


class MicroBatchInputs:
    """The parts of a micro-batch that a rank's units read, with the angles and masks that layers share.

    Raises `InputError` where sequences are longer than a learned table of positions.
    """

    def __init__(self, architecture: Architecture, batch: MicroBatch, dtype: torch.dtype, rank: Rank) -> None:
        architecture.require_positions(batch.seq_len)
        self.architecture, self.batch, self.dtype, self.rank = architecture, batch, dtype, rank
        positions = document_positions(batch.seq_len, batch.documents_BT, batch.ids_BT.device)
        self.tensors = {"ids": batch.ids_BT, "targets": batch.targets_BT, "positions": positions}
        self._parts: dict[Axes, tuple[PositionRange, ...] | None] = {}
        self._cut: dict[tuple[str, Axes], Tensor] = {}
        self._angles: dict[tuple[Rotary, int, Axes], Rotation] = {}

    def unit_input(self, name: str, axes: tuple[Axes, ...], layer: int | None) -> Any:
        """Return what a unit reads under a name (`CallBuilder.batch_parts`): ids, a mask or angles."""
        if name in self.tensors:
            return self.cut(name, *axes)
        assert layer is not None
        if name == RING_MASKS:
            (ring_axes,) = axes
            ranks = range(self.rank.mesh.size(ring_axes))
            return [self.attention_mask(layer, ring_axes, ring_axes, rank_index) for rank_index in ranks]
        if name == MASK:
            queries, keys = axes
            return self.attention_mask(layer, queries, keys)
        return self.rotation(layer, *axes)

    def part(self, axes: Axes) -> tuple[PositionRange, ...] | None:
        """Return this rank's position ranges of a sequence split over some axes; None: all in their order."""
        if axes not in self._parts:
            self._parts[axes] = self.rank.sequence_ranges(self.batch.seq_len, axes)
        return self._parts[axes]

    def cut(self, name: str, axes: Axes) -> Tensor:
        """Return this rank's part of ids, targets or positions."""
        key, part = (name, axes), self.part(axes) or ((0, self.batch.seq_len),)
        if key not in self._cut:
            tensor, rows = self.tensors[name], part if name == "positions" else self.batch.rows(part)
            is_all = list(rows) == [(0, tensor.shape[-1])]
            self._cut[key] = tensor if is_all else torch.cat([tensor.narrow(-1, *run) for run in rows], dim=-1)
        return self._cut[key]

    def attention_mask(self, layer: int, queries: Axes, keys: Axes, rank_index: int | None = None) -> AttentionMask:
        """Return a layer's mask from this rank's queries to its keys, or to those at `rank_index`."""
        window = self.architecture.attention_window(layer)
        reaches_all = window is None or window >= self.batch.seq_len
        query_ranges = self.part(queries)
        key_ranges = (
            self.part(keys) if rank_index is None else self.rank.sequence_ranges(self.batch.seq_len, keys, rank_index)
        )
        return AttentionMask(None if reaches_all else window, self.batch.documents_BT, query_ranges, key_ranges)

    def rotation(self, layer: int, axes: Axes) -> Rotation | None:
        """Return the rotary angles of a layer's queries and keys; None without rotary positions."""
        architecture = self.architecture.layer_architecture(layer)
        if architecture.positions != "rotary":
            return None
        local = architecture.numerics.local_rotary
        no_window = self.architecture.attention_window(layer) is None
        rotary = architecture.numerics.rotary if local is None or no_window else local
        width = architecture.rope_head_dim or architecture.head_dim
        key = rotary, width, axes
        if key not in self._angles:
            self._angles[key] = rotation(self.cut("positions", axes), width, rotary, self.dtype)
        return self._angles[key]
