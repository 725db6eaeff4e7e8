"""Message-level simulator of collectives: what crosses each link at each step, and what each device holds.

Devices on a grid of 1 to 3 axes, each a ring or a line, send pieces of an array to their neighbours. A schedule says who
sends what when: an AllGather passes shards along one axis after the other; with several axes each shard is cut into as many
parts, and part j begins with axis j, so that all axes work at once. A ReduceScatter is the same messages backwards. An
AllToAll sends each chunk the shortest path along one axis after the other.

`simulate_collective` carries a schedule out, checks and counts it. Nothing is assumed about the result: a message whose piece
is missing, a summand that arrives twice, or a device that lacks something at the end is an error. Tests compare the closed
forms with these counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.hardware.network.compare_collective_algorithms import PlacedCollective
from shardwise.sharding import CollectiveKind
from shardwise.values import InputError, raise_problems


class ShardPiece(NamedTuple):
    """Part of a shard (`home` is the device that has it when it is scattered), or of the chunk from one device to another."""

    origin: int
    home: int
    part: int


class HopMessage(NamedTuple):
    """Piece sent to a neighbour; the sender keeps a copy in a gather and gives it away otherwise."""

    source: int
    target: int
    piece: ShardPiece
    keep: bool

    def reversed(self) -> HopMessage:
        """Return the message of a reduction: the summand goes the other way and is not kept."""
        return HopMessage(self.target, self.source, self.piece, False)


MessageSteps = tuple[tuple[HopMessage, ...], ...]


class PieceRoute(NamedTuple):
    """Route of a part of every shard or chunk: the order of the axes, and the direction when both are equally long."""

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
        """Return the position of a device on an axis."""
        return device // math.prod(self.shape[axis + 1 :]) % self.shape[axis]

    def device_at(self, device: int, axis: int, position: int) -> int:
        """Return the device at a position (around the ring) on an axis, with the other coordinates unchanged."""
        stride = math.prod(self.shape[axis + 1 :])
        return device + (position % self.shape[axis] - self.coordinate(device, axis)) * stride

    def neighbours(self, device: int) -> frozenset[int]:
        """Return the devices one link away."""
        devices = set()
        for axis, (size, wraps) in enumerate(zip(self.shape, self.wraps, strict=True)):
            position = self.coordinate(device, axis)
            devices |= {self.device_at(device, axis, p) for p in (position - 1, position + 1) if wraps or 0 <= p < size}
        return frozenset(devices - {device})

    def hops_to_cover_axis(self, axis: int, position: int, tie_forward: bool) -> tuple[int, int]:
        """Return the hops forward and backward with which a shard at a position reaches all of its axis."""
        size = self.shape[axis]
        if not self.wraps[axis]:
            return size - 1 - position, position
        if self.one_way:
            return size - 1, 0
        shorter, longer = (size - 1) // 2, size // 2
        return (longer, shorter) if tie_forward else (shorter, longer)

    def signed_hops(self, axis: int, position: int, target: int, tie_forward: bool) -> int:
        """Return the hops of a chunk from one position of an axis to another: forward if positive."""
        size = self.shape[axis]
        if not self.wraps[axis]:
            return target - position
        ahead = (target - position) % size
        if self.one_way or 2 * ahead < size or (2 * ahead == size and tie_forward):
            return ahead
        return ahead - size


def piece_routes(grid: RingGrid, split: bool) -> tuple[PieceRoute, ...]:
    """Return the routes of the parts of a shard: one per first axis, and with `split` one per direction."""
    axes = tuple(range(len(grid.shape)))
    return tuple(PieceRoute(axes[j:] + axes[:j], tie) for j in axes for tie in ((True, False) if split else (True,)))


def all_gather_schedule(grid: RingGrid, split: bool) -> MessageSteps:
    """Return the messages of an AllGather: a phase for each axis, in which each device passes on what it has along that axis."""
    steps: dict[int, list[HopMessage]] = {}
    for number, route in enumerate(piece_routes(grid, split)):
        for origin in range(grid.num_devices):
            holders, begin = [origin], 0
            for axis in route.axes:
                piece = ShardPiece(origin, origin, number)
                axis_hops = [axis_hop for holder in holders for axis_hop in _pass_on(grid, route, axis, holder)]
                for step, source, target in axis_hops:
                    steps.setdefault(begin + step, []).append(HopMessage(source, target, piece, True))
                holders += [target for _, _, target in axis_hops]
                begin += max(max(grid.hops_to_cover_axis(axis, x, route.tie_forward)) for x in range(grid.shape[axis]))
    return tuple(tuple(steps[step]) for step in sorted(steps))


def _pass_on(grid: RingGrid, route: PieceRoute, axis: int, holder: int) -> Iterator[tuple[int, int, int]]:
    """Yield step, source and target of the hops that spread a holder's piece along an axis."""
    position = grid.coordinate(holder, axis)
    for hops, sign in zip(grid.hops_to_cover_axis(axis, position, route.tie_forward), (1, -1), strict=True):
        for hop in range(hops):
            yield (
                hop,
                grid.device_at(holder, axis, position + sign * hop),
                grid.device_at(holder, axis, position + sign * (hop + 1)),
            )


