"""Physical networks: a torus of direct links, or tiers of switches.

Both are an ordered list of *levels* that a placement cuts into factors: the axes of the torus, or the tiers of the
switch from the inside out. What a group of devices gets from its cut of each level is a `Link`: the time that an
AllGather takes per byte of the gathered array, and its latency. Everything is arithmetic on numbers or arrays of them.
"""

from __future__ import annotations

from shardwise.cluster.links import Cut, Link
from shardwise.cluster.switched import Switched, Tier
from shardwise.cluster.torus import Torus, WrapRule

Topology = Torus | Switched

__all__ = ["Cut", "Link", "Switched", "Tier", "Topology", "Torus", "WrapRule"]
