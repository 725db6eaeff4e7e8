"""Physical networks: a torus of direct links, or tiers of switches.

Both are an ordered list of *levels* that a placement cuts into factors: the axes of the torus, or the tiers of the
switch from the inside out. What a group of devices gets from its cut of each level is a `Link`: the time that an
AllGather takes per byte of the gathered array, and its latency. Everything is arithmetic on numbers or arrays of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.symbolic import Value, maximum, where

WrapRule = Literal["multiple_of_4", "only_16", "always", "never"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of one level that a group of devices spans: `size` devices, each `stride` apart."""

    size: Value
    stride: Value


@dataclass(frozen=True, slots=True)
class Link:
    """An AllGather over the group takes `max(latency_s, bytes * seconds_per_byte)`, or their sum where `additive`.

    On a torus every hop carries a shard and takes at least the hop latency (S2), hence the maximum; a switched
    collective pays its latency on top (NCCL's model), hence the sum.
    """

    seconds_per_byte: Value
    latency_s: Value
    additive: bool

    def all_gather_s(self, num_bytes: Value) -> Value:
        """Seconds to gather an array of `num_bytes`."""
        streaming = num_bytes * self.seconds_per_byte
        return streaming + self.latency_s if self.additive else maximum(streaming, self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """A grid of chips with a link to each neighbour, per axis and per direction.

    `bytes_per_s` is one link in one direction. An axis wraps by the vendor's rule: v4 and v5p slices wrap on all axes
    when every axis is a multiple of 4; v5e and v6e axes wrap only at 16. Source: S0, section 2. "always" and "never" are
    for asking what wraparound is worth.
    """

    shape: tuple[int, ...]
    bytes_per_s: float
    hop_latency_s: float
    wrap_rule: WrapRule

    @property
    def levels(self) -> tuple[int, ...]:
        return self.shape

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which axes are rings."""
        if self.wrap_rule in ("always", "never"):
            return tuple(self.wrap_rule == "always" for _ in self.shape)
        if self.wrap_rule == "only_16":
            return tuple(size == 16 for size in self.shape)
        return tuple(all(size % 4 == 0 for size in self.shape) for _ in self.shape)

    def rings(self, cuts: Sequence[Cut]) -> tuple[Value, ...]:
        """On which axes a group goes all around: it spans the whole of an axis that wraps."""
        return tuple(
            (cut.size * cut.stride == size) & wraps
            for size, wraps, cut in zip(self.shape, self.wraps, cuts, strict=True)
        )

    def link(self, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
        """What a group gets that spans `cuts[i]` of axis i.

        A group all around a wrapped axis is a ring: both directions, half the hops, unless it goes `one_way`. Neighbours on
        a part of an axis are a line: one way, N-1 hops. Devices `stride` apart share their links with the groups between
        them. Several axes gather at once, each its share of the array, so rates add (S0: "M axes give M times the
        bandwidth"), as far as the links of the device with the fewest (the corner, where axes are lines) take in the
        (N-1)/N of the array that it lacks.
        """
        rate: Value = 0.0
        intake: Value = 0.0
        hops: Value = 0
        num_devices: Value = 1
        for ring, cut in zip(self.rings(cuts), cuts, strict=True):
            steps = where(ring, cut.size - 1 if one_way else cut.size // 2, cut.size - 1)
            seconds = steps * cut.stride / (cut.size * self.bytes_per_s)
            rate = rate + where(cut.size > 1, 1.0 / maximum(seconds, 1e-30), 0.0)
            num_links = where(ring & (cut.size > 2), 1 if one_way else 2, 1)
            intake = intake + where(cut.size > 1, num_links * self.bytes_per_s / cut.stride, 0.0)
            hops = hops + steps * cut.stride
            num_devices = num_devices * cut.size
        gathered = where(rate > 0, 1.0 / maximum(rate, 1e-30), 0.0)
        taken_in = (1.0 - 1.0 / num_devices) / maximum(intake, 1e-30)
        return Link(maximum(gathered, taken_in), hops * self.hop_latency_s, additive=False)

    def hop(self, cuts: Sequence[Cut]) -> Link:
        """What a send to the next device of a group gets: one link, shared by the groups between them."""
        far: Value = 0
        for cut in cuts:
            far = maximum(far, where(cut.size > 1, cut.stride, 0))
        return Link(far / self.bytes_per_s, far * self.hop_latency_s, additive=False)

    def permute(self, cuts: Sequence[Cut]) -> Link:
        """What a permute gets in which each device sends to one device anywhere in the group.

        On an axis of n the busiest link carries, of an even mix of distances, n/8 devices' bytes on a ring and n/4 on a line,
        and at least one device's.
        """
        pace: Value = 0.0
        hops: Value = 0
        for ring, cut in zip(self.rings(cuts), cuts, strict=True):
            busiest = maximum(1.0, cut.size / where(ring, 8.0, 4.0)) * cut.stride
            pace = maximum(pace, where(cut.size > 1, busiest, 0.0))
            hops = hops + where(ring, cut.size // 2, cut.size - 1) * cut.stride
        return Link(pace / self.bytes_per_s, hops * self.hop_latency_s, additive=False)

    def axis_bytes_per_s(self) -> float:
        """Bandwidth of one wrapped axis, both directions: the books' W."""
        return 2 * self.bytes_per_s

    def neighbour_bytes_per_s(self) -> float:
        """The same: every neighbour is one link away."""
        return self.axis_bytes_per_s()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier of switches: `size` groups of the tier below, full-duplex egress per device, sustained fraction."""

    name: str
    size: int
    bytes_per_s: float
    fraction: float
    hop_latency_s: float
    base_latency_s: float = 0.0


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
            seconds = (cut.size - 1) / (cut.size * inside * tier.bytes_per_s * tier.fraction)
            slowest = maximum(slowest, seconds)
            base = where(cut.size > 1, tier.base_latency_s, 0.0)
            latency = maximum(latency, base) + (cut.size - 1) * tier.hop_latency_s
            inside = inside * cut.size
        return Link(slowest, latency, additive=True)

    def hop(self, cuts: Sequence[Cut]) -> Link:
        """What a send to the next device of a group gets: the outermost tier that the group spans."""
        seconds: Value = 0.0
        latency: Value = 0.0
        for tier, cut in zip(self.tiers, cuts, strict=True):
            seconds = where(cut.size > 1, 1.0 / (tier.bytes_per_s * tier.fraction), seconds)
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
                rates.append(tier.bytes_per_s * inside)
            inside *= tier.size
        return min(rates, default=self.tiers[0].bytes_per_s)

    def neighbour_bytes_per_s(self) -> float:
        """Egress of one device to its closest neighbours."""
        return self.tiers[0].bytes_per_s


Topology = Torus | Switched
