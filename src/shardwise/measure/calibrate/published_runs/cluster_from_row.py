"""A row's chip, devices and links as a `Cluster`; its software as a stack, with facts beyond the constants."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.hardware import (
    Calibration,
    Chip,
    Cluster,
    Stack,
    Switched,
    Topology,
    chip_names,
    get_catalog_entry,
    load_chip,
    match_stack,
    published_calibration,
    relative_clock,
)
from shardwise.hardware.catalog_networks import build_shorthand_topology, resize_tiers
from shardwise.hardware.cluster import Shorthand
from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow

# Memory kinds of which a chip's name tells another bandwidth than the catalogue's.
# Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100 with HBM2e at 2.4 TB/s.
NAMED_BANDWIDTHS = {("h100", "hbm2e"): 2.4e12}
TWO_CORES = ("tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5p")  # N in their names (v5p-256) counts TensorCores, two to a chip


def read_cluster(cells: RowCells, user_cluster: Cluster | None = None) -> Cluster:
    """Return the cluster of a row: of a chip of the catalogue, or `user_cluster` if the row names its chip. Raises
    `SkippedRow` if the chip is unknown, `InputError` if the vendor has no such cluster."""
    text = cells.text("chip").lower()
    if user_cluster is not None and text == user_cluster.chip.name.lower():
        return _read_user_cluster(cells, user_cluster)
    name = catalogue_name(text)
    chip = _read_chip(load_chip(name), cells, text)
    num_devices = cells.size("n_devices") or _count_in_name(text, name)
    if num_devices is None:
        raise SkippedRow("number of devices not stated", "n_devices")
    if "torus" in get_catalog_entry(name):
        num_slices, topology = _read_slices(cells, name, chip, num_devices)
        suffix = f" in {num_slices} slices" if num_slices > 1 else ""
        return Cluster(name=f"{name}:{num_devices}{suffix}", chip=chip, topology=topology)
    topology = build_shorthand_topology(Shorthand(name, (num_devices,), False, None), chip)
    assert isinstance(topology, Switched)
    return Cluster(name=f"{name}:{num_devices}", chip=chip, topology=_read_network(cells, topology))


def _read_user_cluster(cells: RowCells, user_cluster: Cluster) -> Cluster:
    """Return the cluster over the devices of a row, with the network that the row states."""
    num_devices = cells.size("n_devices")
    if num_devices is None:
        raise SkippedRow("number of devices not stated", "n_devices")
    if not isinstance(user_cluster.topology, Switched):
        if num_devices != user_cluster.num_devices:
            raise SkippedRow("of another torus than the cluster's", f"{num_devices} chips")
        return user_cluster
    network = resize_tiers(user_cluster.topology, user_cluster.chip, num_devices)
    if network is None:
        raise SkippedRow("devices do not divide evenly over the cluster's tiers", f"{num_devices} devices")
    return replace(user_cluster, topology=_read_network(cells, network))


def catalogue_name(text: str) -> str:
    """Return the catalogue's name of a chip: A100-80GB-SXM is a100-80gb, TPU-v5p-256 is tpu-v5p. Raises `SkippedRow`
    for a chip that is not stated or not in the catalogue."""
    if not text:
        raise SkippedRow("chip not stated")
    parts = re.split(r"[\s_\-]+", text.lower().removeprefix("nvidia").removeprefix("amd").strip())
    if re.fullmatch(r"v\d+[a-z]?", parts[0]) and "tpu-" + parts[0] in chip_names():
        parts = ["tpu", *parts]
    form_factor = [part for part in parts if part == "pcie"]  # another product, wherever the name has it
    stem = [part for part in parts if part != "pcie"]
    names = ("-".join(stem[:length] + form_factor) for length in range(len(stem), 0, -1))
    for chip_name in (name for name in names if name in chip_names()):
        return chip_name
    raise SkippedRow("chip not in the catalogue", text[:40])


def _count_in_name(text: str, name: str) -> int | None:
    match = re.fullmatch(r"(?:tpu-)?v\d+[a-z]?-(\d+)", text)
    return max(int(match[1]) // (2 if name in TWO_CORES else 1), 1) if match and len(match[1]) < 8 else None


def _read_chip(chip: Chip, cells: RowCells, text: str) -> Chip:
    """Return the catalogue's chip with the stated memory, and with a power limit or a kind of memory from its name."""
    memory_gb = cells.number("chip_mem_gb")
    if memory_gb and not _is_size(memory_gb, chip.memory_bytes):
        chip = replace(chip, memory_bytes=memory_gb * 1e9)
    for (name, kind), bytes_per_s in NAMED_BANDWIDTHS.items():
        if chip.name == name and kind in text:
            chip = replace(chip, memory_bytes_per_s=bytes_per_s)
    limit = re.search(r"\b(\d{2,4})w\b", text)
    if limit and chip.power_w and float(limit[1]) < chip.power_w:
        power = float(limit[1])
        chip = replace(chip, power_w=power)
        chip = replace(chip, matmul_fraction=chip.matmul_fraction * relative_clock(chip))
    return chip


