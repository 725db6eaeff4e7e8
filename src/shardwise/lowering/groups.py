"""Parameters that travel together: FSDP units, and buckets of gradients in the order in which they are ready.

A group is one flat array of its parameters. Over the axes that split it, each device has one even part of it, padded.
Differs from the derivation, which splits every weight along D: bytes are the same but for the padding.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from shardwise.lowering.parameters import Parameter, Sync
from shardwise.model.architecture import Architecture
from shardwise.sharding.mesh import Mesh

# Parameters and parts begin at a multiple of so many elements, 16 bytes in the narrowest format that weights rest in (bf16).
# Source: CUTLASS, functionality.md: operands of tensor core kernels are aligned to 128 bits.
ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter in a group: its local shape where it is used, and where it starts in the flat array."""

    parameter: Parameter
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are gathered and reduced as one flat array, which is split over `num_shards` devices; `sync` names axes of
    more than one device."""

    members: tuple[Member, ...]
    sync: Sync
    num_shards: int

    @property
    def trained(self) -> bool:
        return self.members[0].parameter.trained

    @property
    def paths(self) -> frozenset[str]:
        """The units whose weights these are."""
        return frozenset(member.parameter.path for member in self.members)

    @property
    def shard_size(self) -> int:
        """Elements of each device's part, padding included."""
        return _aligned(-(-self.members[-1].stop // self.num_shards))

    @property
    def padded_size(self) -> int:
        return self.shard_size * self.num_shards


def unit_groups(parameters: Iterable[Parameter], architecture: Architecture, mesh: Mesh) -> tuple[Group, ...]:
    """A group for each unit, and for each way of synchronising in it, in the order in which gradients are ready. What the head
    of a tied model has of its own travels with the embedding."""
    keyed: dict[Hashable, list[Parameter]] = {}
    for one in parameters:
        path = "embedding" if architecture.tied_embeddings and one.path == "head" else one.path
        keyed.setdefault((path, one.trained, _sync(one, mesh)), []).append(one)
    return tuple(_group(members, architecture, mesh) for members in reversed(keyed.values()))


def bucket_groups(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, most_elements: float
) -> tuple[Group, ...]:
    """Buckets of at most so many elements, or of one parameter, in the order in which gradients are ready: that of the last use
    comes first. Source: Li et al. 2020, PyTorch Distributed, section 3.2.3."""
    full: list[list[Parameter]] = []
    filling: dict[Hashable, list[Parameter]] = {}
    for one in reversed(parameters):
        bucket = filling.setdefault((one.trained, _sync(one, mesh)), [])
        if bucket and sum(_size(each, architecture, mesh) for each in (*bucket, one)) > most_elements:
            full.append(bucket.copy())
            bucket.clear()
        bucket.append(one)
    place = {one: number for number, one in enumerate(reversed(parameters))}
    ready = sorted([*full, *filling.values()], key=lambda bucket: place[bucket[-1]])
    return tuple(_group(bucket, architecture, mesh) for bucket in ready)


def _group(parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh) -> Group:
    members: list[Member] = []
    for one in parameters:
        start = _aligned(members[-1].stop) if members else 0
        members.append(Member(one, _shape(one, architecture, mesh), start))
    sync = _sync(parameters[0], mesh)
    return Group(tuple(members), sync, mesh.size(sync.shard))


def _sync(one: Parameter, mesh: Mesh) -> Sync:
    """Over the axes that have more than one device: what differs in others alone travels together."""
    return Sync(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in one.sync))


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNED) * ALIGNED


def _size(one: Parameter, architecture: Architecture, mesh: Mesh) -> int:
    return math.prod(_shape(one, architecture, mesh))


def _shape(one: Parameter, architecture: Architecture, mesh: Mesh) -> tuple[int, ...]:
    return one.use.local_shape(mesh, architecture.dims)
