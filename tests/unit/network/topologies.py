"""Topologies of clusters by name, of a required kind."""

from __future__ import annotations

from typing import TypeVar

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.torus import Torus

Kind = TypeVar("Kind", Torus, Switched, Pods)


def load_topology(cluster: str, kind: type[Kind]) -> Kind:
    """Return the topology of a cluster, which must be of the kind."""
    topology = load_cluster(cluster).topology
    assert isinstance(topology, kind)
    return topology
