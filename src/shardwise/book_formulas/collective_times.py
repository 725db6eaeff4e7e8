"""Closed forms of collectives as the books print them, on axes of a torus: times, busiest links, crossovers, chunks.

They are no rules of `shardwise rule`. Golden cases, worked problems and tests use them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.hardware import CollectiveReport, collective_report
from shardwise.hardware.network.links import CollectiveCost, CollectiveName, Cut
from shardwise.hardware.network.torus import Torus, WrapRule
from shardwise.values import InputError, lookup


def torus_of_axes(
    axes: Sequence[int], axis_bytes_per_s: float, *, wraps: bool = True, hop_latency_s: float = 1e-6
) -> Torus:
    """Return a torus whose axes each move `axis_bytes_per_s` both ways together (the books' W)."""
    rule: WrapRule = "always" if wraps else "never"
    return Torus(shape=tuple(axes), bytes_per_s=axis_bytes_per_s / 2, hop_latency_s=hop_latency_s, wrap_rule=rule)


def axes_report(
    operation: CollectiveName, num_bytes: float, torus: Torus, *, one_way: bool = False
) -> CollectiveReport:
    """Return the report of a collective over all axes of a torus."""
    return collective_report(operation, num_bytes, torus, [Cut(size, 1) for size in torus.shape], one_way=one_way)


def link_bytes(
    operation: CollectiveName, num_bytes: float, size: int, *, wraps: bool = True, one_way: bool = False
) -> float:
    """Return the bytes that cross the busiest directed link of one axis of `size` devices.

    AllGather and ReduceScatter: floor(N/2) shards V/N on a ring, N-1 one way or on a line; AllToAll: V/8, V/2 (1-1/N), V/4.
    Source: S2, question 10. A link of 1 byte/s takes as many seconds as it carries bytes.
    """
    torus = torus_of_axes((size,), 2.0, wraps=wraps, hop_latency_s=0.0)
    return axes_report(operation, num_bytes, torus, one_way=one_way).bandwidth_s


def hop_crossover_bytes(link_bytes_per_s: float, hop_latency_s: float) -> float:
    """Return the bytes of a message below which a hop is latency-bound: 45 kB at 4.5e10 bytes/s and 1 us. Source: S2."""
    return link_bytes_per_s * hop_latency_s


def point_to_point(num_bytes: float, torus: Torus, source: Sequence[int], target: Sequence[int]) -> CollectiveCost:
    """Return latency and streaming time of an array sent from one device to another, by coordinates.

    The hops follow the shortest path along every axis; as many paths without a common link are used as axes differ.
    Source: S0, question 5 (corner to corner of a 4x4: 6 hops, two ports).
    """
    for name, coordinate in (("source", source), ("target", target)):
        if len(coordinate) != len(torus.shape) or not all(
            0 <= x < n for x, n in zip(coordinate, torus.shape, strict=True)
        ):
            raise InputError(
                f"{name}: found {tuple(coordinate)}; a place on {'x'.join(map(str, torus.shape))} is required"
            )
    hops = [
        min(abs(a - b), size - abs(a - b)) if wraps else abs(a - b)
        for a, b, size, wraps in zip(source, target, torus.shape, torus.wraps, strict=True)
    ]
    ports = sum(1 for axis_hops in hops if axis_hops)
    streaming = num_bytes / (ports * torus.bytes_per_s) if ports else 0.0
    return CollectiveCost(latency_s=sum(hops) * torus.hop_latency_s, bandwidth_s=streaming, hops=sum(hops))


@dataclass(frozen=True, slots=True)
class ChunkHops:
    """Chunk-hops that one device of a ring causes in an AllToAll, in each direction."""

    right: int
    left: int

    @property
    def total(self) -> int:
        return self.right + self.left

    def bytes_sent(self, num_bytes: float, size: int) -> float:
        """Return the bytes that a device sends (its own and forwarded) of an array of `num_bytes`: V/4 for even sizes."""
        return self.total * num_bytes / size**2


def all_to_all_chunks(size: int) -> ChunkHops:
    """Return the chunk-hops of an AllToAll on a bidirectional ring; chunks that go half around go right.

    N/2 + ... + 1 to the right and (N/2 - 1) + ... + 1 to the left: N^2/4 for even N. Source: S3, appendix C.4.
    """
    right, left = size // 2, (size - 1) // 2
    return ChunkHops(right * (right + 1) // 2, left * (left + 1) // 2)


def idealised_s(
    operation: CollectiveName, num_bytes: float, axis_bytes_per_s: float, *, num_axes: int = 1, one_way: bool = False
) -> float:
    """Return the books' seconds for large rings: V/(m W), twice that for an AllReduce, a quarter for an AllToAll.

    axis_bytes_per_s: W, both directions of a wrapped axis. One way W is halved, and an AllToAll is half an AllGather.
    Assumes: bandwidth-bound, N large. Raises `InputError` for other collectives.
    Source: S3, table 2; S2, "what have we learned" and question 10.
    Differs: exact forms carry (N-1)/N (`torus_collective_cost` with `one_way`).
    """
    gather = num_bytes / (num_axes * axis_bytes_per_s) * (2.0 if one_way else 1.0)
    gathers = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 0.5 if one_way else 0.25}
    return gather * lookup(gathers, operation, "collective")
