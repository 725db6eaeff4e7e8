"""Torus: a grid of chips with a direct link to each neighbour, twisted or not, and the closed forms of collectives on it.

A collective takes `max(latency, bytes * seconds_per_byte)`: every hop takes at least the hop latency (S2). The link of an
AllGather is `Torus.gather_link`. `num_bytes` is always the whole array: what a device has after an AllGather or before a
reduction, and of an AllToAll all devices' shards together.

On a twisted torus going around a short axis also shifts the long ones by half of their length. Legal are k x k x 2k and k x
2k x 2k, in any order of the axes, with k a multiple of 4: the wraparound links are optical and lie between cubes of 4x4x4.
The bisection and the average distance improve; the short axes lose their rings.
Source: Jouppi et al., TPU v4 (ISCA 2023), section on twisted tori; Camara et al., Twisted Torus Topologies for Enhanced
Interconnection Networks (2010); Google Cloud documentation, TPU v4 and v5p, which print 4x4x8_twisted for the slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwise.hardware.network.links import CollectiveCost, CollectiveName, Cut, Link, cost_over_link, nccl_factors
from shardwise.values import Value, lookup, maximum, where

WrapRule = Literal["multiple_of_4", "only_16", "always", "never"]
# True if an axis of this size wraps on a slice of this shape.
WRAP_RULES: Mapping[str, Callable[[tuple[int, ...], int], bool]] = {
    "multiple_of_4": lambda shape, size: all(axis_size % 4 == 0 for axis_size in shape),
    "only_16": lambda shape, size: size == 16,
    "always": lambda shape, size: True,
    "never": lambda shape, size: False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """A grid of chips with a link to each neighbour, per axis and per direction.

    `bytes_per_s` is one link in one direction. An axis wraps by the vendor's rule: v4 and v5p slices wrap on all axes
    when every axis is a multiple of 4; v5e and v6e axes wrap only at 16. Source: S0, section 2. "always" and "never" are
    for asking what wraparound is worth. `twisted`: going around a short axis also shifts the long
    ones, so that an AllToAll over the whole slice loads all links alike; the short axes have no rings of their own.
    """

    shape: tuple[int, ...]
    bytes_per_s: float
    hop_latency_s: float
    wrap_rule: WrapRule
    twisted: bool = False

    @property
    def levels(self) -> tuple[int, ...]:
        return self.shape

    @property
    def wraps(self) -> tuple[bool, ...]:
        """True for each axis that is a ring."""
        wraps = lookup(WRAP_RULES, self.wrap_rule, "wrap_rule")
        return tuple(wraps(self.shape, size) for size in self.shape)

    def ring_axes(self, cuts: Sequence[Cut]) -> tuple[Value, ...]:
        """Return for each axis whether a group goes all around it: it spans the whole of an axis that wraps.

        A short axis of a twisted torus is a ring only together with the whole of the axes that it shifts.
        """
        rings: list[Value] = []
        for axis, (size, wraps, cut) in enumerate(zip(self.shape, self.wraps, cuts, strict=True)):
            ring = (cut.size * cut.stride == size) & wraps
            for shifted in axes_shifted_by(self.shape, axis) if self.twisted else ():
                ring = ring & (cuts[shifted].size == self.shape[shifted])
            rings.append(ring)
        return tuple(rings)

    def twisted_subgroups(self, cuts: Sequence[Cut]) -> Iterator[tuple[Value, HopDistances]]:
        """Yield for each twisted torus within this one: whether the group is exactly that torus, and its hop distances."""
        for group in twisted_subtori(self.shape) if self.twisted else ():
            is_group: Value = True
            for axis, (size, cut) in enumerate(zip(self.shape, cuts, strict=True)):
                is_group = is_group & (cut.size == (size if axis in group else 1))
            yield is_group, hop_distances(tuple(self.shape[axis] for axis in group))

    def gather_link(self, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
        """Return the AllGather link of a group that spans `cuts[i]` of axis i.

        A group all around a wrapped axis is a ring: both directions, half the hops, unless it goes `one_way`. Neighbours on a
        part of an axis are a line: one way, N-1 hops. Devices `stride` apart share their links with the groups between them.
        Several axes gather at once, each its share of the array, so rates add (S0: "M axes give M times the bandwidth"), up
        to the rate at which the device with the fewest links (the corner, if axes are lines) takes in the (N-1)/N of the
        array that it lacks.
        """
        rate: Value = 0.0
        intake: Value = 0.0
        hops: Value = 0
        num_devices: Value = 1
        for ring, cut in zip(self.ring_axes(cuts), cuts, strict=True):
            steps = where(ring, cut.size - 1 if one_way else cut.size // 2, cut.size - 1)
            seconds = steps * cut.stride / (cut.size * self.bytes_per_s)
            # Rates of axes add; 1e-30 and `where` avoid a division by 0 without a branch, as sizes may be arrays.
            rate = rate + where(cut.size > 1, 1.0 / maximum(seconds, 1e-30), 0.0)
            num_links = where(ring & (cut.size > 2), 1 if one_way else 2, 1)
            intake = intake + where(cut.size > 1, num_links * self.bytes_per_s / cut.stride, 0.0)
            hops = hops + steps * cut.stride
            num_devices = num_devices * cut.size
        for is_twisted, distances in () if one_way else self.twisted_subgroups(cuts):
            hops = where(is_twisted, distances.diameter, hops)
        gathered = where(rate > 0, 1.0 / maximum(rate, 1e-30), 0.0)
        taken_in = (1.0 - 1.0 / num_devices) / maximum(intake, 1e-30)
        return Link(maximum(gathered, taken_in), hops * self.hop_latency_s, additive=False)

    def neighbour_link(self, cuts: Sequence[Cut]) -> Link:
        """Return the link of a send to the next device of a group: one physical link, shared by the groups between them."""
        stride: Value = 0
        for cut in cuts:
            stride = maximum(stride, where(cut.size > 1, cut.stride, 0))
        return Link(stride / self.bytes_per_s, stride * self.hop_latency_s, additive=False)

    def permute_link(self, cuts: Sequence[Cut]) -> Link:
        """Return the link of a permute in which each device sends to one device anywhere in the group.

        On an axis of n the busiest link carries, for an even mix of distances, n/8 devices' bytes on a ring and n/4 on a
        line, and at least one device's; on a twisted torus half of the average hops along an axis.
        """
        busiest_load: Value = 0.0
        hops: Value = 0
        for ring, cut in zip(self.ring_axes(cuts), cuts, strict=True):
            axis_load = maximum(1.0, cut.size / where(ring, 8.0, 4.0)) * cut.stride
            busiest_load = maximum(busiest_load, where(cut.size > 1, axis_load, 0.0))
            hops = hops + where(ring, cut.size // 2, cut.size - 1) * cut.stride
        for is_twisted, distances in self.twisted_subgroups(cuts):
            busiest_load = where(is_twisted, max(1.0, max(distances.mean_hops) / 2), busiest_load)
            hops = where(is_twisted, distances.diameter, hops)
        return Link(busiest_load / self.bytes_per_s, hops * self.hop_latency_s, additive=False)

    def axis_bytes_per_s(self) -> float:
        """Return the bandwidth of one wrapped axis, both directions: the books' W."""
        return 2 * self.bytes_per_s

    def neighbour_bytes_per_s(self) -> float:
        """Return the bandwidth of one wrapped axis: every neighbour is one link away."""
        return self.axis_bytes_per_s()


