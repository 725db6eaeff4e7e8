"""Physical networks, the links of groups of a layout's axes on them, and the seconds of a collective on these links.

A network is a torus of direct links, pods of such a torus on the data-centre network, or tiers of switches. All are an
ordered list of *levels* that a placement cuts into factors: the axes of the torus and then its pods, or the tiers of the
switch from the inside out. A group of devices gets a `Link` from its cut of each level: the time that an AllGather takes per
byte of the gathered array, and its latency. Everything is arithmetic on numbers or arrays of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.hardware.network.links import Cut, Link, nccl_factors
from shardwise.hardware.network.pods import Pods, pods_all_to_all_link
from shardwise.hardware.network.switches import Switched, all_to_all_seconds_per_byte
from shardwise.hardware.network.torus import Torus, all_to_all_link
from shardwise.sharding import Axes, CollectiveKind
from shardwise.values import Value, maximum
from shardwise.values.symbolic import IdentityCache

Topology = Torus | Pods | Switched


@dataclass(slots=True)
class GroupLinks:
    """Links of every group of axes under one placement (or arrays of placements), computed at first use.

    `sizes`: if several placements share arrays of sizes, the row of those arrays for each placement.
    """

    topology: Topology
    cuts: Mapping[str, tuple[Cut, ...]]
    link_cache: dict[tuple[str, Axes], Link] = field(default_factory=dict)
    cuts_cache: dict[Axes, list[Cut]] = field(default_factory=dict)
    sizes: Value | None = None
    seconds: IdentityCache = field(
        default_factory=IdentityCache, init=False, compare=False, repr=False
    )  # of what moves over them

    def per_placement(self, value: Value) -> Value:
        """Expand a per-size array to one entry per placement."""
        if self.sizes is None or not getattr(value, "ndim", 0):
            return value
        return value.take(self.sizes)

    def gather_link(self, axes: tuple[str, ...]) -> Link:
        """Return the AllGather link of the group of devices that vary along `axes`."""
        return self._link("gather_link", axes)

    def all_reduce_link(self, axes: tuple[str, ...]) -> Link | None:
        """Return the link of an AllReduce that switches sum, or None where none of the network does: two gathers are priced."""
        return (
            self._link("all_reduce_link", axes)
            if isinstance(self.topology, Switched) and self.topology.reduces
            else None
        )

    def neighbour_link(self, axes: tuple[str, ...]) -> Link:
        """Return the link between neighbours along `axes`, for a send and a receive."""
        return self._link("neighbour_link", axes)

    def permute_link(self, axes: tuple[str, ...]) -> Link:
        """Return the link of a permute within the group along `axes`: each device sends to one, wherever it is."""
        return self._link("permute_link", axes)

    def _link(self, method: str, axes: Axes) -> Link:
        if (method, axes) not in self.link_cache:
            self.link_cache[method, axes] = getattr(self.topology, method)(self.group_cuts(axes))
        return self.link_cache[method, axes]

    def group_cuts(self, axes: tuple[str, ...]) -> list[Cut]:
        """Return the cut of each level that the group of devices along `axes` spans."""
        if axes not in self.cuts_cache:
            levels = range(len(self.topology.levels))
            self.cuts_cache[axes] = [_join([self.cuts[axis][i] for axis in axes]) for i in levels]
        return self.cuts_cache[axes]


def _join(cuts: list[Cut]) -> Cut:
    """Return the cut of a group: sizes multiply; gaps between its parts count as stride."""
    size: Value = 1
    span: Value = 1
    for cut in cuts:
        size = size * cut.size
        span = maximum(span, cut.size * cut.stride * (cut.size > 1))
    return Cut(size, maximum(span // size, 1))


LINK_SECONDS_SOURCE = (
    "seconds a byte and latency of the links that a group has: nccl-tests, doc/PERFORMANCE.md; rings of a torus: S2"
)


def collective_s(kind: CollectiveKind, axes: Axes, payload_bytes: Value, links: GroupLinks, copies: Value = 1) -> Value:
    """Return the seconds of a collective over `axes`; its kind decides which links count.

    payload_bytes: see `Collective.payload_elements`; the whole gathered array of an AllGather, the summand of a reduction,
    a device's shard of an AllToAll, what a device receives in a permute or a send. AllGather and ReduceScatter take the
    same time, an AllReduce is one after the other. The (n-1)/n is in the link. Sources: S2; S3, table 2; NCCL's model.
    """
    if kind is CollectiveKind.SLICE:
        return 0.0
    if kind is CollectiveKind.SEND_RECV:
        return links.neighbour_link(axes).all_gather_s(payload_bytes)
    if kind is CollectiveKind.PERMUTE:
        return links.permute_link(axes).all_gather_s(payload_bytes)
    if kind is CollectiveKind.ALL_TO_ALL:
        return all_to_all_s(axes, payload_bytes, links, copies)
    if kind is CollectiveKind.ALL_REDUCE and (link := links.all_reduce_link(axes)) is not None:
        return link.all_gather_s(payload_bytes)
    return nccl_factors(kind).passes * links.gather_link(axes).all_gather_s(payload_bytes)


def ring_s(axes: Axes, array_bytes: Value, num_devices: Value, links: GroupLinks) -> Value:
    """Return the seconds in which `num_devices` shards of an array of `array_bytes` go around a ring, a hop at a time.

    Every step takes as long as its slowest hop: where the ring leaves a node one card carries it, unlike a collective, which
    uses the cards of all devices of the node. Source: Liu et al. 2023, Ring Attention; sends and receives between neighbours.
    """
    return (num_devices - 1) * links.neighbour_link(axes).all_gather_s(array_bytes / num_devices)


def all_to_all_s(axes: Axes, shard_bytes: Value, links: GroupLinks, copies: Value = 1) -> Value:
    """Return the seconds of an AllToAll of shards of `shard_bytes`: a quarter of an AllGather on a bidirectional ring (S2)."""
    cuts = links.group_cuts(axes)
    array_bytes = shard_bytes
    for cut in cuts:
        array_bytes = array_bytes * cut.size
    if isinstance(links.topology, Torus):
        return all_to_all_link(links.topology, cuts).all_gather_s(array_bytes)
    if isinstance(links.topology, Pods):
        return pods_all_to_all_link(links.topology, cuts).all_gather_s(array_bytes)
    return array_bytes * all_to_all_seconds_per_byte(links.topology, cuts, copies) + links.gather_link(axes).latency_s
