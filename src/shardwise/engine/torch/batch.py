"""A micro-batch, and what all layers need of it. Letters: B sequences, T positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.data.batches import IGNORED
from shardwise.engine.torch.attention import Sight
from shardwise.engine.torch.places import Rotation, positions_of, rotation
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import Rotary


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


@dataclass(frozen=True)
class Sights:
    """Positions and angles of one micro-batch, which layers that are alike share, and what each layer's queries see.

    Raises `InputError` where sequences are longer than a learned table of positions.
    """

    architecture: Architecture
    ids_BT: Tensor
    documents_BT: Tensor | None
    dtype: torch.dtype
    angles: dict[Rotary, Rotation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.architecture.require_positions(self.ids_BT.shape[-1])
        object.__setattr__(self, "positions", positions_of(self.ids_BT, self.documents_BT))

    positions: Tensor = field(init=False)

    def sight(self, layer: int) -> Sight:
        """What a layer's queries see."""
        window = self.architecture.window(layer)
        reaches_all = window is None or window >= self.ids_BT.shape[-1]
        return Sight(None if reaches_all else window, self.documents_BT)

    def rotation(self, layer: int) -> Rotation | None:
        """The angles by which a layer turns its queries and keys."""
        if self.architecture.positions != "rotary":
            return None
        numerics = self.architecture.numerics
        local = numerics.local_rotary
        rotary = numerics.rotary if local is None or self.architecture.window(layer) is None else local
        if rotary not in self.angles:
            width = self.architecture.rope_head_dim or self.architecture.head_dim
            self.angles[rotary] = rotation(self.positions, width, rotary, self.dtype)
        return self.angles[rotary]
