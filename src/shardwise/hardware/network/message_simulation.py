"""A message-level simulator of collectives: what crosses each link at each step, and what each device holds.

Devices on a grid of 1 to 3 axes, each a ring or a line, hand pieces of an array to their neighbours. Schedules say who sends
what when: an AllGather passes shards along one axis after the other; with several axes each shard is cut into as many parts,
and part j begins with axis j, so that all axes work at once. A ReduceScatter is the same messages backwards. An AllToAll
sends each chunk the shortest way along one axis after the other.

`simulate_collective` carries a schedule out, checks and counts it. Nothing is assumed about the result: a message whose piece is
not there, a summand that comes twice, or a device that lacks something at the end is an error. The closed forms are held against
these counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.sharding.collectives import CollectiveKind
from shardwise.values.errors import InputError


class ShardPiece(NamedTuple):
    """A part of a shard (`home` is the device that has it when it is scattered), or of the chunk from one device to another."""

    origin: int
    home: int
    part: int


class HopMessage(NamedTuple):
    """A piece sent to a neighbour; the sender keeps a copy when it gathers, and gives it away otherwise."""

    source: int
    target: int
    piece: ShardPiece
    keep: bool

    def reversed(self) -> HopMessage:
        """The same message in a reduction: the summand goes the other way and is not kept."""
        return HopMessage(self.target, self.source, self.piece, False)


MessageSteps = tuple[tuple[HopMessage, ...], ...]


class PieceRoute(NamedTuple):
    """A part of every shard or chunk: the axes in the order that it takes, and which way it goes when both are as far."""

    axes: tuple[int, ...]
    tie_forward: bool


@dataclass(frozen=True, slots=True)
class RingGrid:
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

    def device_at(self, device: int, axis: int, to: int) -> int:
        """The device at place `to` (around the ring) on an axis, with its other coordinates as they are."""
        stride = math.prod(self.shape[axis + 1 :])
        return device + (to % self.shape[axis] - self.coordinate(device, axis)) * stride

    def neighbours(self, device: int) -> frozenset[int]:
        """Devices one link away."""
        found = set()
        for axis, (size, wraps) in enumerate(zip(self.shape, self.wraps, strict=True)):
            here = self.coordinate(device, axis)
            found |= {self.device_at(device, axis, to) for to in (here - 1, here + 1) if wraps or 0 <= to < size}
        return frozenset(found - {device})

    def hops_to_cover_axis(self, axis: int, here: int, tie_forward: bool) -> tuple[int, int]:
        """How many hops a shard at place `here` goes forward and backward, to reach all of its axis."""
        size = self.shape[axis]
        if not self.wraps[axis]:
            return size - 1 - here, here
        if self.one_way:
            return size - 1, 0
        near, far = (size - 1) // 2, size // 2
        return (far, near) if tie_forward else (near, far)

    def signed_hops(self, axis: int, here: int, to: int, tie_forward: bool) -> int:
        """Hops of a chunk from one place of an axis to another: forward if positive."""
        size = self.shape[axis]
        if not self.wraps[axis]:
            return to - here
        ahead = (to - here) % size
        if self.one_way or 2 * ahead < size or (2 * ahead == size and tie_forward):
            return ahead
        return ahead - size


def piece_routes(grid: RingGrid, split: bool) -> tuple[PieceRoute, ...]:
    """The parts of a shard: one for each axis to begin with, and with `split` one for each direction."""
    axes = tuple(range(len(grid.shape)))
    return tuple(PieceRoute(axes[j:] + axes[:j], tie) for j in axes for tie in ((True, False) if split else (True,)))


def all_gather_schedule(grid: RingGrid, split: bool) -> MessageSteps:
    """Messages of an AllGather: a phase for each axis, in which what a device has is passed along that axis."""
    steps: dict[int, list[HopMessage]] = {}
    for number, part in enumerate(piece_routes(grid, split)):
        for origin in range(grid.num_devices):
            holders, begin = [origin], 0
            for axis in part.axes:
                piece = ShardPiece(origin, origin, number)
                new = [hop for holder in holders for hop in _pass_on(grid, part, axis, holder)]
                for at, source, target in new:
                    steps.setdefault(begin + at, []).append(HopMessage(source, target, piece, True))
                holders += [target for _, _, target in new]
                begin += max(max(grid.hops_to_cover_axis(axis, x, part.tie_forward)) for x in range(grid.shape[axis]))
    return tuple(tuple(steps[at]) for at in sorted(steps))


def _pass_on(grid: RingGrid, part: PieceRoute, axis: int, holder: int) -> Iterator[tuple[int, int, int]]:
    """Step, source and target of the hops that spread a holder's piece along an axis."""
    here = grid.coordinate(holder, axis)
    for hops, sign in zip(grid.hops_to_cover_axis(axis, here, part.tie_forward), (1, -1), strict=True):
        for at in range(hops):
            yield (
                at,
                grid.device_at(holder, axis, here + sign * at),
                grid.device_at(holder, axis, here + sign * (at + 1)),
            )


