"""Closed forms of collectives between pods: each is its part inside a pod, on the torus, and its part between pods.

`num_bytes` is the whole array V, `inside` the devices of the group in one of its p pods, so that N = p · inside. A device
has W_dcn, its part of its host's egress. All gathers and reductions are `Pods.link`; the rest is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwise.errors import chosen
from shardwise.network.links import Cut, Link
from shardwise.network.nccl import Operation, form_of
from shardwise.network.pods import Pods, num_inside
from shardwise.network.torus_collectives import Cost, all_to_all_link, broadcast_link
from shardwise.symbolic import maximum

IN_TURN, AT_ONCE = "one level after the other", "levels at once"


def pods_costs(
    operation: Operation, num_bytes: float, pods: Pods, cuts: Sequence[Cut], *, one_way: bool = False
) -> Mapping[str, Cost]:
    """Latency and streaming time over a group that spans pods: as it is priced first, then what it could be at most.

    `AT_ONCE` is the bound of gathers and reductions whose levels are pipelined, so that the slower one sets the pace.
    """
    form, (name, link_of) = form_of(operation), chosen(_LINKS, operation, "collective")
    times = form.times
    found = {name: _cost(pods, num_bytes, link_of(pods, cuts, one_way), times)}
    if form.reduces:
        inner, between = pods.torus.link(cuts[:-1], one_way=one_way), pods.between(cuts)
        pace = maximum(inner.seconds_per_byte, between)
        found[AT_ONCE] = _cost(pods, num_bytes, Link(pace, inner.latency_s, additive=False), times)
    return found


def pods_all_to_all_link(pods: Pods, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
    """What an AllToAll gets, per byte of the whole array V: what stays in a pod and what leaves it move at once.

    Between pods a device sends (p-1) inside chunks of V/N^2, directly to the host of the device they are for; inside, the
    AllToAll of the pod's own V/p^2 goes over the torus. Source: S0, sections 2 and 4; `all_to_all_link`.
    """
    inner = all_to_all_link(pods.torus, cuts[:-1], one_way=one_way)
    across, inside = cuts[-1].size, num_inside(cuts)
    leaving = (across - 1) / (across * across * inside * pods.bytes_per_s)
    return Link(maximum(inner.seconds_per_byte / across**2, leaving), inner.latency_s, additive=False)


def pods_broadcast_link(pods: Pods, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
    """What a broadcast from one device gets, per byte: to its pod, then 1/inside of it from each device to every other
    pod, from pod to pod, and gathered there."""
    first, gathered = (
        broadcast_link(pods.torus, cuts[:-1], one_way=one_way),
        pods.torus.link(cuts[:-1], one_way=one_way),
    )
    passed = 1.0 / (num_inside(cuts) * pods.bytes_per_s)
    seconds = first.seconds_per_byte + passed + gathered.seconds_per_byte
    return Link(seconds, first.latency_s + gathered.latency_s, additive=False)


def _gathered(pods: Pods, cuts: Sequence[Cut], one_way: bool) -> Link:
    return pods.link(cuts, one_way=one_way)


# How each is priced, and over what link.
_LINKS: Mapping[str, tuple[str, Callable[[Pods, Sequence[Cut], bool], Link]]] = {
    "all_gather": (IN_TURN, _gathered),
    "reduce_scatter": (IN_TURN, _gathered),
    "all_reduce": (IN_TURN, _gathered),
    "all_to_all": ("direct", lambda pods, cuts, one_way: pods_all_to_all_link(pods, cuts, one_way=one_way)),
    "broadcast": (IN_TURN, lambda pods, cuts, one_way: pods_broadcast_link(pods, cuts, one_way=one_way)),
    "send_recv": ("direct", lambda pods, cuts, one_way: pods.hop(cuts)),
}


def _cost(pods: Pods, num_bytes: float, link: Link, times: int) -> Cost:
    hop_s = pods.torus.hop_latency_s
    return Cost(
        latency_s=times * link.latency_s, bandwidth_s=times * num_bytes * link.seconds_per_byte,
        hops=times * round(link.latency_s / hop_s) if hop_s else 0,
    )  # fmt: skip
