"""Tiers of switches, such as NVLink within a node and InfiniBand between nodes, and the closed forms of collectives behind
them: ring, hierarchical rings, tree, reduction in the switch, direct.

A collective takes latency plus bytes times seconds per byte (NCCL's model). `inside` is how many devices of the group lie
below a tier: they share what leaves their node over as many network cards. `num_bytes` is the whole array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.hardware.network.links import CollectiveCost, CollectiveName, Cut, Link, nccl_factors
from shardwise.values import Value, lookup, maximum, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier of switches: `size` groups of the tier below, full-duplex egress per device, sustained fraction.

    `links`: without a switch, the direct links of a device to as many others, all of them joined pair by pair (a full mesh,
    such as xGMI's); `bytes_per_s` is over all of them. 0 where there is a switch. `reduces`: the switches sum and multicast, and
    AllReduces are priced so; only clusters whose file states levels say it.
    """

    name: str
    size: int
    bytes_per_s: float
    fraction: float
    hop_latency_s: float
    base_latency_s: float = 0.0
    links: int = 0
    reduces: bool = False

    def egress(self, size: Value) -> Value:
        """Return the sustained bytes/s that a device sends to the `size - 1` others of a group: in a mesh over one link for
        each."""
        rate = self.bytes_per_s * self.fraction
        return rate * maximum(size - 1, 1) / self.links if self.links else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """Tiers of switches from the inside out, such as NVLink within a node and InfiniBand between nodes."""

    tiers: tuple[Tier, ...]

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(tier.size for tier in self.tiers)

    def gather_link(self, cuts: Sequence[Cut]) -> Link:
        """Return the AllGather link of a group that spans `cuts[i]` of tier i.

        Rings within and between nodes are pipelined, so the slowest tier sets the pace; a group with `i` devices in a node
        uses their `i` network cards, so 1/i of what leaves the node passes each. Source: the (N-1)/N factor and busbw of
        nccl-tests' PERFORMANCE.md; ring hops from NCCL's tuning model.
        """
        slowest: Value = 0.0
        latency: Value = 0.0
        inside: Value = 1
        for tier, cut in zip(self.tiers, cuts, strict=True):
            seconds = (cut.size - 1) / (cut.size * inside * tier.egress(cut.size))
            slowest = maximum(slowest, seconds)  # tiers are pipelined, but the latencies of their hops add up
            base = where(cut.size > 1, tier.base_latency_s, 0.0)
            latency = maximum(latency, base) + (cut.size - 1) * tier.hop_latency_s
            inside = inside * cut.size
        return Link(slowest, latency, additive=True)

    def all_reduce_link(self, cuts: Sequence[Cut]) -> Link:
        """Return the link of an AllReduce, per byte of the summand: twice an AllGather, but over tiers that reduce once.

        Of a tier that reduces each device sends its summand once and gets the sum: (n+1)/n over the innermost, where devices
        also send what the switch has summed for them to be multicast, 1 over others. Source: `in_switch_cost`.
        """
        slowest: Value = 0.0
        launch_s: Value = 0.0
        hops_s: Value = 0.0
        inside: Value = 1
        for number, (tier, cut) in enumerate(zip(self.tiers, cuts, strict=True)):
            share = 2 * (cut.size - 1) / cut.size
            if tier.reduces:
                share = where(cut.size > 1, (cut.size + 1) / cut.size if number == 0 else 1.0, 0.0)
            slowest = maximum(slowest, share / (inside * tier.egress(cut.size)))
            launch_s = maximum(launch_s, where(cut.size > 1, tier.base_latency_s, 0.0))
            hops_s = hops_s + 2 * (where(cut.size > 1, 1, 0) if tier.reduces else cut.size - 1) * tier.hop_latency_s
            inside = inside * cut.size
        return Link(slowest, launch_s + hops_s, additive=True)

    @property
    def reduces(self) -> bool:
        """True if the switches of any tier sum and multicast."""
        return any(tier.reduces for tier in self.tiers)

    def neighbour_link(self, cuts: Sequence[Cut]) -> Link:
        """Return the link of a send to the next device of a group: the outermost tier that the group spans; in a mesh one
        link."""
        seconds: Value = 0.0
        latency: Value = 0.0
        for tier, cut in zip(self.tiers, cuts, strict=True):
            seconds = where(cut.size > 1, 1.0 / tier.egress(2), seconds)
            latency = where(cut.size > 1, tier.base_latency_s + tier.hop_latency_s, latency)
        return Link(seconds, latency, additive=True)

    def permute_link(self, cuts: Sequence[Cut]) -> Link:
        """Return the link of a permute: every device sends through its own link, over the outermost tier that the group
        spans."""
        return self.neighbour_link(cuts)

    def axis_bytes_per_s(self) -> float:
        """Return the rate at which every device gathers an array over the whole cluster: the slowest tier's egress, times the
        devices below it that share what has to come in (8 cards of 50 GB/s feed a node with 400 GB/s)."""
        devices_below, rates = 1, []
        for tier in self.tiers:
            if tier.size > 1:
                rates.append(tier.egress(tier.size) / tier.fraction * devices_below)
            devices_below *= tier.size
        return min(rates, default=self.tiers[0].bytes_per_s)

    def neighbour_bytes_per_s(self) -> float:
        """Return the egress of one device to its closest neighbours."""
        innermost = self.tiers[0]
        return (
            float(innermost.egress(innermost.size) / innermost.fraction)
            if innermost.size > 1
            else innermost.bytes_per_s
        )


