"""The collectives that are really issued, seen below the engine, where the transport takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from shardwise.lowering.traffic import PIPELINE
from shardwise.sharding.collective import Issued, Kind
from shardwise.train.formats import DTYPES
from shardwise.train.transport.interface import Group
from shardwise.train.world import World

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Capture:
    """Collectives over axes of the mesh, by kind, axes, format and bytes, in the order in which they are issued while it is
    active. What they carry only the engine knows: it is "".

    What all ranks agree on (`train.together`) is over no axes of the mesh and not among them.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.sequence: list[Issued] = []
        self._observed: AbstractContextManager[object] | None = None

    @property
    def found(self) -> Counter[Issued]:
        """How many of each."""
        return Counter(self.sequence)

    def __enter__(self) -> Capture:
        self._observed = self.world.transport.observed(self._record)
        self._observed.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        assert self._observed is not None
        self._observed.__exit__(*raised)

    def _record(self, kind: Kind, payload: Sequence[Tensor], group: Group) -> None:
        axes = self.world.axes_of(group)
        if axes != PIPELINE and kind is Kind.RECEIVE:
            return  # the other end of what is permuted
        if axes != PIPELINE and kind is Kind.SEND:
            kind = Kind.PERMUTE
        for tensor in payload:
            num_bytes = tensor.numel() * tensor.element_size()
            self.sequence.append(Issued(kind, axes, NAMES[tensor.dtype], num_bytes, ""))
