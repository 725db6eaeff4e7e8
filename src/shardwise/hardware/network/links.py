"""The part of a network's levels that a group of devices spans, the group's link, and the cost of a collective over it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.values import Value, maximum


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
