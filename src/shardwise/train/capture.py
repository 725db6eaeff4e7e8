"""The collectives that are really issued, seen below the engine, where PyTorch hands them to the process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.lowering.traffic import PIPELINE
from shardwise.sharding.collective import Issued, Kind
from shardwise.train.dispatch import DispatchMode
from shardwise.train.formats import DTYPES
from shardwise.train.world import World

# Which operation of c10d is which collective, and which of its arguments has the payload (`Collective.payload_elements`).
OPERATIONS: dict[str, tuple[Kind, int]] = {
    "allreduce_": (Kind.ALL_REDUCE, 0),
    "_allgather_base_": (Kind.ALL_GATHER, 0),
    "_reduce_scatter_base_": (Kind.REDUCE_SCATTER, 1),
    "alltoall_base_": (Kind.ALL_TO_ALL, 1),
    "send": (Kind.PERMUTE, 0),
    "recv_": (Kind.RECEIVE, 0),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Capture(DispatchMode):
    """Collectives over axes of the mesh, by kind, axes, format and bytes, in the order in which they are issued while it is
    active. What they carry only the engine knows: it is "".

    What all ranks agree on (`train.together`) is over no axes of the mesh and not among them. Raises `RuntimeError` for another
    operation of a process group that is none of `OPERATIONS`.
    """

    def __init__(self, world: World) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world
        self.sequence: list[Issued] = []

    @property
    def found(self) -> Counter[Issued]:
        """How many of each."""
        return Counter(self.sequence)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        group = dist.ProcessGroup.unbox(next(one for one in args if isinstance(one, torch.ScriptObject)))
        if group == dist.group.WORLD:
            return
        if name not in OPERATIONS:
            raise RuntimeError(f"capture: {name} is a collective that the engine does not issue")
        kind, place = OPERATIONS[name]
        axes = self.world.axes_of(group)
        if axes == PIPELINE and kind is Kind.PERMUTE:
            kind = Kind.SEND
        elif axes != PIPELINE and kind is Kind.RECEIVE:
            return  # the other end of what is permuted
        for tensor in _tensors(args[place]):
            num_bytes = tensor.numel() * tensor.element_size()
            self.sequence.append(Issued(kind, axes, NAMES[tensor.dtype], num_bytes, ""))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        yield from value
