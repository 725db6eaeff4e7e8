"""Pods (slices of one torus each, joined by the data-centre network), and the closed forms of collectives between them.

Each collective is its part inside a pod, on the torus, and its part between pods. `num_bytes` is the whole array V, `inside`
the devices of the group in one of its p pods, so that N = p · inside. A device has W_dcn, its part of its host's egress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.hardware.network.links import CollectiveCost, CollectiveName, Cut, Link, cost_over_link, nccl_factors
from shardwise.hardware.network.torus import Torus, all_to_all_link, broadcast_link
from shardwise.values import Value, lookup, maximum, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """`num_pods` slices of the same torus, the outermost level, joined host to host by the data-centre network (DCN).

    `bytes_per_s` is the egress of one chip to other pods: an equal part of its host's, in one direction, full-duplex.
    The latency of this network has no source: only bandwidth is priced between pods, a bound for small messages.
    Source: S0, sections 2 (DCN is host to host) and 4 (scaling between pods).
    """

    torus: Torus
    num_pods: int
    bytes_per_s: float

    @property
    def levels(self) -> tuple[int, ...]:
        return (*self.torus.levels, self.num_pods)

    def gather_link(self, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
        """Return the AllGather link of a group that spans `cuts[i]` of axis i of the torus and `cuts[-1].size` pods.

        One level after the other: between pods every chip of the group gathers its own share (1/inside of the array) over its
        part of its host's egress, then the group inside each pod gathers the whole. What arrives over a host passes its
        memory before the torus has it, hence the sum and no pipeline (S0: over PCIe to the host, then over the DCN).
        """
        inner = self.torus.gather_link(cuts[:-1], one_way=one_way)
        return Link(inner.seconds_per_byte + self.dcn_seconds_per_byte(cuts), inner.latency_s, additive=False)

    def dcn_seconds_per_byte(self, cuts: Sequence[Cut]) -> Value:
        """Return the seconds between pods per byte of an array that the group gathers: (p-1)/p of it, `inside` chips at once."""
        pods = cuts[-1].size
        return (pods - 1) / (pods * group_devices_per_pod(cuts) * self.bytes_per_s)

    def neighbour_link(self, cuts: Sequence[Cut]) -> Link:
        """Return the link of a send to the next device of a group: the slower of a hop inside and one to the same chip of a
        pod."""
        return self._sent(self.torus.neighbour_link(cuts[:-1]), cuts)

    def permute_link(self, cuts: Sequence[Cut]) -> Link:
        """Return the link of a permute: each device sends over its own part of its host's egress, or over the torus."""
        return self._sent(self.torus.permute_link(cuts[:-1]), cuts)

    def _sent(self, inner: Link, cuts: Sequence[Cut]) -> Link:
        across = where(cuts[-1].size > 1, 1.0 / self.bytes_per_s, 0.0)
        return Link(maximum(inner.seconds_per_byte, across), inner.latency_s, additive=False)

    def axis_bytes_per_s(self) -> float:
        """Return the bandwidth of one wrapped axis inside a pod, both directions: the books' W."""
        return self.torus.axis_bytes_per_s()

    def neighbour_bytes_per_s(self) -> float:
        """Return the bandwidth of one wrapped axis: every neighbour inside a pod is one link away."""
        return self.torus.neighbour_bytes_per_s()


def group_devices_per_pod(cuts: Sequence[Cut]) -> Value:
    """Return the devices of a group inside one pod."""
    inside: Value = 1
    for cut in cuts[:-1]:
        inside = inside * cut.size
    return inside


IN_TURN, AT_ONCE = "one level after the other", "levels at once"


def pod_collective_costs(
    operation: CollectiveName, num_bytes: float, pods: Pods, cuts: Sequence[Cut], *, one_way: bool = False
) -> Mapping[str, CollectiveCost]:
    """Return latency and streaming time over a group that spans pods: as it is priced, then the best case.

    `AT_ONCE` is the bound of gathers and reductions whose levels are pipelined, so that the slower one sets the pace.
    """
    factors, (name, link_of) = nccl_factors(operation), lookup(_LINKS, operation, "collective")
    passes, hop_s = factors.passes, pods.torus.hop_latency_s
    costs = {name: cost_over_link(link_of(pods, cuts, one_way=one_way), num_bytes, passes, hop_s)}
    if factors.reduces:
        inner, between = pods.torus.gather_link(cuts[:-1], one_way=one_way), pods.dcn_seconds_per_byte(cuts)
        slower = maximum(inner.seconds_per_byte, between)
        costs[AT_ONCE] = cost_over_link(Link(slower, inner.latency_s, additive=False), num_bytes, passes, hop_s)
    return costs


def pods_all_to_all_link(pods: Pods, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
    """Return the link of an AllToAll across pods, per byte of the whole array V; traffic inside and between pods overlaps.

    Between pods a device sends (p-1) inside chunks of V/N^2, directly to the host of the device they are for; inside, the
    AllToAll of the pod's own V/p^2 goes over the torus. Source: S0, sections 2 and 4; `all_to_all_link`.
    """
    inner = all_to_all_link(pods.torus, cuts[:-1], one_way=one_way)
    across, inside = cuts[-1].size, group_devices_per_pod(cuts)
    leaving = (across - 1) / (across * across * inside * pods.bytes_per_s)
    return Link(maximum(inner.seconds_per_byte / across**2, leaving), inner.latency_s, additive=False)


def pods_broadcast_link(pods: Pods, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
    """Return the link of a broadcast, per byte: first to the root's pod, then 1/inside of it from each device to the other
    pods, one pod after the other, and gathered there."""
    spread = broadcast_link(pods.torus, cuts[:-1], one_way=one_way)
    gather = pods.torus.gather_link(cuts[:-1], one_way=one_way)
    between_pods = 1.0 / (group_devices_per_pod(cuts) * pods.bytes_per_s)
    seconds = spread.seconds_per_byte + between_pods + gather.seconds_per_byte
    return Link(seconds, spread.latency_s + gather.latency_s, additive=False)


# Name of the algorithm that each operation is priced as, and its link.
_LINKS: Mapping[str, tuple[str, Callable[..., Link]]] = {
    "all_gather": (IN_TURN, Pods.gather_link),
    "reduce_scatter": (IN_TURN, Pods.gather_link),
    "all_reduce": (IN_TURN, Pods.gather_link),
    "all_to_all": ("direct", pods_all_to_all_link),
    "broadcast": (IN_TURN, pods_broadcast_link),
    "send_recv": ("direct", lambda pods, cuts, one_way: pods.neighbour_link(cuts)),
}