IN_SWITCH = "in-switch"
# Algorithms that can carry out each operation.
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("ring", "hierarchical", IN_SWITCH),
    "reduce_scatter": ("ring", "hierarchical", IN_SWITCH),
    "all_reduce": ("ring", "hierarchical", "tree", IN_SWITCH),
    "all_to_all": ("direct",),
    "broadcast": ("ring", "tree"),
    "send_recv": ("direct",),
}


@dataclass(frozen=True, slots=True)
class CrossedTier:
    """Tier that a group crosses: `size` of the groups below it, each of `inside` devices."""

    tier: Tier
    size: int
    inside: int

    @property
    def seconds_per_byte(self) -> float:
        """Seconds per byte if each of the `inside` devices sends its share of what leaves them."""
        return float(1.0 / (self.inside * self.tier.egress(self.size)))


def crossed_tiers(network: Switched, cuts: Sequence[Cut]) -> tuple[CrossedTier, ...]:
    """Return the tiers that a group crosses, from the inside out."""
    crossed, inside = [], 1
    for tier, cut in zip(network.tiers, cuts, strict=True):
        if cut.size > 1:
            crossed.append(CrossedTier(tier, cut.size, inside))
        inside *= cut.size
    return tuple(crossed)


def switch_collective_costs(
    operation: CollectiveName, num_bytes: float, network: Switched, cuts: Sequence[Cut]
) -> Mapping[str, CollectiveCost]:
    """Return the cost of each algorithm that can carry out the operation over the group that `cuts` spans."""
    crossed = crossed_tiers(network, cuts)
    cost_functions: Mapping[str, Callable[[], CollectiveCost]] = {
        "direct": lambda: direct_cost(operation, num_bytes, network, cuts),
        "ring": lambda: ring_cost(operation, num_bytes, crossed),
        "hierarchical": lambda: hierarchical_cost(operation, num_bytes, network, cuts),
        "tree": lambda: tree_cost(operation, num_bytes, crossed),
        IN_SWITCH: lambda: in_switch_cost(operation, num_bytes, network, cuts),
    }
    is_available = {"hierarchical": len(crossed) > 1, IN_SWITCH: cuts[0].size > 1 and not network.tiers[0].links}
    algorithms = lookup(ALGORITHMS, operation, "collective")
    return {name: cost_functions[name]() for name in algorithms if is_available.get(name, True)}


def direct_cost(operation: CollectiveName, num_bytes: float, network: Switched, cuts: Sequence[Cut]) -> CollectiveCost:
    """Return the cost if every device sends directly to the one, or to each, that its bytes are for."""
    hop = network.neighbour_link(cuts)
    per_byte: Mapping[str, Callable[[], Value]] = {
        "send_recv": lambda: hop.seconds_per_byte,
        "all_to_all": lambda: all_to_all_seconds_per_byte(network, cuts),
    }
    seconds = lookup(per_byte, operation, "collective")()
    return CollectiveCost(latency_s=hop.latency_s, bandwidth_s=num_bytes * seconds, hops=1)


