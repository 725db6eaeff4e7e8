"""Seconds of a collective on the links of the group that runs it."""

from __future__ import annotations

from shardwise.network.placed import Links
from shardwise.network.pod_collectives import pods_all_to_all_link
from shardwise.network.switched_collectives import all_to_all_seconds_per_byte
from shardwise.network.topology import Pods, Torus
from shardwise.network.torus_collectives import all_to_all_link
from shardwise.sharding.collective import Kind
from shardwise.sharding.spec import Axes
from shardwise.symbolic import Value

# Parts of a collective's time, by the terms of communication.
SOURCE = (
    "seconds a byte and latency of the links that a group has: nccl-tests, doc/PERFORMANCE.md; rings of a torus: S2"
)
# Collectives that take as long as a gather.
GATHERS = {Kind.ALL_GATHER: 1.0, Kind.REDUCE_SCATTER: 1.0, Kind.ALL_REDUCE: 2.0}


def collective_s(kind: Kind, axes: Axes, payload_bytes: Value, links: Links, copies: Value = 1) -> Value:
    """Seconds that a collective over `axes` takes; its kind says which links count.

    payload_bytes: see `Collective.payload_elements`; the whole gathered array of an AllGather, the summand of a reduction,
    a device's shard of an AllToAll, what a device receives in a permute or a send. AllGather and ReduceScatter take the
    same time, an AllReduce is one after the other. The (n-1)/n is in the link. Sources: S2; S3, table 2; NCCL's model.
    """
    if kind is Kind.SLICE:
        return 0.0
    if kind is Kind.SEND_RECV:
        return links.hop(axes).all_gather_s(payload_bytes)
    if kind is Kind.PERMUTE:
        return links.permute(axes).all_gather_s(payload_bytes)
    if kind is Kind.ALL_TO_ALL:
        return all_to_all_s(axes, payload_bytes, links, copies)
    return GATHERS[kind] * links.group(axes).all_gather_s(payload_bytes)


def ring_s(axes: Axes, whole_bytes: Value, num_devices: Value, links: Links) -> Value:
    """Seconds in which `num_devices` shards of an array of `whole_bytes` go around a ring, a hop at a time.

    Every step takes as long as its slowest hop: where the ring leaves a node one card carries it, unlike a collective, which
    uses the cards of all devices of the node. Source: Liu et al. 2023, Ring Attention; sends and receives between neighbours.
    """
    return (num_devices - 1) * links.hop(axes).all_gather_s(whole_bytes / num_devices)


def all_to_all_s(axes: Axes, shard_bytes: Value, links: Links, copies: Value = 1) -> Value:
    """Seconds of an AllToAll of shards of so many bytes: a quarter of an AllGather on a bidirectional ring (S2)."""
    cuts = links.joined(axes)
    whole = shard_bytes
    for cut in cuts:
        whole = whole * cut.size
    if isinstance(links.topology, Torus):
        return all_to_all_link(links.topology, cuts).all_gather_s(whole)
    if isinstance(links.topology, Pods):
        return pods_all_to_all_link(links.topology, cuts).all_gather_s(whole)
    return whole * all_to_all_seconds_per_byte(links.topology, cuts, copies) + links.group(axes).latency_s
