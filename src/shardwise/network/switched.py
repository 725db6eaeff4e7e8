"""Tiers of switches, such as NVLink within a node and InfiniBand between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.network.links import Cut, Link
from shardwise.symbolic import Value, maximum, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier of switches: `size` groups of the tier below, full-duplex egress per device, sustained fraction.

    `links`: without a switch, the direct links of a device to as many others, all of them joined pair by pair (a full mesh,
    such as xGMI's); `bytes_per_s` is over all of them. 0 where there is a switch.
    """

    name: str
    size: int
    bytes_per_s: float
    fraction: float
    hop_latency_s: float
    base_latency_s: float = 0.0
    links: int = 0

    def egress(self, size: Value) -> Value:
        """Sustained bytes/s that a device sends to the `size - 1` others of a group: in a mesh over one link for each."""
        rate = self.bytes_per_s * self.fraction
        return rate * maximum(size - 1, 1) / self.links if self.links else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """Tiers of switches from the inside out, such as NVLink within a node and InfiniBand between nodes."""

    tiers: tuple[Tier, ...]

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(tier.size for tier in self.tiers)

    def link(self, cuts: Sequence[Cut]) -> Link:
        """What a group gets that spans `cuts[i]` of tier i.

        Rings within and between nodes are pipelined, so the slowest tier sets the pace; a group with `i` devices in a
        node uses their `i` network cards, so 1/i of what leaves the node passes each. Source: the (N-1)/N factor and
        busbw of nccl-tests' PERFORMANCE.md; ring hops from NCCL's tuning model.
        """
        slowest: Value = 0.0
        latency: Value = 0.0
        inside: Value = 1
        for tier, cut in zip(self.tiers, cuts, strict=True):
            seconds = (cut.size - 1) / (cut.size * inside * tier.egress(cut.size))
            slowest = maximum(slowest, seconds)
            base = where(cut.size > 1, tier.base_latency_s, 0.0)
            latency = maximum(latency, base) + (cut.size - 1) * tier.hop_latency_s
            inside = inside * cut.size
        return Link(slowest, latency, additive=True)

    def hop(self, cuts: Sequence[Cut]) -> Link:
        """What a send to the next device of a group gets: the outermost tier that the group spans; of a mesh one link."""
        seconds: Value = 0.0
        latency: Value = 0.0
        for tier, cut in zip(self.tiers, cuts, strict=True):
            seconds = where(cut.size > 1, 1.0 / tier.egress(2), seconds)
            latency = where(cut.size > 1, tier.base_latency_s + tier.hop_latency_s, latency)
        return Link(seconds, latency, additive=True)

    def permute(self, cuts: Sequence[Cut]) -> Link:
        """What a permute gets: every device sends through its own link, over the outermost tier that the group spans."""
        return self.hop(cuts)

    def axis_bytes_per_s(self) -> float:
        """Rate at which every device gathers an array over the whole cluster: the slowest tier's egress, times the
        devices below it that share what has to come in (8 cards of 50 GB/s feed a node with 400 GB/s)."""
        inside, rates = 1, []
        for tier in self.tiers:
            if tier.size > 1:
                rates.append(tier.egress(tier.size) / tier.fraction * inside)
            inside *= tier.size
        return min(rates, default=self.tiers[0].bytes_per_s)

    def neighbour_bytes_per_s(self) -> float:
        """Egress of one device to its closest neighbours."""
        near = self.tiers[0]
        return float(near.egress(near.size) / near.fraction) if near.size > 1 else near.bytes_per_s
