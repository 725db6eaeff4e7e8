"""The link of a group of devices, the cost of a collective over it, and NCCL's figures of a collective.

A link is the part of a network's levels that the group spans. NCCL gives a collective's size, its algorithm bandwidth and its bus
bandwidth. Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from shardwise.values import Value, lookup, maximum


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of one level that a group of devices spans: `size` devices, each `stride` apart."""

    size: Value
    stride: Value


@dataclass(frozen=True, slots=True)
class Link:
    """Link of a group: its AllGather takes `max(latency_s, bytes * seconds_per_byte)`, or their sum if `additive`.

    On a torus every hop carries a shard and takes at least the hop latency (S2), hence the maximum; a switched collective
    pays its latency on top (NCCL's model), hence the sum.
    """

    seconds_per_byte: Value
    latency_s: Value
    additive: bool

    def all_gather_s(self, num_bytes: Value) -> Value:
        """Return the seconds to gather an array of `num_bytes`."""
        streaming = num_bytes * self.seconds_per_byte
        return streaming + self.latency_s if self.additive else maximum(streaming, self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Seconds of latency and of streaming, and the hops that the latency counts."""

    latency_s: float
    bandwidth_s: float
    hops: int


def cost_over_link(link: Link, num_bytes: float, passes: int, hop_latency_s: float) -> CollectiveCost:
    """Return the cost of a collective that goes over a link `passes` times, each hop of which takes `hop_latency_s`."""
    return CollectiveCost(
        latency_s=passes * link.latency_s, bandwidth_s=passes * num_bytes * link.seconds_per_byte,
        hops=passes * round(link.latency_s / hop_latency_s) if hop_latency_s else 0,
    )  # fmt: skip


CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv"]
COLLECTIVE_NAMES: tuple[CollectiveName, ...] = get_args(CollectiveName)


class NcclFactors(NamedTuple):
    """Factors of one kind of collective in the formulas of all networks.

    `size`: NCCL's size over the whole array, for N devices; `busbw`: bus bandwidth over algorithm bandwidth. `passes`: number of
    passes over the links of a gather (an AllReduce scatters, then gathers). `reduces`: switches can carry it out themselves,
    and rings inside nodes and between them can.
    """

    size: Callable[[int], float]
    busbw: Callable[[int], float]
    passes: int = 1
    reduces: bool = False


def _full_size(num_devices: int) -> float:
    return 1.0


def _share_of_others(num_devices: int) -> float:
    return (num_devices - 1) / num_devices


NCCL_FACTORS: Mapping[str, NcclFactors] = {
    "all_gather": NcclFactors(_full_size, _share_of_others, reduces=True),
    "reduce_scatter": NcclFactors(_full_size, _share_of_others, reduces=True),
    "all_reduce": NcclFactors(_full_size, lambda n: 2.0 * _share_of_others(n), passes=2, reduces=True),
    "all_to_all": NcclFactors(lambda n: 1.0 / n, _share_of_others),
    "broadcast": NcclFactors(_full_size, _full_size),
    "send_recv": NcclFactors(_full_size, _full_size),
}


def nccl_factors(operation: str) -> NcclFactors:
    """Return the factors of a collective by name. Raises `InputError` that lists the names."""
    return lookup(NCCL_FACTORS, operation, "collective")


def nccl_bytes(operation: CollectiveName, num_bytes: float, num_devices: int) -> float:
    """Return NCCL's size S in bytes of a collective on an array of `num_bytes`.

    S is the whole array; for an AllToAll what one device sends, `num_bytes / N`.
    """
    return num_bytes * nccl_factors(operation).size(num_devices)


def busbw_factor(operation: CollectiveName, num_devices: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth: 2(N-1)/N, (N-1)/N or 1.

    Differs: for reduction in the switch nccl-tests also names (N-1)/(N+1); here busbw is the same function of the time
    whatever the algorithm, so that algorithms can be compared, and may exceed the link's bandwidth when the switch reduces.
    """
    return nccl_factors(operation).busbw(num_devices)


def algbw(operation: CollectiveName, num_bytes: float, num_devices: int, time_s: float) -> float:
    """Return the algorithm bandwidth in bytes/s: S / t."""
    return nccl_bytes(operation, num_bytes, num_devices) / time_s


def busbw(operation: CollectiveName, num_bytes: float, num_devices: int, time_s: float) -> float:
    """Return the bus bandwidth in bytes/s: algbw times `busbw_factor`, what a link of the ring would carry."""
    return algbw(operation, num_bytes, num_devices, time_s) * busbw_factor(operation, num_devices)


def received_bytes(operation: CollectiveName, num_bytes: float, num_devices: int) -> float:
    """Return the bytes that one device receives, on any network: S (N-1)/N, twice that for an AllReduce, S for a copy.

    Reduction in the switch and trees move other amounts. Source: S1, appendix on ring all-reduce.
    """
    return nccl_bytes(operation, num_bytes, num_devices) * busbw_factor(operation, num_devices)
