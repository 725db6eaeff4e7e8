"""Closed forms of collectives on a torus of direct links.

A collective takes `max(latency, bytes * seconds_per_byte)`: every hop takes at least the hop latency (S2). What a group of
devices gets for an AllGather is `Torus.link`; the rest is here. `num_bytes` is always the whole array: what a device has after
an AllGather or before a reduction, and of an AllToAll all devices' shards together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import InputError, chosen
from shardwise.network.nccl import Operation, form_of
from shardwise.network.topology import Cut, Link, Torus
from shardwise.symbolic import Value, maximum, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of latency and of streaming, and the hops that the latency counts."""

    latency_s: float
    bandwidth_s: float
    hops: int


def torus_cost(
    operation: Operation, num_bytes: float, torus: Torus, cuts: Sequence[Cut], *, one_way: bool = False
) -> Cost:
    """Latency and streaming time of a collective over the group of devices that `cuts` spans.

    AllGather, ReduceScatter: `Torus.link`. AllReduce: one after the other, twice that. AllToAll: `all_to_all_link`.
    Broadcast: `broadcast_link`. Send and receive: one neighbour to the next, `Torus.hop`.
    Differs: S2 and S3 print V/W for a ring, which N/2 hops of whole shards take; a schedule that sends the last shard half
    each way takes (N-1)/N of it (S2's summary, for one direction). `Torus.link` is V/W for rings of even size.
    """
    link, times = chosen(_LINKS, operation, "collective")(torus, cuts, one_way), form_of(operation).times
    return Cost(
        latency_s=times * link.latency_s,
        bandwidth_s=times * num_bytes * link.seconds_per_byte,
        hops=times * round(link.latency_s / torus.hop_latency_s) if torus.hop_latency_s else 0,
    )


