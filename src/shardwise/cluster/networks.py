"""The network that so many devices of a chip of the catalogue form: a torus of direct links, or tiers of switches."""

from __future__ import annotations

import math

from shardwise.cluster.chips import catalogue_entry
from shardwise.cluster.cluster import nearest, spread
from shardwise.cluster.reader import Entry
from shardwise.cluster.topology import Switched, Tier, Topology, Torus
from shardwise.errors import InputError, MissingValueError
from shardwise.units import parse_quantity


def topology_of_shape(name: str, shape: tuple[int, ...]) -> Topology:
    """The network that a bare chip's devices would form: a torus of this shape, or switches over so many devices.

    A torus of any shape is given, whether or not the vendor sells it. Raises `InputError` for an unknown chip.
    """
    entry = catalogue_entry(name)
    if "torus" in entry:
        return links_of(entry["torus"], shape)
    return switched_of(name, entry, (math.prod(shape),))


def torus_of(name: str, entry: Entry, shape: tuple[int, ...]) -> Topology:
    torus = entry["torus"]
    pod = sorted(torus.get("pod", ()))
    most = torus.get("pod_chips", math.prod(pod))
    if len(shape) != torus["num_axes"]:
        example = "x".join(map(str, torus.get("pod", (4,) * torus["num_axes"])))
        raise InputError(
            f"cluster: {name} is a torus of {torus['num_axes']} axes; a shape such as {name}:{example} is required"
        )
    if math.prod(shape) > most or any(size > room for size, room in zip(sorted(shape), pod, strict=False)):
        whole = f", {'x'.join(map(str, torus['pod']))} ({most} chips)" if pod else f" of {most} chips"
        raise InputError(f"cluster: {name}:{'x'.join(map(str, shape))} is larger than a pod{whole}")
    return links_of(torus, shape)


def links_of(torus: Entry, shape: tuple[int, ...]) -> Torus:
    """The torus of a shape. `whole_pod`: the whole pod wraps, a smaller slice does not."""
    rule = torus["wrap_rule"]
    if rule == "whole_pod":
        rule = "always" if sorted(shape) == sorted(torus["pod"]) else "never"
    return Torus(
        shape=shape, bytes_per_s=parse_quantity(torus["bytes_per_s"]), hop_latency_s=torus["hop_latency_s"], wrap_rule=rule
    )  # fmt: skip


def switched_of(name: str, entry: Entry, shape: tuple[int, ...]) -> Topology:
    if len(shape) != 1:
        raise InputError(
            f"cluster: {name} is connected by switches; a count such as {name}:512 is required, found {shape}"
        )
    count, tiers = shape[0], entry["tiers"]
    groups = [tier["size"] for tier in tiers if "size" in tier]
    if len(groups) == len(tiers):
        if count > math.prod(groups):
            raise MissingValueError(
                f"cluster: {name} has no sourced network between nodes of {math.prod(groups)}; "
                f"{name}:{math.prod(groups)} is the largest, or describe the network in a .toml file"
            )
        groups = groups[:-1]
    host = math.prod(entry.get("host_shape", groups[:1]))
    sizes = spread(count, groups, host)
    if sizes is None:
        low, high = nearest(count, groups, host)
        parts = "" if host == groups[0] else f" or equal parts of them, in hosts of {host}"
        raise InputError(
            f"cluster: {name} comes in nodes of {groups[0]}{parts}; {count} is no multiple of it, "
            f"the nearest counts are {low} and {high}"
        )
    return Switched(tiers=tuple(_tier(tier, size) for tier, size in zip(tiers, sizes, strict=True)))


def _tier(entry: Entry, size: int) -> Tier:
    """A tier; without a measurement the fraction is 1 and latencies are 0, and times over it are a bound."""
    return Tier(
        name=entry["name"], size=size, bytes_per_s=parse_quantity(entry["bytes_per_s"]),
        fraction=entry.get("fraction", 1.0), hop_latency_s=entry.get("hop_latency_s", 0.0),
        base_latency_s=entry.get("base_latency_s", 0.0), links=entry.get("links", 0),
    )  # fmt: skip