def ring_cost(operation: CollectiveName, num_bytes: float, crossed: Sequence[CrossedTier]) -> CollectiveCost:
    """Return the cost of one ring through all N devices: (N-1)/N of V over the slowest tier, N-1 hops.

    In a mesh there are several rings without a common link, one for each other device of the group: the same bytes over all
    its links. Of the N-1 hops, as many cross a tier as it joins groups, less one. An AllReduce goes around twice; a broadcast
    passes all of V down the ring. Source: NCCL, src/graph/tuning.cc (nsteps and nInterSteps); nccl-tests, PERFORMANCE.md.
    """
    num_devices, factors = math.prod(span.size for span in crossed), nccl_factors(operation)
    passes = factors.passes
    hops = [num_devices // span.inside - num_devices // (span.inside * span.size) for span in crossed]
    latency = sum(count * span.tier.hop_latency_s for count, span in zip(hops, crossed, strict=True))
    return CollectiveCost(
        latency_s=passes * (_launch_latency(crossed) + latency),
        bandwidth_s=factors.busbw(num_devices) * num_bytes * max(span.seconds_per_byte for span in crossed),
        hops=passes * (num_devices - 1),
    )


def hierarchical_cost(
    operation: CollectiveName, num_bytes: float, network: Switched, cuts: Sequence[Cut]
) -> CollectiveCost:
    """Return the cost of rings within nodes and rings between them, pipelined: `Switched.gather_link`, as plans are priced.

    The slowest tier sets the pace and the hops of the tiers add up, (n-1) for each; an AllReduce is a ReduceScatter and an
    AllGather. Source: S0's hierarchy of switches; nccl-tests, PERFORMANCE.md.
    """
    link, passes = network.gather_link(cuts), nccl_factors(operation).passes
    return CollectiveCost(
        latency_s=passes * link.latency_s,
        bandwidth_s=passes * num_bytes * link.seconds_per_byte,
        hops=passes * sum(cut.size - 1 for cut in cuts),
    )


def tree_cost(operation: CollectiveName, num_bytes: float, crossed: Sequence[CrossedTier]) -> CollectiveCost:
    """Return the cost of two complementary binary trees: every device sends 2V for an AllReduce, log2 N hops up and down.

    A tree of n has ceil(log2 n) hops on each tier; the two trees, each with half of the array, use a device as a leaf
    once and as an inner node once, so the egress is 2V where a ring has 2V(N-1)/N. A broadcast goes down only.
    Assumes: pipelined, no loss of the protocol. Source: Sanders, Speck and Traeff 2009, two-tree algorithms.
    Differs: NCCL (src/graph/tuning.cc) chains the devices of a node (n-1 hops) and builds trees between nodes only, and
    takes 0.9 of the bandwidth.
    """
    passes = nccl_factors(operation).passes
    depths = [math.ceil(math.log2(span.size)) for span in crossed]
    latency = sum(depth * span.tier.hop_latency_s for depth, span in zip(depths, crossed, strict=True))
    return CollectiveCost(
        latency_s=_launch_latency(crossed) + passes * latency,
        bandwidth_s=passes * num_bytes * max(span.seconds_per_byte for span in crossed),
        hops=passes * sum(depths),
    )


def in_switch_cost(
    operation: CollectiveName, num_bytes: float, network: Switched, cuts: Sequence[Cut]
) -> CollectiveCost:
    """Return the cost if the innermost switch reduces and multicasts, with rings over outer tiers that do not, pipelined.

    An AllReduce: each of n devices sends V to be summed in the switch, and V/n of sums to be multicast: V(n+1)/n instead of
    2V(n-1)/n. An AllGather or ReduceScatter still receives or sends (n-1)/n of V, in one hop instead of n-1.
    Assumes: switches that reduce (NVLink SHARP: third-generation NVSwitch and later). Source: NCCL's NVLS algorithm;
    Klenk et al. 2020, an in-network architecture for accelerating shared-memory multiprocessor collectives.
    Differs: Austin et al., chapter 12, count V for an AllReduce, as a device adds its own share itself.
    """
    inner, *outer = network.tiers
    reducing = Switched(tiers=(replace(inner, reduces=True), *outer))
    spans = crossed_tiers(reducing, cuts)
    passes, hops = nccl_factors(operation).passes, [1 if span.tier.reduces else span.size - 1 for span in spans]
    hops_s = sum(count * span.tier.hop_latency_s for count, span in zip(hops, spans, strict=True))
    link = reducing.all_reduce_link(cuts) if operation == "all_reduce" else reducing.gather_link(cuts)
    return CollectiveCost(
        latency_s=_launch_latency(spans) + passes * hops_s, bandwidth_s=num_bytes * link.seconds_per_byte,
        hops=passes * sum(hops),
    )  # fmt: skip


def all_to_all_seconds_per_byte(network: Switched, cuts: Sequence[Cut], copies: Value = 1) -> Value:
    """Return the seconds of an AllToAll per byte of the whole array V: every device sends to each other directly.

    A device holds V/N and sends (n - 1) inside/N of that over a tier that joins n groups of `inside` devices; the tiers work
    at once. On one tier: V/N (N-1)/N over its egress, (1/N) of an AllGather's time. Source: nccl-tests, PERFORMANCE.md.
    Differs: the quarter of an AllGather that holds on a ring (S2) does not hold behind a switch.
    """
    slowest: Value = 0.0
    inside: Value = 1
    for tier, cut in zip(network.tiers, cuts, strict=True):
        copies_sent = 1.0 if tier is network.tiers[0] else _expected_copies_sent(cut.size, copies)
        slowest = maximum(slowest, (cut.size - 1) * inside / tier.egress(cut.size) * copies_sent)
        inside = inside * cut.size
    return slowest / inside**2


def _expected_copies_sent(groups: Value, copies: Value) -> Value:
    """Return the expected share of a row's copies that leave for other groups, if each group gets one and forwards it."""
    # groups * (1 - (1 - 1/groups)^copies) distinct groups are expected for `copies` independent choices.
    return groups * (1.0 - (1.0 - 1.0 / groups) ** copies) / copies


def _launch_latency(crossed: Sequence[CrossedTier]) -> float:
    """Return the seconds before the first byte moves: one launch, the slowest tier's."""
    return max(span.tier.base_latency_s for span in crossed)
