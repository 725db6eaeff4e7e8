"""Who sends what to which neighbour at which step, for collectives on a grid of rings and lines.

An AllGather passes shards along one axis after the other; with several axes each shard is cut into as many parts, and
part j begins with axis j, so that all axes work at once. A ReduceScatter is the same messages backwards. An AllToAll sends
each chunk the shortest way along one axis after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.errors import InputError


class Piece(NamedTuple):
    """A part of a shard (`home` is the device that has it when it is scattered), or of the chunk from one device to another."""

    origin: int
    home: int
    part: int


class Message(NamedTuple):
    """A piece sent to a neighbour; the sender keeps a copy when it gathers, and gives it away otherwise."""

    source: int
    target: int
    piece: Piece
    keep: bool

    def reversed(self) -> Message:
        """The same message in a reduction: the summand goes the other way and is not kept."""
        return Message(self.target, self.source, self.piece, False)


Steps = tuple[tuple[Message, ...], ...]


class Part(NamedTuple):
    """A part of every shard or chunk: the axes in the order that it takes, and which way it goes when both are as far."""

    axes: tuple[int, ...]
    tie_forward: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """Devices in row-major order on axes that are rings (`wraps`) or lines; `one_way` rings only go forward."""

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    one_way: bool = False

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def coordinate(self, device: int, axis: int) -> int:
        """Place of a device on an axis."""
        return device // math.prod(self.shape[axis + 1 :]) % self.shape[axis]

    def moved(self, device: int, axis: int, to: int) -> int:
        """The device at place `to` (around the ring) on an axis, with its other coordinates as they are."""
        stride = math.prod(self.shape[axis + 1 :])
        return device + (to % self.shape[axis] - self.coordinate(device, axis)) * stride

    def neighbours(self, device: int) -> frozenset[int]:
        """Devices one link away."""
        found = set()
        for axis, (size, wraps) in enumerate(zip(self.shape, self.wraps, strict=True)):
            here = self.coordinate(device, axis)
            found |= {self.moved(device, axis, to) for to in (here - 1, here + 1) if wraps or 0 <= to < size}
        return frozenset(found - {device})

    def reach(self, axis: int, here: int, tie_forward: bool) -> tuple[int, int]:
        """How many hops a shard at place `here` goes forward and backward, to reach all of its axis."""
        size = self.shape[axis]
        if not self.wraps[axis]:
            return size - 1 - here, here
        if self.one_way:
            return size - 1, 0
        near, far = (size - 1) // 2, size // 2
        return (far, near) if tie_forward else (near, far)

    def way(self, axis: int, here: int, to: int, tie_forward: bool) -> int:
        """Hops of a chunk from one place of an axis to another: forward if positive."""
        size = self.shape[axis]
        if not self.wraps[axis]:
            return to - here
        ahead = (to - here) % size
        if self.one_way or 2 * ahead < size or (2 * ahead == size and tie_forward):
            return ahead
        return ahead - size


def parts_of(grid: Grid, split: bool) -> tuple[Part, ...]:
    """The parts of a shard: one for each axis to begin with, and with `split` one for each direction."""
    axes = tuple(range(len(grid.shape)))
    return tuple(Part(axes[j:] + axes[:j], tie) for j in axes for tie in ((True, False) if split else (True,)))


def gather_steps(grid: Grid, split: bool) -> Steps:
    """Messages of an AllGather: a phase for each axis, in which what a device has is passed along that axis."""
    steps: dict[int, list[Message]] = {}
    for number, part in enumerate(parts_of(grid, split)):
        for origin in range(grid.num_devices):
            holders, begin = [origin], 0
            for axis in part.axes:
                piece = Piece(origin, origin, number)
                new = [hop for holder in holders for hop in _pass_on(grid, part, axis, holder)]
                for at, source, target in new:
                    steps.setdefault(begin + at, []).append(Message(source, target, piece, True))
                holders += [target for _, _, target in new]
                begin += max(max(grid.reach(axis, x, part.tie_forward)) for x in range(grid.shape[axis]))
    return tuple(tuple(steps[at]) for at in sorted(steps))


def _pass_on(grid: Grid, part: Part, axis: int, holder: int) -> Iterator[tuple[int, int, int]]:
    """Step, source and target of the hops that spread a holder's piece along an axis."""
    here = grid.coordinate(holder, axis)
    for hops, sign in zip(grid.reach(axis, here, part.tie_forward), (1, -1), strict=True):
        for at in range(hops):
            yield (
                at,
                grid.moved(holder, axis, here + sign * at),
                grid.moved(holder, axis, here + sign * (at + 1)),
            )


class Chunk(NamedTuple):
    """A chunk on its way: the devices it comes through."""

    piece: Piece
    path: tuple[int, ...]


def transpose_steps(grid: Grid, split: bool, capacity: int | None) -> Steps:
    """Messages of an AllToAll: in each step every chunk moves one hop, or as many per link as `capacity` allows."""
    if capacity is not None and capacity < 1:
        raise InputError(f"simulate: found a capacity of {capacity}; at least 1 chunk in each step is required")
    waiting = [
        Chunk(Piece(source, target, number), _path(grid, part, source, target))
        for number, part in enumerate(parts_of(grid, split))
        for source in range(grid.num_devices)
        for target in range(grid.num_devices)
        if source != target
    ]
    steps = []
    while waiting:
        going, waiting = _admit(waiting, capacity)
        steps.append(tuple(Message(one.path[0], one.path[1], one.piece, False) for one in going))
        waiting += [Chunk(one.piece, one.path[1:]) for one in going if len(one.path) > 2]
    return tuple(steps)


def _admit(waiting: Sequence[Chunk], capacity: int | None) -> tuple[list[Chunk], list[Chunk]]:
    """The chunks that move in a step, the farthest to go first, and those that wait."""
    going: list[Chunk] = []
    staying: list[Chunk] = []
    load: dict[tuple[int, int], int] = {}
    for one in sorted(waiting, key=lambda chunk: (-len(chunk.path), chunk.piece)):
        link = (one.path[0], one.path[1])
        load[link] = load.get(link, 0) + 1
        (going if capacity is None or load[link] <= capacity else staying).append(one)
    return going, staying


def _path(grid: Grid, part: Part, source: int, target: int) -> tuple[int, ...]:
    """Devices from source to target, one axis after the other, the shortest way on each."""
    path = [source]
    for axis in part.axes:
        here = grid.coordinate(path[-1], axis)
        hops = grid.way(axis, here, grid.coordinate(target, axis), part.tie_forward)
        sign = 1 if hops > 0 else -1
        path += [grid.moved(path[-1], axis, here + sign * (at + 1)) for at in range(abs(hops))]
    return tuple(path)


def in_turn(steps: Steps) -> Iterator[Message]:
    """All messages, step after step."""
    for step in steps:
        yield from step
