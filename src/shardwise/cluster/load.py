"""Clusters by name: the shorthand of chip and size, processes of this host, or a file of one's own."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster.chips import catalogue_entry, load_chip
from shardwise.cluster.cluster import Cluster, parse_shorthand
from shardwise.cluster.networks import switched_of, torus_of
from shardwise.cluster.own import read_cluster
from shardwise.cluster.topology import Switched, Tier
from shardwise.errors import InputError


def load_cluster(text: str) -> Cluster:
    """A cluster from its shorthand (`tpu-v5p:16x20x28`, `h100:512`, `local:4`) or its own file (`my-cluster.toml`).

    `local:N` is N processes that share the host of the catalogue's `cpu`. Raises `InputError`.
    """
    if text.strip().lower().endswith(".toml"):
        return read_cluster(text.strip())
    name, shape = parse_shorthand(text)
    if name == "local":
        return _local(text, shape)
    entry = catalogue_entry(name)
    build = torus_of if "torus" in entry else switched_of
    return Cluster(name=text.strip().lower(), chip=load_chip(name), topology=build(name, entry, shape))


def _local(text: str, shape: tuple[int, ...]) -> Cluster:
    """Processes that share one host: each has an equal part of it, and what one sends another reads from memory.

    Assumes: every byte sent is written once and read once, so half of the memory's bandwidth; no latency. A bound.
    """
    if len(shape) != 1:
        raise InputError(f"cluster: found {text!r}; local:N with a number of processes is required, such as local:4")
    host, count = load_chip("cpu"), shape[0]
    shared = f"an equal part, 1/{count}, of the catalogue's cpu: "
    chip = replace(
        host, name="local", peak_flops_per_s={dtype: peak / count for dtype, peak in host.peak_flops_per_s.items()},
        memory_bytes=host.memory_bytes / count, memory_bytes_per_s=host.memory_bytes_per_s / count,
        host_shape=(count,), sources={key: shared + source for key, source in host.sources.items()},
    )  # fmt: skip
    tier = Tier(
        name="shared memory", size=count, bytes_per_s=chip.memory_bytes_per_s / 2, fraction=1.0, hop_latency_s=0.0
    )
    return Cluster(name=text.strip().lower(), chip=chip, topology=Switched(tiers=(tier,)))
