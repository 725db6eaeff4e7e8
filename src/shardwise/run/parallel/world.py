"""The ranks of a run on its mesh, the process groups of its axes, and the device that each rank trains on."""

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
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import MIRROR_RANKS
from shardwise.values.errors import InputError

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # between the starts of the first and the last rank


class World:
    """This rank among those of a mesh; groups are made when they are first asked for, by all ranks alike.

    `transport` is how it reaches the others, by default the one of this process or thread. No collective waits longer than
    `timeout`. Raises `InputError` where there are more or fewer ranks than the mesh has devices.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device | str = "cpu", *, transport: Transport | None = None,
        meeting: Rendezvous | None = None, timeout: timedelta = TIMEOUT,
    ) -> None:  # fmt: skip
        self.mesh, self.device, self.meeting, self.timeout = mesh, torch.device(device), meeting, timeout
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
        """This rank's place in its pipeline."""
        return self.coordinate.get("pp", 0)

    def position(self, axes: Iterable[str]) -> int:
        """This rank's place in its group over some axes, the first axis the major one."""
        return self.mesh.position(self.coordinate, tuple(axes))

    def group(self, axes: Axes, *, onward: bool = True) -> CollectiveGroup:
        """The group of this rank over some axes, its ranks in the order of these axes.

        Messages to ranks that come before have another one than those `onward`: NCCL runs what is sent and what is received
        within a group one after the other, and two ranks that send to one another would wait for ever.
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
        """The axes that a group is over. Raises `KeyError` for one that was not made here."""
        return {made: axes for (axes, _), made in self._groups.items()}[group]

    def _members(self, axes: Axes) -> list[list[int]]:
        """Ranks of each group over some axes."""
        if axes == MIRROR_RANKS:
            pipelines, last = self._members(("pp",)), self.mesh.size("pp") - 1
            pairs = [sorted({place, last - place}) for place in range(last // 2 + 1)]  # one in the middle is alone
            return [[ranks[place] for place in pair] for ranks in pipelines for pair in pairs]
        others = tuple(name for name in self.mesh.names if name not in axes)
        found: dict[int, dict[int, int]] = {}
        for rank, coordinate in enumerate(self.mesh.coordinates()):
            place = self.mesh.position(coordinate, axes)
            found.setdefault(self.mesh.position(coordinate, others), {})[place] = rank
        return [[places[place] for place in sorted(places)] for places in found.values()]


def join_world(asked: Device, timeout: timedelta = TIMEOUT) -> tuple[torch.device, Rendezvous | None]:
    """Join the processes that torchrun started, if it did: gloo on CPUs, NCCL on GPUs. This one's device, and the meeting.

    Raises `InputError` where GPUs are asked for and there are too few, and `LostRankError` where ranks do not come.
    """
    here, meeting = Peer.of_this_process(visible_gpus(asked)), None
    if "RANK" in os.environ and not dist.is_initialized():
        meeting = join_rendezvous(here, RENDEZVOUS_TIMEOUT)
    device = choose_device(asked, (here,) if meeting is None else meeting.peers, here)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_host_memory()
    if meeting is not None:
        try:
            with wait_for_ranks("the process group of all ranks"):
                _init_process_group(meeting, "nccl" if device.type == "cuda" else "gloo", timeout)
        except LostRankError as error:
            exit_as_lost(meeting.keys(), meeting.rank, str(error))
    return device, meeting


def _init_process_group(meeting: Rendezvous, backend: str, timeout: timedelta) -> None:
    store = PrefixStore("default_pg", meeting.store)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.size, timeout=timeout)


def leave_world() -> None:
    """Leave the processes of a run."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def visible_gpus(asked: Device) -> tuple[str, ...]:
    """The ids of the GPUs that this process sees, none where they are not wanted."""
    if asked == "cpu" or not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count()))


def choose_device(asked: Device, peers: Sequence[Peer], here: Peer) -> torch.device:
    """The device of `here`, one of the ranks `peers`: with `auto` a GPU where every rank can have one of its own, else the CPU.

    On a host whose ranks all see its GPUs each has that of its local rank. Where a launcher lets each rank see GPUs of its own
    (CUDA_VISIBLE_DEVICES), each has the first that it sees. Raises `InputError` where `cuda` is asked for and some have none.
    """
    if asked == "cpu":
        return torch.device("cpu")
    hosts: dict[str, list[Peer]] = {}
    for peer in peers:
        hosts.setdefault(peer.host, []).append(peer)
    numbers = {host: _gpu_numbers(ranks) for host, ranks in hosts.items()}
    lacking = [host for host, found in numbers.items() if found is None]
    if lacking and asked == "cuda":
        ranks = hosts[lacking[0]]
        seen = {gpu for peer in ranks for gpu in peer.gpus}
        raise InputError(
            f"--device: found {len(ranks)} ranks on {lacking[0]}, which see {len(seen)} GPUs; a GPU for each rank is required, "
            "or --device cpu"
        )
    found = numbers[here.host]
    return torch.device("cpu") if lacking or found is None else torch.device("cuda", found[here.rank])


def _gpu_numbers(ranks: Sequence[Peer]) -> dict[int, int] | None:
    """Of each rank of a host the number of its GPU among those that it sees; None where two would share one."""
    for numbers in ({peer.rank: peer.local_rank for peer in ranks}, {peer.rank: 0 for peer in ranks}):
        if all(numbers[peer.rank] < len(peer.gpus) for peer in ranks):
            chosen = {peer.gpus[numbers[peer.rank]] for peer in ranks}
            if len(chosen) == len(ranks):
                return numbers
    return None
