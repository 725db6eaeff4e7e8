"""The processes of a run: their ranks on the mesh, and the process groups of its axes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.errors import InputError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes
from shardwise.train.device_memory import keep_host_memory

TIMEOUT = timedelta(minutes=10)


class World:
    """This process among those of a mesh; process groups are made when they are first asked for, by all processes alike.

    Raises `InputError` where there are more or fewer processes than the mesh has devices.
    """

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.mesh, self.device = mesh, torch.device(device)
        started = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        if self.size != mesh.num_devices:
            raise InputError(
                f"train: found {self.size} processes; the plan requires {mesh.num_devices}, one for each of its devices"
            )
        self.coordinate = list(mesh.coordinates())[self.rank]
        self._groups: dict[Axes, dist.ProcessGroup] = {}

    def position(self, axes: Iterable[str]) -> int:
        """This process's place in its group over some axes, the first axis the major one."""
        return self.mesh.position(self.coordinate, tuple(axes))

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """The process group of this process over some axes, its ranks in the order of these axes."""
        if axes not in self._groups:
            members = self._members(axes)
            for ranks in members:  # every process makes all of them, in one order
                made = dist.new_group(ranks, timeout=TIMEOUT, sort_ranks=False)
                if self.rank in ranks:
                    self._groups[axes] = made
        return self._groups[axes]

    def axes_of(self, group: dist.ProcessGroup) -> Axes:
        """The axes that a process group is over. Raises `KeyError` for one that was not made here."""
        return {made: axes for axes, made in self._groups.items()}[group]

    def _members(self, axes: Axes) -> list[list[int]]:
        """Ranks of each group over some axes."""
        others = tuple(name for name in self.mesh.names if name not in axes)
        found: dict[int, dict[int, int]] = {}
        for rank, coordinate in enumerate(self.mesh.coordinates()):
            place = self.mesh.position(coordinate, axes)
            found.setdefault(self.mesh.position(coordinate, others), {})[place] = rank
        return [[places[place] for place in sorted(places)] for places in found.values()]


def start(device: str) -> torch.device:
    """Join the processes that torchrun started, if it did, and return this one's device: gloo on CPUs, NCCL on GPUs."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    else:
        keep_host_memory()
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    return place


def stop() -> None:
    """Leave the processes of a run."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
