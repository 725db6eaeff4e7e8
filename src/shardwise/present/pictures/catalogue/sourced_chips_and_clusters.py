"""Every value of a chip, of a cluster and of their networks, with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from shardwise.hardware import Chip, Pods, Topology, Torus, get_catalog_entry, load_chip, load_cluster
from shardwise.hardware.network.torus import hop_distances
from shardwise.values import SourcedValue, parse_quantity


def chip_values(name: str) -> list[SourcedValue]:
    """A chip of the catalogue and the network that it comes with. Raises `InputError` for an unknown name."""
    entry = get_catalog_entry(name)
    return [*_chip_values(load_chip(name)), *_network_values(entry, entry["sources"])]


def _chip_values(chip: Chip) -> Iterator[SourcedValue]:
    """Every value of a chip; what has no source is None (estimates take 1 for a fraction and 0 for the runtime: a bound)."""
    values = asdict(chip)
    for key in ("name", "base", "sources"):
        values.pop(key)
    for dtype, peak in values.pop("peak_flops_per_s").items():
        yield f"peak_flops_per_s.{dtype}", peak, chip.sources.get("peak_flops_per_s", "")
    for key, value in values.items():
        bound = key in ("matmul_fraction", "memory_fraction", "runtime_bytes") and key not in chip.sources
        yield key, None if bound else value, chip.sources.get(key, "")


def _network_values(
    network: Mapping[str, Any], sources: Mapping[str, str], otherwise: str = ""
) -> Iterator[SourcedValue]:
    """Every value of a torus or of tiers of switches; a fraction of 1 and a latency of 0 were not measured."""
    counted = dict.fromkeys(("mean_hops", "diameter"), "counted on the graph of the twisted torus, shortest ways")
    known = {**counted, **({"twisted": sources["twists"]} if "twists" in sources else {}), **sources}
    for key, value in network.get("torus", {}).items():
        number = parse_quantity(value) if key == "bytes_per_s" else value
        yield f"torus.{key}", number, known.get(key, known.get("torus", otherwise))
    for key, value in network.get("pods", {}).items():
        yield f"pods.{key}", value, sources["pods"] if key == "bytes_per_s" else otherwise
    for tier in network.get("tiers", ()):
        for key, value in tier.items():
            if key != "name" and (key, value) != ("links", 0):
                about = "latency" if "latency" in key else key
                source = sources.get(f"{tier['name']}_{about}", sources.get(tier["name"], otherwise))
                if (key, value) == ("fraction", 1.0) or (about, value) == ("latency", 0.0):
                    value, source = None, ""
                yield f"{tier['name']}.{key}", parse_quantity(value) if key == "bytes_per_s" else value, source


def cluster_values(text: str) -> list[SourcedValue]:
    """A cluster, its network and its chip. Raises `InputError` for a text that is not a cluster."""
    cluster = load_cluster(text)
    own = text.strip() if text.strip().lower().endswith(".toml") else ""
    sources = {} if own else _network_sources(cluster.chip.name)
    links = _links(cluster.topology)
    if "pods" in links:
        sources = {**sources, "pods": _pods_source(cluster.chip)}
    values: list[SourcedValue] = [("num_devices", cluster.num_devices, own), ("chip", cluster.chip.name, own)]
    return [*values, *_network_values(links, sources, own), *_chip_values(cluster.chip)]


def _links(topology: Topology) -> dict[str, Any]:
    """The values of a network by what they are of: the torus, the pods, the tiers."""
    if isinstance(topology, Pods):
        return {**_links(topology.torus), "pods": {"num_pods": topology.num_pods, "bytes_per_s": topology.bytes_per_s}}
    values = asdict(topology)
    if not isinstance(topology, Torus):
        return values
    values["wraps"] = topology.wraps
    if values.pop("twisted"):
        found = hop_distances(topology.shape)
        values |= {"twisted": True, "mean_hops": found.mean, "diameter": found.diameter}
    return {"torus": values}


def _pods_source(chip: Chip) -> str:
    """The source of the rate between pods."""
    host = " x ".join(map(str, chip.host_shape or ()))
    return f"an equal part for each chip of a host of {host}: {chip.sources.get('dcn_bytes_per_s_per_host', '')}"


def _network_sources(chip: str) -> Mapping[str, str]:
    """Sources of a catalogue chip's network; what `local:N` assumes of its own."""
    if chip == "local":
        half = "half of a process's share of the memory bandwidth: a byte is written once and read once"
        return {"shared memory": half}
    sources: Mapping[str, str] = get_catalog_entry(chip)["sources"]
    return sources