class RoutedChunk(NamedTuple):
    """A chunk on its way: the devices it comes through."""

    piece: ShardPiece
    path: tuple[int, ...]


def all_to_all_schedule(grid: RingGrid, split: bool, capacity: int | None) -> MessageSteps:
    """Messages of an AllToAll: in each step every chunk moves one hop, or as many per link as `capacity` allows."""
    if capacity is not None and capacity < 1:
        raise InputError(f"simulate: found a capacity of {capacity}; at least 1 chunk in each step is required")
    waiting = [
        RoutedChunk(ShardPiece(source, target, number), _path(grid, part, source, target))
        for number, part in enumerate(piece_routes(grid, split))
        for source in range(grid.num_devices)
        for target in range(grid.num_devices)
        if source != target
    ]
    steps = []
    while waiting:
        going, waiting = _admit_chunks(waiting, capacity)
        steps.append(tuple(HopMessage(one.path[0], one.path[1], one.piece, False) for one in going))
        waiting += [RoutedChunk(one.piece, one.path[1:]) for one in going if len(one.path) > 2]
    return tuple(steps)


def _admit_chunks(waiting: Sequence[RoutedChunk], capacity: int | None) -> tuple[list[RoutedChunk], list[RoutedChunk]]:
    """The chunks that move in a step, the farthest to go first, and those that wait."""
    going: list[RoutedChunk] = []
    staying: list[RoutedChunk] = []
    load: dict[tuple[int, int], int] = {}
    for one in sorted(waiting, key=lambda chunk: (-len(chunk.path), chunk.piece)):
        link = (one.path[0], one.path[1])
        load[link] = load.get(link, 0) + 1
        (going if capacity is None or load[link] <= capacity else staying).append(one)
    return going, staying


def _path(grid: RingGrid, part: PieceRoute, source: int, target: int) -> tuple[int, ...]:
    """Devices from source to target, one axis after the other, the shortest way on each."""
    path = [source]
    for axis in part.axes:
        here = grid.coordinate(path[-1], axis)
        hops = grid.signed_hops(axis, here, grid.coordinate(target, axis), part.tie_forward)
        sign = 1 if hops > 0 else -1
        path += [grid.device_at(path[-1], axis, here + sign * (at + 1)) for at in range(abs(hops))]
    return tuple(path)


def iterate_messages(steps: MessageSteps) -> Iterator[HopMessage]:
    """All messages, step after step."""
    for step in steps:
        yield from step


