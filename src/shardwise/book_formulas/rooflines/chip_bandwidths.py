"""Bandwidths that feed a chip's arithmetic: its own memories, its host, other chips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

from shardwise.hardware import Chip, Pods, Topology, Torus, get_catalog_entry, load_chip, load_cluster
from shardwise.hardware.cluster_loading import is_cluster
from shardwise.values import lookup, parse_quantity

Origin = Literal["host", "hbm", "vmem"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)


def transfer_rates(chip: Chip, origin: Origin = "hbm") -> dict[str, float]:
    """Return the bytes/s of each transfer between the operands' memory and the matrix unit, by name, in order.

    From the host: PCIe, then memory, then on-chip memory if its rate has a source; from HBM: memory alone, as the books count;
    from VMEM: on-chip memory alone. Raises `MissingValueError` for a rate without a source, `InputError` for another origin.
    Source: the book, "TPUs", questions 3, 4 and 6."""
    return lookup(_TRANSFERS, origin, "origin")(chip)


def _from_host(chip: Chip) -> dict[str, float]:
    rates = {"pcie": _rate(chip, "pcie_bytes_per_s"), "memory": chip.memory_bytes_per_s}
    return rates | ({} if chip.vmem_bytes_per_s is None else {"vmem": chip.vmem_bytes_per_s})


_TRANSFERS: Mapping[str, Callable[[Chip], dict[str, float]]] = {
    "host": _from_host,
    "hbm": lambda chip: {"memory": chip.memory_bytes_per_s},
    "vmem": lambda chip: {"vmem": _rate(chip, "vmem_bytes_per_s")},
}


def _rate(chip: Chip, name: str) -> float:
    rate = chip.require_value(name)
    assert isinstance(rate, (int, float))
    return float(rate)


def link_bandwidths(chip: Chip, links: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes/s of everything beside memory that has a source: on-chip memory, the host over PCIe, links to other
    chips."""
    chip_rates = {"VMEM": chip.vmem_bytes_per_s, "PCIe": chip.pcie_bytes_per_s}
    return {name: rate for name, rate in chip_rates.items() if rate is not None} | dict(links)


def load_chip_and_links(text: str) -> tuple[Chip, Mapping[str, float]]:
    """Load a chip by name, shorthand or file, with the bytes/s of its links: a torus axis both ways, egress to each tier."""
    if is_cluster(text):
        cluster = load_cluster(text)
        return cluster.chip, _link_rates(cluster.topology)
    name = text.strip().lower()
    listed = get_catalog_entry(name)
    if "torus" in listed:
        return load_chip(name), {"torus axis": 2.0 * parse_quantity(listed["torus"]["bytes_per_s"])}
    return load_chip(name), {tier["name"]: parse_quantity(tier["bytes_per_s"]) for tier in listed.get("tiers", ())}


def _link_rates(topology: Topology) -> Mapping[str, float]:
    if isinstance(topology, Torus):
        return {"torus axis": topology.axis_bytes_per_s()}
    if isinstance(topology, Pods):
        return {**_link_rates(topology.torus), "between pods": topology.bytes_per_s}
    return {tier.name: tier.bytes_per_s for tier in topology.tiers}
