"""The same cluster with another number of devices: what is left of it when hosts have gone."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster.chips import LOCAL
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.load import load_cluster
from shardwise.cluster.networks import tiers_over
from shardwise.errors import InputError
from shardwise.network.topology import Switched


def resized(cluster: Cluster, num_devices: int) -> Cluster:
    """The cluster with so many devices of the same hosts, at the rates that were measured on it, if any were.

    Raises `InputError` for a number that its network does not have, and for a torus, of which a part is a slice with a shape.

    >>> resized(load_cluster("h100:64"), 56).name
    'h100:56'
    >>> resized(load_cluster("local:4"), 2).num_devices
    2
    """
    base = cluster.name.partition(":")[0]
    name = f"{base}:{num_devices}"
    if cluster.chip.name == LOCAL:
        return replace(load_cluster(name), calibration=cluster.calibration)
    network = (
        tiers_over(cluster.topology, cluster.chip, num_devices) if isinstance(cluster.topology, Switched) else None
    )
    if network is None:
        raise InputError(
            f"cluster: {cluster.name} has no part of {num_devices} devices; whole hosts and leaves of a switched network are "
            "required, or a plan for the cluster that there is"
        )
    return replace(cluster, name=name, topology=network)