class RoutedChunk(NamedTuple):
    """Chunk with the devices on its path."""

    piece: ShardPiece
    path: tuple[int, ...]


def all_to_all_schedule(grid: RingGrid, split: bool, capacity: int | None) -> MessageSteps:
    """Return the messages of an AllToAll: in each step every chunk moves one hop, or at most `capacity` chunks per link."""
    if capacity is not None and capacity < 1:
        raise InputError(f"simulate: found a capacity of {capacity}; at least 1 chunk in each step is required")
    waiting = [
        RoutedChunk(ShardPiece(source, target, number), _path(grid, route, source, target))
        for number, route in enumerate(piece_routes(grid, split))
        for source in range(grid.num_devices)
        for target in range(grid.num_devices)
        if source != target
    ]
    steps = []
    while waiting:
        moving, waiting = _admit_chunks(waiting, capacity)
        steps.append(tuple(HopMessage(chunk.path[0], chunk.path[1], chunk.piece, False) for chunk in moving))
        waiting += [RoutedChunk(chunk.piece, chunk.path[1:]) for chunk in moving if len(chunk.path) > 2]
    return tuple(steps)


def _admit_chunks(waiting: Sequence[RoutedChunk], capacity: int | None) -> tuple[list[RoutedChunk], list[RoutedChunk]]:
    """Return the chunks that move in a step, the farthest to go first, and those that wait."""
    moving: list[RoutedChunk] = []
    staying: list[RoutedChunk] = []
    load: Counter[DirectedLink] = Counter()
    for chunk in sorted(waiting, key=lambda chunk: (-len(chunk.path), chunk.piece)):
        link = (chunk.path[0], chunk.path[1])
        load[link] += 1
        (moving if capacity is None or load[link] <= capacity else staying).append(chunk)
    return moving, staying


def _path(grid: RingGrid, route: PieceRoute, source: int, target: int) -> tuple[int, ...]:
    """Return the devices from source to target, one axis after the other, along the shortest path on each."""
    path = [source]
    for axis in route.axes:
        position = grid.coordinate(path[-1], axis)
        hops = grid.signed_hops(axis, position, grid.coordinate(target, axis), route.tie_forward)
        sign = 1 if hops > 0 else -1
        path += [grid.device_at(path[-1], axis, position + sign * (hop + 1)) for hop in range(abs(hops))]
    return tuple(path)


def iterate_messages(steps: MessageSteps) -> Iterator[HopMessage]:
    """Yield all messages in the order of their steps."""
    for step in steps:
        yield from step