DirectedLink = tuple[int, int]
HeldPieces = Mapping[ShardPiece, frozenset[int]]  # a piece and the devices whose summands are in it
DeviceStates = tuple[HeldPieces, ...]
SIMULATED_KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSimulation:
    """A collective that was carried out: its grid, the bytes of the whole array, and its messages step by step.

    `num_parts`: into how many parts each shard (each chunk of an AllToAll) is cut, so that all axes and both directions work.
    """

    kind: CollectiveKind
    grid: RingGrid
    num_bytes: float
    num_parts: int
    steps: MessageSteps

    @property
    def piece_bytes(self) -> float:
        """Bytes of one piece: a part of a shard, and of an AllToAll a part of a chunk, an Nth of a shard."""
        count = self.grid.num_devices
        return self.num_bytes / (count * self.num_parts * (count if self.kind is CollectiveKind.ALL_TO_ALL else 1))

    @property
    def num_steps(self) -> int:
        """Steps until the last message has arrived: the hops that the latency counts."""
        return len(self.steps)

    @property
    def link_bytes(self) -> Mapping[DirectedLink, float]:
        """Bytes that cross each directed link, over all steps."""
        return {link: count * self.piece_bytes for link, count in _count_by_link(iterate_messages(self.steps)).items()}

    @property
    def busiest_link_bytes(self) -> float:
        """Bytes over the link that carries the most."""
        return max(self.link_bytes.values(), default=0.0)

    @property
    def received_bytes(self) -> tuple[float, ...]:
        """Bytes that each device receives, those it only passes on included."""
        return tuple(
            sum(amount for (_, target), amount in self.link_bytes.items() if target == device)
            for device in range(self.grid.num_devices)
        )

    def time_s(self, link_bytes_per_s: float, hop_latency_s: float) -> float:
        """Seconds when every step waits for its busiest link: the sum over steps of max(latency, bytes / bandwidth)."""
        busiest = (max(_count_by_link(iter(step)).values(), default=0) * self.piece_bytes for step in self.steps)
        return sum(max(hop_latency_s, amount / link_bytes_per_s) for amount in busiest)

    def states(self) -> Iterator[DeviceStates]:
        """What each device holds: at the start, then after each step."""
        held: list[dict[ShardPiece, frozenset[int]]] = _initial_state(self.kind, self.grid.num_devices, self.num_parts)
        yield tuple(dict(one) for one in held)
        for number, step in enumerate(self.steps):
            _apply_step(step, held, self.grid, number)
            yield tuple(dict(one) for one in held)


def simulate_collective(
    kind: CollectiveKind, num_bytes: float, shape: tuple[int, ...], wraps: tuple[bool, ...] | bool = True, *,
    one_way: bool = False, split: bool | None = None, capacity: int | None = None,
) -> CollectiveSimulation:  # fmt: skip
    """Carry out a collective over all devices of a grid and check that it is complete.

    num_bytes: the whole array: what a device has after an AllGather, before a ReduceScatter or AllReduce, and of an AllToAll
        all devices' shards together.
    wraps: which axes are rings. one_way: rings are used in one direction only.
    split: whether what goes half around a ring of even size goes half each way. Otherwise it goes one way, as the books'
        AllGather of N/2 whole hops does (the default, but for AllToAll, whose N^2/8 need it).
    capacity: chunks that a link of an AllToAll takes in one step, the farthest to go first; without it every chunk moves
        in every step.
    """
    rings = (wraps,) * len(shape) if isinstance(wraps, bool) else wraps
    _check(kind, num_bytes, shape, rings)
    grid = RingGrid(shape, rings, one_way)
    halves = kind is CollectiveKind.ALL_TO_ALL if split is None else split
    steps: MessageSteps
    if kind is CollectiveKind.ALL_TO_ALL:
        steps = all_to_all_schedule(grid, halves, capacity)
    else:
        gather = all_gather_schedule(grid, halves)
        scatter = tuple(tuple(one.reversed() for one in step) for step in reversed(gather))
        steps = {
            CollectiveKind.ALL_GATHER: gather,
            CollectiveKind.REDUCE_SCATTER: scatter,
            CollectiveKind.ALL_REDUCE: scatter + gather,
        }[kind]
    done = CollectiveSimulation(
        kind=kind, grid=grid, num_bytes=num_bytes, num_parts=len(piece_routes(grid, halves)), steps=steps
    )
    _check_final_state(done)
    return done


