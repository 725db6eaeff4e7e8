"""Physical networks: a torus of direct links, pods of such a torus on the data-centre network, or tiers of switches.

All are an ordered list of *levels* that a placement cuts into factors: the axes of the torus and then its pods, or the
tiers of the switch from the inside out. What a group of devices gets from its cut of each level is a `Link`: the time that an
AllGather takes per byte of the gathered array, and its latency. Everything is arithmetic on numbers or arrays of them.
"""

from __future__ import annotations

from shardwise.network.links import Cut, Link
from shardwise.network.pods import Pods
from shardwise.network.switched import Switched, Tier
from shardwise.network.torus import Torus, WrapRule

Topology = Torus | Pods | Switched

__all__ = ["Cut", "Link", "Pods", "Switched", "Tier", "Topology", "Torus", "WrapRule"]
