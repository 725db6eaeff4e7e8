"""Chips and clusters from the catalogue's TOML files; adding a chip touches one data file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from shardwise.cluster.chip import Chip
from shardwise.cluster.cluster import Cluster, parse_shorthand
from shardwise.cluster.topology import Switched, Tier, Topology, Torus
from shardwise.errors import InputError
from shardwise.units import parse_quantity

Entry = Mapping[str, Any]


@lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Entry]:
    """Every chip's table, with the names of its sources replaced by the sources."""
    entries: dict[str, Entry] = {}
    for file in sorted(resources.files("shardwise.cluster").joinpath("catalog").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
            known = tables.pop("sources")
            for name, table in tables.items():
                entries[name] = {**table, "sources": {field: known[key] for field, key in table["sources"].items()}}
    return entries


def chip_names() -> tuple[str, ...]:
    """Names of the chips in the catalogue."""
    return tuple(_catalogue())


def _entry(name: str) -> Entry:
    if name not in _catalogue():
        raise InputError(f"chip: found {name!r}; the catalogue has {', '.join(chip_names())}")
    return _catalogue()[name]


def load_chip(name: str) -> Chip:
    """A chip of the catalogue by name. Raises `InputError` that lists the names."""
    entry = _entry(name)
    return Chip(
        name=name,
        vendor=entry["vendor"],
        peak_flops_per_s={dtype: parse_quantity(peak) for dtype, peak in entry["peak_flops_per_s"].items()},
        memory_bytes=parse_quantity(entry["memory_bytes"]),
        memory_bytes_per_s=parse_quantity(entry["memory_bytes_per_s"]),
        runtime_bytes=parse_quantity(entry.get("runtime_bytes", 0)),
        matmul_fraction=entry.get("matmul_fraction", 1.0),
        memory_fraction=entry.get("memory_fraction", 1.0),
        sources=entry["sources"],
    )


def load_cluster(text: str) -> Cluster:
    """A cluster from its shorthand, such as `tpu-v5p:16x20x28` or `h100:512`. Raises `InputError`."""
    name, shape = parse_shorthand(text)
    entry = _entry(name)
    build = _torus if "torus" in entry else _switched
    return Cluster(name=text.strip().lower(), chip=load_chip(name), topology=build(name, entry, shape))


def topology_of_shape(name: str, shape: tuple[int, ...]) -> Topology:
    """The network that a bare chip's devices would form: a torus of this shape, or switches over so many devices.

    A torus of any shape is given, whether or not the vendor sells it. Raises `InputError` for an unknown chip.
    """
    entry = _entry(name)
    if "torus" in entry:
        return _links_of(entry["torus"], shape)
    return _switched(name, entry, (math.prod(shape),))


def _torus(name: str, entry: Entry, shape: tuple[int, ...]) -> Topology:
    torus = entry["torus"]
    pod = sorted(torus["pod"])
    if len(shape) != torus["num_axes"]:
        example = "x".join(map(str, torus["pod"]))
        raise InputError(
            f"cluster: {name} is a torus of {torus['num_axes']} axes; a shape such as {name}:{example} is required"
        )
    if any(size > limit for size, limit in zip(sorted(shape), pod, strict=True)):
        raise InputError(
            f"cluster: {name}:{'x'.join(map(str, shape))} is larger than a pod, {'x'.join(map(str, torus['pod']))} "
            f"({math.prod(pod)} chips)"
        )
    return _links_of(torus, shape)


def _links_of(torus: Entry, shape: tuple[int, ...]) -> Torus:
    return Torus(
        shape=shape, bytes_per_s=parse_quantity(torus["bytes_per_s"]), hop_latency_s=torus["hop_latency_s"],
        wrap_rule=torus["wrap_rule"],
    )  # fmt: skip


def _switched(name: str, entry: Entry, shape: tuple[int, ...]) -> Topology:
    if len(shape) != 1:
        raise InputError(
            f"cluster: {name} is connected by switches; a count such as {name}:512 is required, found {shape}"
        )
    count, inner = shape[0], entry["tiers"][0]["size"]
    if count > inner and count % inner:
        low = count // inner * inner
        raise InputError(
            f"cluster: {name} comes in nodes of {inner}; {count} is no multiple of it, "
            f"the nearest counts are {low} and {low + inner}"
        )
    sizes = (min(count, inner), -(-count // inner))
    return Switched(tiers=tuple(_tier(tier, size) for tier, size in zip(entry["tiers"], sizes, strict=True)))


def _tier(entry: Entry, size: int) -> Tier:
    return Tier(
        name=entry["name"], size=size, bytes_per_s=parse_quantity(entry["bytes_per_s"]), fraction=entry["fraction"],
        hop_latency_s=entry["hop_latency_s"], base_latency_s=entry["base_latency_s"],
    )  # fmt: skip
