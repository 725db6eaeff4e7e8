"""The transport of processes: process groups of torch.distributed, gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.run.dispatch_mode import DispatchMode
from shardwise.run.transport.interface import TIMEOUT, IssuedWork, Observer, PeerTensor
from shardwise.sharding import CollectiveKind

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# Which operation of c10d is which collective, and which of its arguments has the payload (`Collective.payload_elements`).
OPERATIONS: dict[str, tuple[CollectiveKind, int]] = {
    "allreduce_": (CollectiveKind.ALL_REDUCE, 0),
    "_allgather_base_": (CollectiveKind.ALL_GATHER, 0),
    "_reduce_scatter_base_": (CollectiveKind.REDUCE_SCATTER, 1),
    "alltoall_base_": (CollectiveKind.ALL_TO_ALL, 1),
    "send": (CollectiveKind.SEND, 0),
    "recv_": (CollectiveKind.RECEIVE, 0),
}


class ProcessGroup:
    """A process group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the processes, in the order of the group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def all_reduce(self, tensor: Tensor, reduction: str = "sum") -> IssuedWork:
        """Reduce `tensor` over all processes, in place."""
        return _require_work(dist.all_reduce(tensor, REDUCTIONS[reduction], group=self.group, async_op=True))

    def all_gather(self, full: Tensor, part: Tensor) -> IssuedWork:
        """Gather the parts of all processes into `full`."""
        return _require_work(dist.all_gather_single(full, part, group=self.group, async_op=True))

    def reduce_scatter(self, part: Tensor, full: Tensor) -> IssuedWork:
        """Sum `full` over all processes, and write this one's part."""
        return _require_work(dist.reduce_scatter_single(part, full, group=self.group, async_op=True))

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: list[int] | None, sent_rows: list[int] | None
    ) -> IssuedWork:
        """Send each part of `sent` to its process."""
        return _require_work(
            dist.all_to_all_single(received, sent, received_rows, sent_rows, group=self.group, async_op=True)
        )

    def send(self, tensor: Tensor, peer: int) -> IssuedWork:
        """Send a tensor to a peer."""
        return _require_work(dist.isend(tensor, group=self.group, group_dst=peer))

    def receive(self, tensor: Tensor, peer: int) -> IssuedWork:
        """Receive a tensor from a peer."""
        return _require_work(dist.irecv(tensor, group=self.group, group_src=peer))

    def exchange(self, sent: Sequence[PeerTensor], received: Sequence[PeerTensor]) -> Sequence[IssuedWork]:
        """Send and receive in one batch: NCCL runs the operations of a batch at once, and others one after the other."""
        operations = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for tensor, peer in sent]
        operations += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor, peer in received]
        return dist.batch_isend_irecv(operations)

    def broadcast(self, tensor: Tensor, source: int) -> IssuedWork:
        """Copy the tensor of one process to all."""
        return _require_work(dist.broadcast(tensor, group=self.group, group_src=source, async_op=True))

    def gather(self, parts: Sequence[Tensor] | None, part: Tensor) -> IssuedWork:
        """Gather the parts of all processes on the first one."""
        gathered = None if parts is None else list(parts)
        return _require_work(dist.gather(part, gathered, group=self.group, group_dst=0, async_op=True))

    def scatter(self, part: Tensor, parts: Sequence[Tensor] | None) -> IssuedWork:
        """Give each process its part, from the first one."""
        scattered = None if parts is None else list(parts)
        return _require_work(dist.scatter(part, scattered, group=self.group, group_src=0, async_op=True))

    def close(self) -> None:
        """Leave the process group: it has threads and connections of its own."""
        dist.destroy_process_group(self.group)


class ProcessTransport:
    """This process among those of the default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        world = dist.group.WORLD
        assert world is not None
        self.world = ProcessGroup(world)
        self._groups: dict[dist.ProcessGroup, ProcessGroup] = {}

    def new_group(self, groups: Sequence[Sequence[int]], timeout: timedelta = TIMEOUT) -> ProcessGroup:
        """Make process groups, and return this process's. Every process makes all of them, in one order."""
        for ranks in groups:
            process_group = dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)
            if self.rank in ranks:
                group = self._groups[process_group] = ProcessGroup(process_group)
        return group

    def host_group(self, timeout: timedelta = TIMEOUT) -> ProcessGroup:
        """Make a gloo group of all processes."""
        return ProcessGroup(dist.new_group(backend="gloo", timeout=timeout))

    def observed(self, observer: Observer) -> DispatchMode:
        """Call `observer` for every collective over groups that were made here.

        It sees what PyTorch hands to process groups, below all that could leave a collective out of the count. Raises
        `RuntimeError` for an operation that is none of `OPERATIONS`.
        """
        return _ObserveDispatch(self._groups, observer)


class _ObserveDispatch(DispatchMode):
    """Calls an observer for the operations of c10d that are dispatched."""

    def __init__(self, groups: dict[dist.ProcessGroup, ProcessGroup], observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups, self.observer = groups, observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._observe(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _observe(self, name: str, args: tuple[Any, ...]) -> None:
        issued_over = dist.ProcessGroup.unbox(next(boxed for boxed in args if isinstance(boxed, torch.ScriptObject)))
        if issued_over == dist.group.WORLD:
            return  # control traffic (`run.faults.agreement`), over no axes of the mesh
        if name not in OPERATIONS:
            raise RuntimeError(f"capture: {name} is a collective that the engine does not issue")
        kind, payload_index = OPERATIONS[name]
        self.observer(kind, list(_tensors(args[payload_index])), self.groups[issued_over])


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    else:
        yield from argument


def _require_work(work: IssuedWork | None) -> IssuedWork:
    assert work is not None, "this process is a member of each of its groups"
    return work


def is_initialized() -> bool:
    """Return whether this process has joined others with torch.distributed."""
    return dist.is_available() and dist.is_initialized()
