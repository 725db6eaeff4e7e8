"""The flat arrays of a model's parameters: units of FSDP, and buckets of gradients, in the order in which they are ready."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.derive.shardings import padded
from shardwise.lowering.flat import ALIGNED, aligned, openings, shard_elements
from shardwise.lowering.parameters import Parameter
from shardwise.lowering.weights import Sync, joins, kind_of
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import BORROWED
from shardwise.sharding.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter in a group: its shape in the model, its local shape where it is used, with what pads it, and where it starts in
    the flat array."""

    parameter: Parameter
    whole: tuple[int, ...]
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
    """Parameters of a unit that are gathered and reduced as one flat array, split over `num_shards` devices; `sync` names axes of
    more than one device. `shared`: the opposite rank of the pipeline has a copy, and their gradients are added up. Members and
    parts begin at a multiple of `alignment` elements (`flat.alignment_of`)."""

    members: tuple[Member, ...]
    sync: Sync
    num_shards: int
    shared: bool = False
    alignment: int = ALIGNED

    @property
    def trained(self) -> bool:
        return self.members[0].parameter.trained

    @property
    def path(self) -> str:
        """The unit whose weights these are."""
        return self.members[0].parameter.path

    @property
    def names(self) -> frozenset[str]:
        """The full names of its parameters."""
        return frozenset(member.parameter.name for member in self.members)

    @property
    def shard_size(self) -> int:
        """Elements of each device's part, padding included."""
        return int(shard_elements(self.members[-1].stop, self.num_shards, self.alignment))

    @property
    def padded_size(self) -> int:
        return self.shard_size * self.num_shards


def groups_of(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, most_elements: Callable[[Sync], float | None],
    shared: frozenset[str] = frozenset(), alignment: int = ALIGNED,
) -> tuple[Group, ...]:  # fmt: skip
    """The groups in the order in which their gradients are ready: that of the last use comes first. Each holds at most as many
    elements as `most_elements` says, or one parameter; None: all of a unit that move alike. `shared` are parameters of which
    another stage has a copy."""
    alike: dict[tuple[Hashable, Sync], list[Parameter]] = {}
    base: dict[Hashable, Sync] = {}
    for one in reversed(parameters):
        key = one.path, one.trained, kind_of(one.weight), one.name in shared
        first = base.setdefault(key, one.sync)
        sync = first if joins(one.sync, first, mesh.size) else one.sync
        alike.setdefault((key, sync), []).append(one)
    found = [
        replace(group, shared=group.names <= shared)
        for (_, sync), together in alike.items()
        for group in _filled(together, architecture, mesh, most_elements(sync), alignment)
    ]
    ready = {one: place for place, one in enumerate(_as_ready(parameters))}
    return tuple(sorted(found, key=lambda group: ready[group.members[-1].parameter]))


def _as_ready(parameters: Sequence[Parameter]) -> Sequence[Parameter]:
    """In the reverse order of their first uses: modules of multi-token prediction use the head's matrix before it does."""
    order = [*reversed(parameters)]
    first = next((place for place, one in enumerate(order) if one.path == "predict.0"), 0)
    lent = [one for one in order[:first] if one.path == "head" and one.weight in BORROWED["predict"]]
    return [*(one for one in order[:first] if one not in lent), *lent, *order[first:]]


def _filled(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, most_elements: float | None,
    alignment: int,
) -> Iterator[Group]:  # fmt: skip
    """Parameters that move alike, in as many groups as they need."""
    dims = padded(architecture.dims, mesh)
    shapes = [one.use.local_shape(mesh, dims) for one in parameters]
    members: list[Member] = []
    for one, shape, begins in zip(parameters, shapes, openings(map(math.prod, shapes), most_elements), strict=True):
        if begins and members:
            yield _group(members, mesh, alignment)
            members = []
        whole = tuple(architecture.dims[dim] for dim in one.use.dims)
        members.append(Member(one, whole, shape, int(aligned(members[-1].stop, alignment)) if members else 0))
    yield _group(members, mesh, alignment)


def _group(members: Iterable[Member], mesh: Mesh, alignment: int) -> Group:
    found = tuple(members)
    sync = Sync(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in found[0].parameter.sync))
    return Group(found, sync, mesh.size(sync.shard), alignment=alignment)
