"""Time of a collective on a network: its bound, where that changes, and how other algorithms compare.

`collective_report` takes a group of devices on any network. The closed forms are in `torus.py`, `pods.py` and `switches.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from shardwise.hardware.network.links import (
    COLLECTIVE_NAMES,
    CollectiveCost,
    CollectiveName,
    Cut,
    algbw,
    busbw,
    received_bytes,
)
from shardwise.hardware.network.pods import Pods, pod_collective_costs
from shardwise.hardware.network.switches import IN_SWITCH, Switched, switch_collective_costs
from shardwise.hardware.network.topology import Topology
from shardwise.hardware.network.torus import Torus, WrapRule, torus_collective_cost
from shardwise.values import Flat, Payload, raise_problems

Bound = Literal["latency", "bandwidth"]
NEEDS_REDUCING_SWITCH = "needs switches that reduce, such as NVSwitch from the third generation on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to carry a collective out: seconds, hops, and NCCL's bandwidths in bytes/s. `condition`: what it needs."""

    name: str
    time_s: float
    latency_s: float
    bandwidth_s: float
    hops: int
    algbw: float
    busbw: float
    condition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveReport:
    """A collective over a group of devices, as the fastest algorithm that its network is sure to have carries it out.

    bytes: the whole array: what a device has after an AllGather or before a reduction; of an AllToAll all devices' shards.
    axes, wraps: devices of the group on each axis (or tier, from the inside out) and whether it goes all around it (none
        behind switches); the last axis are the pods. A group inside one pod is on a torus.
    hops: sequential messages that the latency counts.
    latency_s, bandwidth_s: time_s is the larger on a torus and between pods, their sum behind switches.
    crossover_bytes: the size of the array at which both are equal; below it the collective is latency-bound.
    algbw, busbw: bytes/s by NCCL's conventions.
    """

    kind: CollectiveName
    bytes: float
    network: Literal["torus", "pods", "switched"]
    axes: tuple[int, ...]
    wraps: tuple[bool, ...]
    num_devices: int
    hops: int
    time_s: float
    latency_s: float
    bandwidth_s: float
    bound: Bound
    crossover_bytes: float
    bytes_received_per_device: float
    algbw: float
    busbw: float
    algorithm: str
    alternatives: tuple[Algorithm, ...]

    @property
    def hop_s(self) -> float:
        """Seconds of one hop, if all are equal, as an AllGather's are."""
        return self.time_s / max(1, self.hops)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCollective:
    """A collective's report with the name of the chip or cluster that it runs on, and its network.

    `is_one_way`: rings of a torus are used in one direction only.

    >>> import shardwise as sw
    >>> collective = sw.collective("all-gather", "1GB", axes=(4, 4), on="tpu-v5e")
    >>> collective.report.num_devices, collective.report.bound
    (16, 'bandwidth')
    """

    report: CollectiveReport
    on: str
    topology: Topology
    is_one_way: bool = False

    @property
    def torus(self) -> Torus | None:
        """The torus, or that of a pod; None behind switches."""
        torus = self.topology.torus if isinstance(self.topology, Pods) else self.topology
        return torus if isinstance(torus, Torus) else None


def collective_report(
    operation: CollectiveName, num_bytes: float, topology: Topology, cuts: Sequence[Cut], *, one_way: bool = False
) -> CollectiveReport:
    """Return the report of a collective over the group of devices that spans `cuts[i]` of level i.

    one_way: rings of a torus are used in one direction only. Raises `InputError` for an unknown operation, no bytes or a
    group of one device.
    """
    _check(operation, num_bytes, cuts)
    if isinstance(topology, Pods) and cuts[-1].size == 1:
        topology, cuts = topology.torus, cuts[:-1]
    collective = _GroupCollective(operation, num_bytes, cuts)
    network: Literal["torus", "pods", "switched"] = "torus"
    if isinstance(topology, Torus):
        fastest, *alternatives = _torus_options(collective, topology, one_way)
        wraps = tuple(bool(ring) for ring in topology.ring_axes(cuts))
    elif isinstance(topology, Pods):
        costs, network = pod_collective_costs(operation, num_bytes, topology, cuts, one_way=one_way), "pods"
        fastest, *alternatives = (collective.algorithm(name, cost) for name, cost in costs.items())
        wraps = (*(bool(ring) for ring in topology.torus.ring_axes(cuts[:-1])), False)
    else:
        fastest, *alternatives = _switched_options(collective, topology)
        wraps, network = (), "switched"
    return CollectiveReport(
        kind=operation, bytes=num_bytes, network=network, axes=tuple(cut.size for cut in cuts),
        wraps=wraps, num_devices=collective.num_devices, hops=fastest.hops, time_s=fastest.time_s,
        latency_s=fastest.latency_s, bandwidth_s=fastest.bandwidth_s,
        bound="latency" if fastest.latency_s >= fastest.bandwidth_s else "bandwidth",
        crossover_bytes=num_bytes * fastest.latency_s / fastest.bandwidth_s,
        bytes_received_per_device=received_bytes(operation, num_bytes, collective.num_devices),
        algbw=fastest.algbw, busbw=fastest.busbw, algorithm=fastest.name, alternatives=tuple(alternatives),
    )  # fmt: skip


