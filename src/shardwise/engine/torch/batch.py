"""A micro-batch, and what all layers need of it. Letters: B sequences, T positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batches import IGNORED
from shardwise.engine.torch.calls import SIGHT, SIGHTS
from shardwise.engine.torch.places import Rotation, positions_of, rotation
from shardwise.engine.torch.rank import Rank
from shardwise.engine.torch.sight import Run, Sight
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import Rotary
from shardwise.sharding.spec import Axes


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Ids, targets and, where attention keeps to documents, their numbers: [B, T] each."""

    ids_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device; from pinned memory the copy runs beside what the host does next."""
        tensors = (self.ids_BT, self.targets_BT, self.documents_BT)
        return MicroBatch(*(one if one is None else one.to(device, non_blocking=True) for one in tensors))  # type: ignore[arg-type]

    def further(self) -> MicroBatch:
        """One token on: at each position the next one's id and target. The last position has the same id again, and no target;
        neither has one from which a target of this batch is not counted, so that none is in another document.
        """
        ids, targets = (torch.cat((one[:, 1:], one[:, -1:]), dim=1) for one in (self.ids_BT, self.targets_BT))
        targets[:, -1:] = IGNORED
        targets.masked_fill_(self.targets_BT == IGNORED, IGNORED)
        return MicroBatch(ids, targets, self.documents_BT)


class Sights:
    """A micro-batch in the parts that a rank's units read, and what layers that are alike share: angles, and what queries see.

    Raises `InputError` where sequences are longer than a learned table of positions.
    """

    def __init__(self, architecture: Architecture, batch: MicroBatch, dtype: torch.dtype, rank: Rank) -> None:
        architecture.require_positions(batch.ids_BT.shape[-1])
        self.architecture, self.batch, self.dtype, self.rank = architecture, batch, dtype, rank
        positions = positions_of(batch.ids_BT, batch.documents_BT)
        self.whole = {"ids": batch.ids_BT, "targets": batch.targets_BT, "positions": positions}
        self._parts: dict[Axes, tuple[Run, ...] | None] = {}
        self._cut: dict[tuple[str, Axes], Tensor] = {}
        self._angles: dict[tuple[Rotary, Axes], Rotation] = {}

    def given(self, name: str, axes: tuple[Axes, ...], layer: int | None) -> Any:
        """What a unit reads under a name (`Calls.cuts`): a part of the batch, or what a layer makes of positions."""
        if name in self.whole:
            return self.cut(name, *axes)
        assert layer is not None
        if name == SIGHTS:
            (around,) = axes
            return [self.sight(layer, around, around, place) for place in range(self.rank.mesh.size(around))]
        if name == SIGHT:
            queries, keys = axes
            return self.sight(layer, queries, keys)
        return self.rotation(layer, *axes)

    def part(self, axes: Axes) -> tuple[Run, ...] | None:
        """The places of this rank's part of a sequence that is split over some axes; None: all in their order."""
        if axes not in self._parts:
            self._parts[axes] = self.rank.sequence(self.batch.ids_BT.shape[-1], axes)
        return self._parts[axes]

    def cut(self, name: str, axes: Axes) -> Tensor:
        """This rank's part of ids, targets or positions."""
        key, part = (name, axes), self.part(axes)
        if key not in self._cut:
            whole = self.whole[name]
            self._cut[key] = whole if part is None else torch.cat([whole.narrow(-1, *run) for run in part], dim=-1)
        return self._cut[key]

    def sight(self, layer: int, queries: Axes, keys: Axes, place: int | None = None) -> Sight:
        """What a layer's queries see, of parts of the sequence; of keys, this rank's, or those of the rank at a place."""
        window = self.architecture.window(layer)
        reaches_all = window is None or window >= self.batch.ids_BT.shape[-1]
        own = self.part(queries)
        other = self.part(keys) if place is None else self.rank.sequence(self.batch.ids_BT.shape[-1], keys, place)
        return Sight(None if reaches_all else window, self.batch.documents_BT, own, other)

    def rotation(self, layer: int, axes: Axes) -> Rotation | None:
        """The angles by which a layer turns its queries and keys."""
        if self.architecture.positions != "rotary":
            return None
        numerics = self.architecture.numerics
        local = numerics.local_rotary
        rotary = numerics.rotary if local is None or self.architecture.window(layer) is None else local
        if (rotary, axes) not in self._angles:
            width = self.architecture.rope_head_dim or self.architecture.head_dim
            self._angles[rotary, axes] = rotation(self.cut("positions", axes), width, rotary, self.dtype)
        return self._angles[rotary, axes]