def _check(kind: CollectiveKind, num_bytes: float, shape: tuple[int, ...], wraps: tuple[bool, ...]) -> None:
    problems = []
    if kind not in SIMULATED_KINDS:
        problems.append(f"simulate: found {kind}; one of {', '.join(SIMULATED_KINDS)} is required")
    if not 1 <= len(shape) <= 3 or min(shape) < 1:
        problems.append(f"simulate: found shape {shape}; 1 to 3 axes of at least 1 device each are required")
    if len(wraps) != len(shape):
        problems.append(f"simulate: found {len(wraps)} wraps for {len(shape)} axes; one for each axis is required")
    if not num_bytes > 0:
        problems.append(f"simulate: found {num_bytes} bytes; more than 0 are required")
    if problems:
        raise InputError(*problems)


def _count_by_link(messages: Iterator[HopMessage]) -> dict[DirectedLink, int]:
    counts: dict[DirectedLink, int] = {}
    for message in messages:
        link = (message.source, message.target)
        counts[link] = counts.get(link, 0) + 1
    return counts


def _initial_state(kind: CollectiveKind, count: int, num_parts: int) -> list[dict[ShardPiece, frozenset[int]]]:
    """Shards at home, or on every device its summand of all of them, or its row of chunks."""
    pieces = [(shard, part) for shard in range(count) for part in range(num_parts)]
    if kind is CollectiveKind.ALL_GATHER:
        return [{ShardPiece(d, d, part): frozenset((d,)) for part in range(num_parts)} for d in range(count)]
    if kind is CollectiveKind.ALL_TO_ALL:
        return [{ShardPiece(d, target, part): frozenset((d,)) for target, part in pieces} for d in range(count)]
    return [{ShardPiece(shard, shard, part): frozenset((d,)) for shard, part in pieces} for d in range(count)]


def _apply_step(
    step: tuple[HopMessage, ...], held: list[dict[ShardPiece, frozenset[int]]], grid: RingGrid, number: int
) -> None:
    """All messages of a step at once: pieces leave (unless they are copied), then arrive."""
    moving = []
    for message in step:
        assert message.target in grid.neighbours(message.source), f"step {number}: {message}: no such link"
        assert message.piece in held[message.source], f"step {number}: {message}: the piece is not there"
        moving.append((message, held[message.source][message.piece]))
    for message in step:
        if not message.keep:
            held[message.source].pop(message.piece, None)
    for message, summands in moving:
        here = held[message.target].get(message.piece, frozenset())
        assert not here & summands, f"step {number}: {message}: it is there already"
        held[message.target][message.piece] = here | summands


def _check_final_state(done: CollectiveSimulation) -> None:
    """Every device holds exactly what the collective promises."""
    *_, last = done.states()
    count = done.grid.num_devices
    everyone, parts = frozenset(range(count)), range(done.num_parts)
    for device, holding in enumerate(last):
        if done.kind is CollectiveKind.ALL_TO_ALL:
            wanted = {ShardPiece(s, device, p): frozenset((s,)) for s in range(count) for p in parts}
        elif done.kind is CollectiveKind.ALL_GATHER:
            wanted = {ShardPiece(s, s, p): frozenset((s,)) for s in range(count) for p in parts}
        else:
            shards = range(count) if done.kind is CollectiveKind.ALL_REDUCE else (device,)
            wanted = {ShardPiece(s, s, p): everyone for s in shards for p in parts}
        assert holding == wanted, f"{done.kind}: device {device} is not complete"
    assert math.isclose(sum(done.received_bytes), sum(done.link_bytes.values()))