def _check(operation: str, num_bytes: float, cuts: Sequence[Cut]) -> None:
    problems = []
    if operation not in COLLECTIVE_NAMES:
        problems.append(f"collective: found {operation!r}; one of {', '.join(COLLECTIVE_NAMES)} is required")
    if not num_bytes > 0:
        problems.append(f"collective: found {num_bytes} bytes; more than 0 are required")
    if math.prod(cut.size for cut in cuts) < 2:
        problems.append("collective: found a group of 1 device; at least 2 devices are required, such as --axes 4")
    raise_problems(problems)


@dataclass(frozen=True, slots=True)
class _GroupCollective:
    """Collective over the group of devices that spans `cuts`."""

    operation: CollectiveName
    num_bytes: float
    cuts: Sequence[Cut]

    @property
    def num_devices(self) -> int:
        return math.prod(cut.size for cut in self.cuts)

    def algorithm(self, name: str, cost: CollectiveCost, *, additive: bool = False) -> Algorithm:
        """Return an algorithm by its cost; `additive`: the latency adds to the streaming time."""
        parts = (cost.latency_s, cost.bandwidth_s)
        time_s = sum(parts) if additive else max(parts)
        sizes = self.operation, self.num_bytes, self.num_devices
        return Algorithm(
            name=name, time_s=time_s, latency_s=cost.latency_s, bandwidth_s=cost.bandwidth_s, hops=cost.hops,
            algbw=algbw(*sizes, time_s), busbw=busbw(*sizes, time_s),
            condition=NEEDS_REDUCING_SWITCH if name == IN_SWITCH else "",
        )  # fmt: skip


def _torus_options(collective: _GroupCollective, torus: Torus, one_way: bool) -> list[Algorithm]:
    """Return the group as it lies, then as rings both ways, as rings one way and as lines."""
    operation, cuts = collective.operation, collective.cuts

    def priced(name: str, network: Torus, *, one_way: bool) -> Algorithm:
        cost = torus_collective_cost(operation, collective.num_bytes, network, cuts, one_way=one_way)
        return collective.algorithm(name, cost)

    if operation == "send_recv":
        return [priced("direct", torus, one_way=one_way)]
    full_torus = replace(torus, shape=tuple(cut.size * cut.stride for cut in cuts), twisted=False)
    rings = {
        "ring": priced("ring", replace(full_torus, wrap_rule="always"), one_way=False),
        "ring, one way": priced("ring, one way", replace(full_torus, wrap_rule="always"), one_way=True),
        "line": priced("line", replace(full_torus, wrap_rule="never"), one_way=False),
    }
    shapes = {bool(ring) for ring, cut in zip(torus.ring_axes(cuts), cuts, strict=True) if cut.size > 1}
    name = " and ".join(("ring" if ring else "line") for ring in sorted(shapes, reverse=True))
    name = "twisted" if not one_way and any(is_twisted for is_twisted, _ in torus.twisted_subgroups(cuts)) else name
    name += ", one way" if one_way and True in shapes else ""
    return [priced(name, torus, one_way=one_way), *(algorithm for key, algorithm in rings.items() if key != name)]


def _switched_options(collective: _GroupCollective, network: Switched) -> list[Algorithm]:
    """Return the fastest algorithm that any switch allows, then the others by time."""
    costs = switch_collective_costs(collective.operation, collective.num_bytes, network, collective.cuts)
    algorithms = [collective.algorithm(name, cost, additive=True) for name, cost in costs.items()]
    if network.tiers[0].reduces:  # as the cluster's file says
        algorithms = [replace(algorithm, condition="") for algorithm in algorithms]
    algorithms.sort(key=lambda option: (option.time_s, option.name))
    fastest = next(option for option in algorithms if not option.condition)
    return [fastest, *(option for option in algorithms if option is not fastest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord(Payload):
    """A collective, where it runs, and by which rule an axis of the torus wraps (null behind switches)."""

    SCHEMA = "shardwise.collective/1"
    on: str
    wrap_rule: WrapRule | None
    report: Annotated[CollectiveReport, Flat]

    @classmethod
    def of(cls, collective: PlacedCollective) -> CollectiveRecord:
        """Return the record of a collective."""
        return cls.from_attributes(collective, wrap_rule=collective.torus.wrap_rule if collective.torus else None)
