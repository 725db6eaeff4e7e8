"""Seconds of a collective on a link."""

from __future__ import annotations

from shardwise.cluster.topology import Link
from shardwise.sharding.collective import Kind
from shardwise.symbolic import Value


def collective_s(kind: Kind, payload_bytes: Value, link: Link) -> Value:
    """Seconds that a collective takes on a group's link.

    payload_bytes: see `Collective.payload_elements`; the whole gathered array of an AllGather, the summand of a reduction.
    AllGather and ReduceScatter take the same time, an AllReduce is one after the other, and an AllToAll of an array
    moves a quarter of an AllGather's hops on a bidirectional ring (S2; S3, table 2). The (n-1)/n is in the link.
    """
    if kind is Kind.SLICE:
        return 0.0
    if kind is Kind.ALL_REDUCE:
        return 2.0 * link.all_gather_s(payload_bytes)
    if kind is Kind.ALL_TO_ALL:
        return 0.25 * link.all_gather_s(payload_bytes)
    return link.all_gather_s(payload_bytes)