def _is_size(stated_gb: float, memory_bytes: float) -> bool:
    """Return True if a row's "16 GB" is this memory: sources print GB for both GB and GiB."""
    return any(abs(stated_gb * unit / memory_bytes - 1) <= 0.01 for unit in (1e9, 2.0**30))


def _read_network(cells: RowCells, network: Switched) -> Switched:
    """Return the network with the rate between nodes that the row states, in Gb/s of a card or a node. A rate alone is
    that of a node, as IBM states it for its A100s."""
    stated = re.search(r"(?:(\d+)\s*x\s*)?[^\d]*?(\d+)\s*gb(?:ps|/s|\b)", cells.text("inter_node_link").lower())
    if not stated or len(network.tiers) < 2:
        return network
    text = cells.text("inter_node_link").lower()
    chips_per_node = cells.size("chips_per_node") or network.tiers[0].size
    node_bytes_per_s = int(stated[1] or 1) * int(stated[2]) * 1e9 / 8
    is_per_chip = re.search(r"per (gpu|device|chip)|/(gpu|device|chip)", text)
    bytes_per_s = node_bytes_per_s if is_per_chip else node_bytes_per_s / chips_per_node
    if re.search(rf"{stated[2]}\s*GB/s", cells.text("inter_node_link")):  # bytes, not bits
        bytes_per_s *= 8.0
    if not 0 < bytes_per_s < 1e13:
        raise SkippedRow("no network", f"inter_node_link is {text[:40]!r}")
    return Switched(tiers=(*network.tiers[:-1], replace(network.tiers[-1], bytes_per_s=bytes_per_s)))


def _read_slices(cells: RowCells, name: str, chip: Chip, num_chips: int) -> tuple[int, Topology]:
    """Return number and network of TPU slices: their shape as stated, or the vendor's for that many chips."""
    match = re.search(r"between (\d{1,6}) slices", cells.text("inter_node_link").lower())
    num_slices = int(match[1]) if match else 1
    if num_slices < 1 or num_chips % num_slices:
        raise SkippedRow("devices do not divide into slices", f"{num_chips} in {num_slices}")
    chips_per_slice = num_chips // num_slices
    stated = re.search(r"\b(\d{1,4}(?:x\d{1,4}){1,2})\b", cells.text("intra_node_link").lower())
    shape = tuple(map(int, stated[1].split("x"))) if stated else ()
    if math.prod(shape) != chips_per_slice:
        shape = slice_shape(chips_per_slice, get_catalog_entry(name)["torus"]["num_axes"])
    return num_slices, build_shorthand_topology(
        Shorthand(name, shape, False, num_slices if num_slices > 1 else None), chip
    )


def slice_shape(num_chips: int, num_axes: int) -> tuple[int, ...]:
    """Return the most cubic shape that Google offers: sides of 1, 2, 4, 8, 16 on 2D tori; 1, 2, multiples of 4 on 3D.
    Source: Google Cloud documentation, TPU configurations of v4, v5e, v5p and v6e."""
    allowed = [1, 2, 4, 8, 16, 32] if num_axes == 2 else [1, 2, *range(4, 65, 4)]
    shapes = list(_shapes(num_chips, num_axes, allowed))
    if not shapes:
        raise SkippedRow("no slice of so many chips", f"{num_chips} on {num_axes} axes")
    return min(shapes, key=lambda shape: (sum(shape), shape))


def _shapes(num_chips: int, num_axes: int, allowed: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the non-decreasing allowed sides whose product is `num_chips`."""
    if num_axes == 1:
        if num_chips in allowed:
            yield (num_chips,)
        return
    for side in allowed:
        if num_chips % side == 0:
            yield from (
                (side, *sides) for sides in _shapes(num_chips // side, num_axes - 1, allowed) if sides[0] >= side
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSoftware:
    """Software of a row. `fused_attention`: scores stay on the chip. `synchronises`: the host waits for the router's
    counts. `clock`: sustained clock over the chip's usual one."""

    stack: Stack
    fused_attention: bool
    has_capacity: bool
    clock: float

    def calibration(self, chip: Chip) -> Calibration:
        """Return the published calibration of the chip under this software."""
        return self.apply_to(published_calibration(chip.name, self.stack))

    def apply_to(self, calibration: Calibration) -> Calibration:
        """Return a calibration with what the row states."""
        return replace(
            calibration,
            clock=calibration.clock * self.clock,
            fused_attention=self.fused_attention,
            has_capacity=self.has_capacity,
        )


def read_software(cells: RowCells, clock: float) -> RowSoftware:
    """Return the software of a row. If tokens over a capacity are dropped, the host knows all sizes in advance."""
    stack = match_stack(cells.text("software"))
    flash_attention, routing_text = cells.flag("flash_attn"), cells.text("model") + cells.text("notes")
    return RowSoftware(
        stack=stack, fused_attention=not stack.unfused_attention if flash_attention is None else flash_attention,
        has_capacity=bool(re.search(r"token-?drop|capacity", routing_text)), clock=clock,
    )  # fmt: skip
