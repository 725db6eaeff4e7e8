"""A micro-batch, and what all layers need of it. Letters: B sequences, T positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.model.architecture import Architecture
from shardwise.model.numerics import Rotary
from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.engine.call_builder import MASK, RING_MASKS
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.kernels.attention_mask import AttentionMask, PositionRange
from shardwise.run.kernels.rotary import Rotation, document_positions, rotation
from shardwise.sharding.spec import Axes


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Ids and targets [B, T], and, where attention keeps to documents, the number of each place's [B, whole sequence].

    T are all places of a sequence, or the `runs` of them that a rank reads (`positions_read`) of `length` in all.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None = None
    runs: tuple[PositionRange, ...] | None = None
    length: int | None = None

    @property
    def seq_len(self) -> int:
        """The places of a whole sequence."""
        return self.ids_BT.shape[-1] if self.length is None else self.length

    @property
    def held(self) -> tuple[PositionRange, ...]:
        """The places that ids and targets are of."""
        return self.runs or ((0, self.seq_len),)

    def restrict_to(self, runs: tuple[PositionRange, ...] | None) -> MicroBatch:
        """The same with ids and targets of some places of a whole sequence alone; None: of all."""
        if runs is None:
            return self
        ids, targets = (
            torch.cat([one.narrow(1, *run) for run in runs], dim=1) for one in (self.ids_BT, self.targets_BT)
        )
        return replace(self, ids_BT=ids, targets_BT=targets, runs=runs, length=self.seq_len)

    def rows(self, runs: Iterable[PositionRange]) -> list[PositionRange]:
        """Where the ids and targets of some places are: the first one's number and how many, of each run."""
        found = []
        for place, length in runs:
            row, first, count = max(
                (run for run in self._numbered() if run[1] <= place), key=lambda run: run[1], default=(0, 0, 0)
            )
            if place + length > first + count:
                raise ValueError(
                    f"places {place} to {place + length} of a sequence are required; {self.held} are there"
                )
            found.append((row + place - first, length))
        return found

    def _numbered(self) -> Iterator[tuple[int, int, int]]:
        """Each run with the number of its first row."""
        row = 0
        for place, length in self.held:
            yield row, place, length
            row += length

    def shift_by_one_token(self) -> MicroBatch:
        """One token on: at each place the next one's id and target. The last place of a run has the same id again, and no target;
        neither has one from which a target of this batch is not counted, so that none is in another document.
        """
        ids, targets = (one.roll(-1, dims=1) for one in (self.ids_BT, self.targets_BT))
        for row, _, length in self._numbered():
            last = slice(row + length - 1, row + length)
            ids[:, last], targets[:, last] = self.ids_BT[:, last], IGNORE_INDEX
        targets.masked_fill_(self.targets_BT == IGNORE_INDEX, IGNORE_INDEX)
        return replace(self, ids_BT=ids, targets_BT=targets)


def positions_read(rank: Rank, length: int, further: int) -> tuple[PositionRange, ...] | None:
    """The places of sequences whose ids and targets a rank reads: its part of them along `cp`, and behind each run of it as many
    places as `further` tokens are predicted from there. None: all.

    Raises `ValueError` where the pieces do not divide the sequence.
    """
    own = rank.sequence_ranges(length, tuple({"cp"} & set(rank.mesh.names)))
    return own and tuple((place, min(count + further, length - place)) for place, count in own)


class MicroBatchInputs:
    """A micro-batch in the parts that a rank's units read, and what layers that are alike share: angles, and what queries see.

    Raises `InputError` where sequences are longer than a learned table of positions.
    """

    def __init__(self, architecture: Architecture, batch: MicroBatch, dtype: torch.dtype, rank: Rank) -> None:
        architecture.require_positions(batch.seq_len)
        self.architecture, self.batch, self.dtype, self.rank = architecture, batch, dtype, rank
        positions = document_positions(batch.seq_len, batch.documents_BT, batch.ids_BT.device)
        self.held = {"ids": batch.ids_BT, "targets": batch.targets_BT, "positions": positions}
        self._parts: dict[Axes, tuple[PositionRange, ...] | None] = {}
        self._cut: dict[tuple[str, Axes], Tensor] = {}
        self._angles: dict[tuple[Rotary, Axes], Rotation] = {}

    def unit_input(self, name: str, axes: tuple[Axes, ...], layer: int | None) -> Any:
        """What a unit reads under a name (`Calls.cuts`): a part of the batch, or what a layer makes of positions."""
        if name in self.held:
            return self.cut(name, *axes)
        assert layer is not None
        if name == RING_MASKS:
            (around,) = axes
            return [self.attention_mask(layer, around, around, place) for place in range(self.rank.mesh.size(around))]
        if name == MASK:
            queries, keys = axes
            return self.attention_mask(layer, queries, keys)
        return self.rotation(layer, *axes)

    def part(self, axes: Axes) -> tuple[PositionRange, ...] | None:
        """The places of this rank's part of a sequence that is split over some axes; None: all in their order."""
        if axes not in self._parts:
            self._parts[axes] = self.rank.sequence_ranges(self.batch.seq_len, axes)
        return self._parts[axes]

    def cut(self, name: str, axes: Axes) -> Tensor:
        """This rank's part of ids, targets or positions."""
        key, part = (name, axes), self.part(axes) or ((0, self.batch.seq_len),)
        if key not in self._cut:
            held, rows = self.held[name], part if name == "positions" else self.batch.rows(part)
            is_all = list(rows) == [(0, held.shape[-1])]
            self._cut[key] = held if is_all else torch.cat([held.narrow(-1, *run) for run in rows], dim=-1)
        return self._cut[key]

    def attention_mask(self, layer: int, queries: Axes, keys: Axes, place: int | None = None) -> AttentionMask:
        """What a layer's queries see, of parts of the sequence; of keys, this rank's, or those of the rank at a place."""
        window = self.architecture.attention_window(layer)
        reaches_all = window is None or window >= self.batch.seq_len
        own = self.part(queries)
        other = self.part(keys) if place is None else self.rank.sequence_ranges(self.batch.seq_len, keys, place)
        return AttentionMask(None if reaches_all else window, self.batch.documents_BT, own, other)

    def rotation(self, layer: int, axes: Axes) -> Rotation | None:
        """The angles by which a layer turns its queries and keys."""
        if self.architecture.positions != "rotary":
            return None
        numerics = self.architecture.numerics
        local = numerics.local_rotary
        rotary = numerics.rotary if local is None or self.architecture.attention_window(layer) is None else local
        if (rotary, axes) not in self._angles:
            width = self.architecture.rope_head_dim or self.architecture.head_dim
            self._angles[rotary, axes] = rotation(self.cut("positions", axes), width, rotary, self.dtype)
        return self._angles[rotary, axes]