DirectedLink = tuple[int, int]
PieceSummands = Mapping[ShardPiece, frozenset[int]]  # a piece and the devices whose summands are in it
DeviceStates = tuple[PieceSummands, ...]
SIMULATED_KINDS = (
    CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSimulation:
    """Collective that was carried out: its grid, the bytes of the whole array, and its messages step by step.

    `num_parts`: parts that each shard (each chunk of an AllToAll) is cut into, so that all axes and both directions work.
    """

    kind: CollectiveKind
    grid: RingGrid
    num_bytes: float
    num_parts: int
    steps: MessageSteps

    @property
    def piece_bytes(self) -> float:
        """Bytes of one piece: a part of a shard, or for an AllToAll a part of a chunk, which is an Nth of a shard."""
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
        """Bytes that each device receives, including those that it only forwards."""
        return tuple(
            sum(amount for (_, target), amount in self.link_bytes.items() if target == device)
            for device in range(self.grid.num_devices)
        )

    def time_s(self, link_bytes_per_s: float, hop_latency_s: float) -> float:
        """Return the seconds if every step waits for its busiest link: the sum over steps of max(latency, bytes / bandwidth)."""
        busiest = (max(_count_by_link(step).values(), default=0) * self.piece_bytes for step in self.steps)
        return sum(max(hop_latency_s, amount / link_bytes_per_s) for amount in busiest)

    def states(self) -> Iterator[DeviceStates]:
        """Yield the pieces that each device holds: at the start, then after each step."""
        state: list[dict[ShardPiece, frozenset[int]]] = _initial_state(self.kind, self.grid.num_devices, self.num_parts)
        yield tuple(dict(pieces) for pieces in state)
        for number, step in enumerate(self.steps):
            _apply_step(step, state, self.grid, number)
            yield tuple(dict(pieces) for pieces in state)


def ring_grid(shape: tuple[int, ...], wraps: tuple[bool, ...] | bool = True, *, one_way: bool = False) -> RingGrid:
    """Return a grid of devices; a single `wraps` holds for all axes."""
    return RingGrid(shape, (wraps,) * len(shape) if isinstance(wraps, bool) else wraps, one_way)


def simulate_collective(
    kind: CollectiveKind, num_bytes: float, grid: RingGrid, *, split: bool | None = None, capacity: int | None = None
) -> CollectiveSimulation:
    """Carry out a collective over all devices of a grid and check that it is complete.

    num_bytes: the whole array: what a device has after an AllGather, before a ReduceScatter or AllReduce, and of an AllToAll
    all devices' shards together.
    split: whether data that goes half around a ring of even size goes half each way. Otherwise it goes one way, as the books'
    AllGather of N/2 whole hops does (the default, but for AllToAll, whose N^2/8 need it).
    capacity: chunks that a link of an AllToAll takes in one step, the farthest to go first; without it every chunk moves in
    every step.
    """
    _check(kind, num_bytes, grid)
    split_ties = kind is CollectiveKind.ALL_TO_ALL if split is None else split
    steps: MessageSteps
    if kind is CollectiveKind.ALL_TO_ALL:
        steps = all_to_all_schedule(grid, split_ties, capacity)
    else:
        gather = all_gather_schedule(grid, split_ties)
        scatter = tuple(tuple(message.reversed() for message in step) for step in reversed(gather))
        steps = {
            CollectiveKind.ALL_GATHER: gather,
            CollectiveKind.REDUCE_SCATTER: scatter,
            CollectiveKind.ALL_REDUCE: scatter + gather,
        }[kind]
    simulation = CollectiveSimulation(
        kind=kind, grid=grid, num_bytes=num_bytes, num_parts=len(piece_routes(grid, split_ties)), steps=steps
    )
    _check_final_state(simulation)
    return simulation


def simulate_placed(collective: PlacedCollective) -> CollectiveSimulation:
    """Simulate a collective of at most one pod, unsplit, on the axes that its group spans; behind switches those of one ring."""
    report, is_one_way = collective.report, collective.is_one_way
    spanned = [(report.num_devices, True)]
    if report.network == "switched":
        is_one_way = True
    else:
        spanned = [(size, wraps) for size, wraps in zip(report.axes, report.wraps, strict=True) if size > 1]
    shape, wraps = tuple(size for size, _ in spanned), tuple(wraps for _, wraps in spanned)
    grid = ring_grid(shape, wraps, one_way=is_one_way)
    return simulate_collective(CollectiveKind(report.kind), report.bytes, grid, split=False)


def _check(kind: CollectiveKind, num_bytes: float, grid: RingGrid) -> None:
    shape, wraps = grid.shape, grid.wraps
    problems = []
    if kind not in SIMULATED_KINDS:
        problems.append(f"simulate: found {kind}; one of {', '.join(SIMULATED_KINDS)} is required")
    if not 1 <= len(shape) <= 3 or min(shape) < 1:
        problems.append(f"simulate: found shape {shape}; 1 to 3 axes of at least 1 device each are required")
    if len(wraps) != len(shape):
        problems.append(f"simulate: found {len(wraps)} wraps for {len(shape)} axes; one for each axis is required")
    if not num_bytes > 0:
        problems.append(f"simulate: found {num_bytes} bytes; more than 0 are required")
    raise_problems(problems)


def _count_by_link(messages: Iterable[HopMessage]) -> Counter[DirectedLink]:
    return Counter((message.source, message.target) for message in messages)


def _initial_state(kind: CollectiveKind, count: int, num_parts: int) -> list[dict[ShardPiece, frozenset[int]]]:
    """Return the pieces of each device at the start: its shard, its summand of every shard, or its row of chunks."""
    shard_parts = [(shard, part) for shard in range(count) for part in range(num_parts)]
    if kind is CollectiveKind.ALL_GATHER:
        return [{ShardPiece(d, d, part): frozenset((d,)) for part in range(num_parts)} for d in range(count)]
    if kind is CollectiveKind.ALL_TO_ALL:
        return [{ShardPiece(d, target, part): frozenset((d,)) for target, part in shard_parts} for d in range(count)]
    return [{ShardPiece(shard, shard, part): frozenset((d,)) for shard, part in shard_parts} for d in range(count)]


def _apply_step(
    step: tuple[HopMessage, ...], state: list[dict[ShardPiece, frozenset[int]]], grid: RingGrid, number: int
) -> None:
    """Carry out all messages of a step at once: pieces leave (unless they are copied), then arrive."""
    moving = []
    for message in step:
        assert message.target in grid.neighbours(message.source), f"step {number}: {message}: no such link"
        assert message.piece in state[message.source], f"step {number}: {message}: the piece is not there"
        moving.append((message, state[message.source][message.piece]))
    for message in step:
        if not message.keep:
            state[message.source].pop(message.piece, None)
    for message, summands in moving:
        summands_there = state[message.target].get(message.piece, frozenset())
        assert not summands_there & summands, f"step {number}: {message}: it is there already"
        state[message.target][message.piece] = summands_there | summands


def _check_final_state(simulation: CollectiveSimulation) -> None:
    """Assert that every device holds exactly what the collective promises."""
    *_, final_state = simulation.states()
    num_devices = simulation.grid.num_devices
    all_devices, parts = frozenset(range(num_devices)), range(simulation.num_parts)
    for device, pieces in enumerate(final_state):
        if simulation.kind is CollectiveKind.ALL_TO_ALL:
            expected = {ShardPiece(s, device, p): frozenset((s,)) for s in range(num_devices) for p in parts}
        elif simulation.kind is CollectiveKind.ALL_GATHER:
            expected = {ShardPiece(s, s, p): frozenset((s,)) for s in range(num_devices) for p in parts}
        else:
            shards = range(num_devices) if simulation.kind is CollectiveKind.ALL_REDUCE else (device,)
            expected = {ShardPiece(s, s, p): all_devices for s in shards for p in parts}
        assert pieces == expected, f"{simulation.kind}: device {device} is not complete"
    assert math.isclose(sum(simulation.received_bytes), sum(simulation.link_bytes.values()))
