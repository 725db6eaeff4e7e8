"""The ranks of a run on its mesh, the process groups of its axes, and the device of each rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.run.faults.rank_status import LostRankError, Peer, wait_for_ranks
from shardwise.run.faults.rendezvous import Rendezvous, exit_as_lost, join_rendezvous
from shardwise.run.faults.torch_stores import PrefixStore
from shardwise.run.machine_resources import keep_host_memory
from shardwise.run.recipe import Device
from shardwise.run.transport.current import current_transport
from shardwise.run.transport.interface import TIMEOUT, CollectiveGroup, Transport
from shardwise.sharding import Axes, Mesh
from shardwise.step import MIRROR_RANKS
from shardwise.values import InputError

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # between the starts of the first and the last rank


class World:
    """This rank among those of a mesh; groups are made when first asked for, by all ranks in the same order.

    `transport` is how it reaches the others, by default that of this process or thread. No collective waits longer than
    `timeout`. Raises `InputError` where the number of ranks differs from the mesh's devices.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device | str = "cpu", *, transport: Transport | None = None,
        rendezvous: Rendezvous | None = None, timeout: timedelta = TIMEOUT,
    ) -> None:  # fmt: skip
        self.mesh, self.device, self.rendezvous, self.timeout = mesh, torch.device(device), rendezvous, timeout
        self.transport = current_transport() if transport is None else transport
        self.rank, self.size = self.transport.rank, self.transport.size
        if self.size != mesh.num_devices:
            raise InputError(
                f"train: found {self.size} processes; the plan requires {mesh.num_devices}, one for each of its devices"
            )
        self.coordinate = list(mesh.coordinates())[self.rank]
        self._groups: dict[tuple[Axes, bool], CollectiveGroup] = {}

    @property
    def stage(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.coordinate.get("pp", 0)

    def position(self, axes: Iterable[str]) -> int:
        """Return this rank's index in its group over some axes, the first axis the major one."""
        return self.mesh.position(self.coordinate, tuple(axes))

    def group(self, axes: Axes, *, onward: bool = True) -> CollectiveGroup:
        """Return the group of this rank over some axes, its ranks in the order of these axes.

        Messages to earlier ranks have another group than those `onward`: NCCL runs sends and receives of one group one
        after the other, so two ranks that send to each other would deadlock.
        """
        key = axes, onward
        if key not in self._groups:
            with wait_for_ranks(f"the process group over {', '.join(axes)}"):
                self._groups[key] = self.transport.new_group(self._members(axes), self.timeout)
        return self._groups[key]

    def close(self) -> None:
        """Leave the groups, all ranks together."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def axes_of(self, group: CollectiveGroup) -> Axes:
        """Return the axes of a group. Raises `KeyError` for one that was not made here."""
        return {member_group: axes for (axes, _), member_group in self._groups.items()}[group]

    def _members(self, axes: Axes) -> list[list[int]]:
        """Return the ranks of each group over some axes."""
        if axes == MIRROR_RANKS:
            pipelines, last = self._members(("pp",)), self.mesh.size("pp") - 1
            pairs = [sorted({stage, last - stage}) for stage in range(last // 2 + 1)]  # one in the middle is alone
            return [[ranks[stage] for stage in pair] for ranks in pipelines for pair in pairs]
        other_axes = tuple(name for name in self.mesh.names if name not in axes)
        ranks_by_group: dict[int, dict[int, int]] = {}
        for rank, coordinate in enumerate(self.mesh.coordinates()):
            position = self.mesh.position(coordinate, axes)
            ranks_by_group.setdefault(self.mesh.position(coordinate, other_axes), {})[position] = rank
        return [[ranks[position] for position in sorted(ranks)] for ranks in ranks_by_group.values()]


def join_world(requested: Device, timeout: timedelta = TIMEOUT) -> tuple[torch.device, Rendezvous | None]:
    """Join the processes that torchrun started, if any: gloo on CPUs, NCCL on GPUs. Returns this rank's device, and the
    rendezvous.

    Raises `InputError` where GPUs are asked for and there are too few, and `LostRankError` where ranks do not come.
    """
    peer, rendezvous = Peer.of_this_process(visible_gpus(requested)), None
    if "RANK" in os.environ and not dist.is_initialized():
        rendezvous = join_rendezvous(peer, RENDEZVOUS_TIMEOUT)
    device = choose_device(requested, (peer,) if rendezvous is None else rendezvous.peers, peer)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_host_memory()
    if rendezvous is not None:
        try:
            with wait_for_ranks("the process group of all ranks"):
                _init_process_group(rendezvous, "nccl" if device.type == "cuda" else "gloo", timeout)
        except LostRankError as error:
            exit_as_lost(rendezvous.keys(), rendezvous.rank, str(error))
    return device, rendezvous


def _init_process_group(rendezvous: Rendezvous, backend: str, timeout: timedelta) -> None:
    store = PrefixStore("default_pg", rendezvous.store)
    dist.init_process_group(backend, store=store, rank=rendezvous.rank, world_size=rendezvous.size, timeout=timeout)


def leave_world() -> None:
    """Leave the processes of a run."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def visible_gpus(requested: Device) -> tuple[str, ...]:
    """Return the ids of the GPUs that this process sees; none where the CPU is requested."""
    if requested == "cpu" or not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count()))


def choose_device(requested: Device, peers: Sequence[Peer], local_peer: Peer) -> torch.device:
    """Return the device of `local_peer`, one of the ranks `peers`: with `auto` a GPU where every rank can have one of its
    own, else the CPU.

    On a host whose ranks all see its GPUs each has that of its local rank. Where a launcher lets each rank see GPUs of
    its own (CUDA_VISIBLE_DEVICES), each has the first that it sees. Raises `InputError` where `cuda` is asked for and
    some have none.
    """
    if requested == "cpu":
        return torch.device("cpu")
    hosts: dict[str, list[Peer]] = {}
    for peer in peers:
        hosts.setdefault(peer.host, []).append(peer)
    numbers = {host: _gpu_numbers(ranks) for host, ranks in hosts.items()}
    hosts_without_gpus = [host for host, host_numbers in numbers.items() if host_numbers is None]
    if hosts_without_gpus and requested == "cuda":
        ranks = hosts[hosts_without_gpus[0]]
        gpus = {gpu for peer in ranks for gpu in peer.gpus}
        raise InputError(
            f"--device: found {len(ranks)} ranks on {hosts_without_gpus[0]}, which see {len(gpus)} GPUs; "
            "a GPU for each rank is required, or --device cpu"
        )
    gpu_of_rank = numbers[local_peer.host]
    return (
        torch.device("cpu")
        if hosts_without_gpus or gpu_of_rank is None
        else torch.device("cuda", gpu_of_rank[local_peer.rank])
    )


def _gpu_numbers(ranks: Sequence[Peer]) -> dict[int, int] | None:
    """Return the GPU index of each rank of a host, among those that it sees; None where two would share one."""
    for numbers in ({peer.rank: peer.local_rank for peer in ranks}, {peer.rank: 0 for peer in ranks}):
        if all(numbers[peer.rank] < len(peer.gpus) for peer in ranks):
            chosen = {peer.gpus[numbers[peer.rank]] for peer in ranks}
            if len(chosen) == len(ranks):
                return numbers
    return None