def all_to_all_link(torus: Torus, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
    """What an AllToAll gets, per byte of the whole array V that the group of N devices shares.

    Each chunk goes the shortest way along each axis, parts of it along the axes in turn, so the busiest axis sets the pace. On
    an axis of n, in chunks of V/(N n) bytes, a directed link carries floor(n^2/4)/2 on a ring, floor(n^2/4) on a line (its
    middle link), n(n-1)/2 one way around. For one axis: V/(4W) with W both directions of a ring, V/(2W) on a line.
    On a twisted torus a link carries half of the average hops along its axis, times V/N, by the shortest ways on the graph
    (one way around is priced without the twist).
    Assumes: even traffic, links that never wait while chunks do; what goes half around goes half each way.
    Source: S2, question 10 (one way: V/2 (1-1/N)) and "AllToAll", V max(A, B, C) / (4 N W).
    Differs: S3, appendix C counts N^2/4 chunks sent by a device, 10 right and 6 left for N = 8 (`all_to_all_chunks`).
    """
    num_devices: Value = 1
    for cut in cuts:
        num_devices = num_devices * cut.size
    pace: Value = 0.0
    for ring, cut in zip(torus.rings(cuts), cuts, strict=True):
        n = cut.size
        around = n * (n - 1) / 2 if one_way else n * n // 4 * where(n > 2, 0.5, 1.0)
        chunks = where(ring, around, n * n // 4)
        pace = maximum(pace, chunks * cut.stride / (num_devices * n))
    for whole, found in () if one_way else torus.twists(cuts):
        pace = where(whole, max(found.mean_hops) / (2 * num_devices), pace)
    return Link(pace / torus.bytes_per_s, torus.link(cuts, one_way=one_way).latency_s, additive=False)


def broadcast_link(torus: Torus, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
    """What a broadcast from one device gets, per byte of the array.

    Every link of the root carries its own part of the array (two on a ring, one on a line, whose far end takes all through
    one link), pipelined, so V / (links * bandwidth); a small array takes the hops to the farthest device.
    Assumes: as many trees without a common link as the root has links. Source: the intake of a device in `Torus.link`, all V.
    """
    rates = [
        (2 if ring and not one_way and cut.size > 2 else 1) * torus.bytes_per_s / cut.stride
        for ring, cut in zip(torus.rings(cuts), cuts, strict=True)
        if cut.size > 1
    ]
    return Link(1.0 / sum(rates) if rates else 0.0, torus.link(cuts, one_way=one_way).latency_s, additive=False)


def _gathered(torus: Torus, cuts: Sequence[Cut], one_way: bool) -> Link:
    return torus.link(cuts, one_way=one_way)


_LINKS: Mapping[str, Callable[[Torus, Sequence[Cut], bool], Link]] = {
    "all_gather": _gathered,
    "reduce_scatter": _gathered,
    "all_reduce": _gathered,
    "all_to_all": lambda torus, cuts, one_way: all_to_all_link(torus, cuts, one_way=one_way),
    "broadcast": lambda torus, cuts, one_way: broadcast_link(torus, cuts, one_way=one_way),
    "send_recv": lambda torus, cuts, one_way: torus.hop(cuts),
}


def point_to_point(num_bytes: float, torus: Torus, source: Sequence[int], target: Sequence[int]) -> Cost:
    """Latency and streaming time of an array sent from one device to another, by coordinates.

    The hops are the shortest way along every axis; as many ways without a common link are used as axes differ.
    Source: S0, question 5 (corner to corner of a 4x4: 6 hops, two ports).
    """
    for name, place in (("source", source), ("target", target)):
        if len(place) != len(torus.shape) or not all(0 <= x < n for x, n in zip(place, torus.shape, strict=True)):
            raise InputError(f"{name}: found {tuple(place)}; a place on {'x'.join(map(str, torus.shape))} is required")
    hops = [
        min(abs(a - b), size - abs(a - b)) if wraps else abs(a - b)
        for a, b, size, wraps in zip(source, target, torus.shape, torus.wraps, strict=True)
    ]
    ports = sum(1 for one in hops if one)
    streaming = num_bytes / (ports * torus.bytes_per_s) if ports else 0.0
    return Cost(latency_s=sum(hops) * torus.hop_latency_s, bandwidth_s=streaming, hops=sum(hops))


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunk-hops that one device of a ring causes in an AllToAll, in each direction."""

    right: int
    left: int

    @property
    def total(self) -> int:
        return self.right + self.left

    def bytes_sent(self, num_bytes: float, size: int) -> float:
        """Bytes that a device sends (its own and those it passes on) of an array of `num_bytes`: V/4 for even sizes."""
        return self.total * num_bytes / size**2


def all_to_all_chunks(size: int) -> Chunks:
    """Chunk-hops of an AllToAll on a bidirectional ring, what is half around going right.

    N/2 + ... + 1 to the right and (N/2 - 1) + ... + 1 to the left: N^2/4 for even N. Source: S3, appendix C.4.
    """
    right, left = size // 2, (size - 1) // 2
    return Chunks(right * (right + 1) // 2, left * (left + 1) // 2)


def idealised_s(
    operation: Operation, num_bytes: float, axis_bytes_per_s: float, *, num_axes: int = 1, one_way: bool = False
) -> float:
    """Seconds that the books print for large rings: V/(m W), twice that for an AllReduce, a quarter for an AllToAll.

    axis_bytes_per_s: W, both directions of a wrapped axis. One way W is halved, and an AllToAll is half an AllGather.
    Assumes: bandwidth-bound, N large. Raises `InputError` for other collectives.
    Source: S3, table 2; S2, "what have we learned" and question 10.
    Differs: exact forms carry (N-1)/N (`torus_cost` with `one_way`).
    """
    gather = num_bytes / (num_axes * axis_bytes_per_s) * (2.0 if one_way else 1.0)
    gathers = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 0.5 if one_way else 0.25}
    return gather * chosen(gathers, operation, "collective")