CUBE = 4
TWISTABLE_SHAPES = "KxKx2K or Kx2Kx2K in any order, with K a multiple of 4, such as 4x4x8 or 4x8x8,"


def is_twistable(shape: tuple[int, ...]) -> bool:
    """Return True if a slice of this shape may be twisted."""
    return len(shape) == 3 and min(shape) % CUBE == 0 and set(shape) == {min(shape), 2 * min(shape)}


def axes_shifted_by(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return the axes that going around `axis` shifts: all long ones around a short axis, none around a long one."""
    short = min(shape)
    return tuple(i for i, size in enumerate(shape) if size == 2 * short) if shape[axis] == short else ()


def twisted_subtori(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of whole axes that hold a short one and every axis that it shifts: twisted tori of their own."""
    axes = range(len(shape))
    for count in range(2, len(shape) + 1):
        for group in itertools.combinations(axes, count):
            shifts = [set(axes_shifted_by(shape, axis)) for axis in group]
            if any(shifts) and all(shift <= set(group) for shift in shifts):
                yield group


@dataclass(frozen=True, slots=True)
class HopDistances:
    """Distances from one device to all N, itself included: average hops along each axis, and hops to the farthest."""

    mean_hops: tuple[float, ...]
    diameter: int

    @property
    def mean(self) -> float:
        return sum(self.mean_hops)


@lru_cache(maxsize=64)
def hop_distances(shape: tuple[int, ...]) -> HopDistances:
    """Return the distances on the twisted torus of a shape (k x 2k, k x k x 2k, k x 2k x 2k in any order), by shortest paths.

    All devices are equivalent. A path goes around each short axis some number of times and then the shorter way along each
    long axis; each of the shortest vectors carries an equal part, which loads all axes alike.
    """
    short = min(shape)
    shorts = [axis for axis, size in enumerate(shape) if size == short]
    total, farthest = [0.0] * len(shape), 0
    for target in itertools.product(*map(range, shape)):
        paths = [
            _path_hops(shape, target, dict(zip(shorts, turns, strict=True)))
            # Two turns shift a long axis by its whole length, so these have both shifts in both directions.
            for turns in itertools.product((-2, -1, 0, 1), repeat=len(shorts))
        ]
        fewest = min(sum(hops) for hops, _ in paths)
        shortest = [(hops, count) for hops, count in paths if sum(hops) == fewest]
        farthest = max(farthest, fewest)
        num_shortest = sum(count for _, count in shortest)
        for axis in range(len(shape)):
            total[axis] += sum(hops[axis] * count for hops, count in shortest) / num_shortest
    return HopDistances(tuple(hops / math.prod(shape) for hops in total), farthest)


def _path_hops(shape: tuple[int, ...], target: tuple[int, ...], turns: dict[int, int]) -> tuple[tuple[int, ...], int]:
    """Return the hops along each axis to a target with so many turns around each short axis, and the number of such vectors:
    two for each long axis on which both directions are equally long."""
    shift = min(shape) * sum(turns.values())
    hops, count = [], 1
    for axis, size in enumerate(shape):
        if axis in turns:
            hops.append(abs(target[axis] + turns[axis] * size))
        else:
            ahead = (target[axis] - shift) % size
            hops.append(min(ahead, size - ahead))
            count *= 2 if 2 * ahead == size else 1
    return tuple(hops), count


def torus_collective_cost(
    operation: CollectiveName, num_bytes: float, torus: Torus, cuts: Sequence[Cut], *, one_way: bool = False
) -> CollectiveCost:
    """Return latency and streaming time of a collective over the group of devices that `cuts` spans.

    AllGather, ReduceScatter: `Torus.gather_link`. AllReduce: one after the other, twice that. AllToAll: `all_to_all_link`.
    Broadcast: `broadcast_link`. Send and receive: one neighbour to the next, `Torus.neighbour_link`.
    Differs: S2 and S3 print V/W for a ring, which N/2 hops of whole shards take; a schedule that sends the last shard half
    each way takes (N-1)/N of it (S2's summary, for one direction). `Torus.gather_link` is V/W for rings of even size.
    """
    link = lookup(_LINKS, operation, "collective")(torus, cuts, one_way=one_way)
    return cost_over_link(link, num_bytes, nccl_factors(operation).passes, torus.hop_latency_s)


def all_to_all_link(torus: Torus, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
    """Return the link of an AllToAll, per byte of the whole array V that the group of N devices shares.

    Each chunk goes the shortest path along each axis, parts of it along the axes in turn, so the busiest axis sets the pace.
    On an axis of n, in chunks of V/(N n) bytes, a directed link carries floor(n^2/4)/2 on a ring, floor(n^2/4) on a line (its
    middle link), n(n-1)/2 one way around. For one axis: V/(4W) with W both directions of a ring, V/(2W) on a line. On a
    twisted torus a link carries half of the average hops along its axis, times V/N, by the shortest paths on the graph (one
    way around is priced without the twist).
    Assumes: even traffic, links that never wait while chunks do; chunks that go half around go half each way.
    Source: S2, question 10 (one way: V/2 (1-1/N)) and "AllToAll", V max(A, B, C) / (4 N W).
    Differs: S3, appendix C counts N^2/4 chunks sent by a device, 10 right and 6 left for N = 8 (`all_to_all_chunks`).
    """
    num_devices: Value = 1
    for cut in cuts:
        num_devices = num_devices * cut.size
    busiest_load: Value = 0.0
    for ring, cut in zip(torus.ring_axes(cuts), cuts, strict=True):
        n = cut.size
        ring_chunks = n * (n - 1) / 2 if one_way else n * n // 4 * where(n > 2, 0.5, 1.0)
        chunks = where(ring, ring_chunks, n * n // 4)
        busiest_load = maximum(busiest_load, chunks * cut.stride / (num_devices * n))
    for is_twisted, distances in () if one_way else torus.twisted_subgroups(cuts):
        busiest_load = where(is_twisted, max(distances.mean_hops) / (2 * num_devices), busiest_load)
    return Link(busiest_load / torus.bytes_per_s, torus.gather_link(cuts, one_way=one_way).latency_s, additive=False)


def broadcast_link(torus: Torus, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
    """Return the link of a broadcast from one device, per byte of the array.

    Every link of the root carries its own part of the array (two on a ring, one on a line, whose far end receives all of it
    through one link), pipelined, so V / (links * bandwidth); a small array takes the hops to the farthest device.
    Assumes: as many trees without a common link as the root has links. Source: the intake of a device in `Torus.gather_link`,
    all V.
    """
    rates = [
        (2 if ring and not one_way and cut.size > 2 else 1) * torus.bytes_per_s / cut.stride
        for ring, cut in zip(torus.ring_axes(cuts), cuts, strict=True)
        if cut.size > 1
    ]
    return Link(1.0 / sum(rates) if rates else 0.0, torus.gather_link(cuts, one_way=one_way).latency_s, additive=False)


_LINKS: Mapping[str, Callable[..., Link]] = {
    "all_gather": Torus.gather_link,
    "reduce_scatter": Torus.gather_link,
    "all_reduce": Torus.gather_link,
    "all_to_all": all_to_all_link,
    "broadcast": broadcast_link,
    "send_recv": lambda torus, cuts, one_way: torus.neighbour_link(cuts),
}
