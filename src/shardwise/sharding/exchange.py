"""Who sends what to whom in a permute: each device sends one part of its shard to one device.

A permute leads to any sharding that splits every dim at least as finely as before (its degree a multiple): then each device
needs a part of one old shard, and as many devices need parts of a shard as hold it, so that sources and destinations can
be paired one to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ShardingError
from shardwise.sharding.collective import Collective
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec

Block = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """What a device sends: to which device, and which of the `ratios` parts of its shard along each dim."""

    destination: int
    part: Block


def part_ratios(collective: Collective, mesh: Mesh) -> Block:
    """In how many parts a permute cuts a shard along each dim (1: it hands over whole shards)."""
    pairs = zip(collective.before.axes, collective.after.axes, strict=True)
    ratios = [divmod(mesh.size(new), mesh.size(old)) for old, new in pairs]
    if any(rest for _, rest in ratios):
        raise ShardingError(f"{collective}: not a permute, which splits every dim at least as finely as before")
    return tuple(ratio for ratio, _ in ratios)


def sends(collective: Collective, mesh: Mesh) -> tuple[Send, ...]:
    """What each device of the mesh sends, by device number. A device that has what it needs sends to itself."""
    ratios = part_ratios(collective, mesh)
    places = list(mesh.coordinates())
    found: dict[int, Send] = {}
    holders: dict[tuple[Block, Block], list[int]] = {}
    for device, place in enumerate(places):
        block = _block(collective.before, mesh, place)
        holders.setdefault((_fixed(collective, mesh, place), block), []).append(device)
    waiting = []
    for device, place in enumerate(places):
        need = _block(collective.after, mesh, place)
        block = tuple(n // r for n, r in zip(need, ratios, strict=True))
        part = tuple(n % r for n, r in zip(need, ratios, strict=True))
        key = _fixed(collective, mesh, place), block
        if device in holders.get(key, ()):
            holders[key].remove(device)
            found[device] = Send(device, part)
        else:
            waiting.append((key, device, part))
    for key, device, part in waiting:
        if not holders.get(key):
            raise ShardingError(f"{collective}: not a permute; no device is left that can serve device {device}")
        found[holders[key].pop(0)] = Send(device, part)
    return tuple(found[device] for device in range(len(places)))


def _block(spec: Spec, mesh: Mesh, place: Mapping[str, int]) -> Block:
    """Which block of the array a device holds: its position along each dim."""
    return tuple(mesh.position(place, axes) for axes in spec.axes)


def _fixed(collective: Collective, mesh: Mesh, place: Mapping[str, int]) -> Block:
    """Where a device is along the axes that the permute does not cross."""
    return tuple(place[axis] for axis in mesh.names if axis not in collective.axes)
