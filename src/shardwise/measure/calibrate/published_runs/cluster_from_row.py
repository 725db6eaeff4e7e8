"""From a row's chip, number of devices and links to a `Cluster`; from its software to a stack and the facts that its constants do
not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.hardware.calibration_constants import Calibration
from shardwise.hardware.catalog_networks import build_shorthand_topology, resize_tiers
from shardwise.hardware.chips import Chip, chip_names, get_catalog_entry, load_chip, relative_clock
from shardwise.hardware.cluster import Cluster, Shorthand
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.topology import Topology
from shardwise.hardware.published_constants import published_calibration
from shardwise.hardware.stacks import Stack, match_stack
from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow

# Memory kinds of which a chip's name tells another bandwidth than the catalogue's.
# Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100 with HBM2e at 2.4 TB/s.
NAMED_BANDWIDTHS = {("h100", "hbm2e"): 2.4e12}
TWO_CORES = ("tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5p")  # N in their names (v5p-256) counts TensorCores, two to a chip


def read_cluster(facts: RowCells, own: Cluster | None = None) -> Cluster:
    """The machine of a row: of a chip of the catalogue, or of the cluster whose chip it names.

    Raises `SkippedRow` when the chip is unknown, `InputError` when the vendor has no such cluster.
    """
    text = facts.text("chip").lower()
    if own is not None and text == own.chip.name.lower():
        return _read_user_cluster(facts, own)
    name = catalogue_name(text)
    chip = _read_chip(load_chip(name), facts, text)
    count = facts.size("n_devices") or _count_in_name(text, name)
    if count is None:
        raise SkippedRow("number of devices not stated", "n_devices")
    if "torus" in get_catalog_entry(name):
        slices, topology = _read_slices(facts, name, chip, count)
        return Cluster(
            name=f"{name}:{count}" + (f" in {slices} slices" if slices > 1 else ""), chip=chip, topology=topology
        )
    topology = build_shorthand_topology(Shorthand(name, (count,), False, None), chip)
    assert isinstance(topology, Switched)
    return Cluster(name=f"{name}:{count}", chip=chip, topology=_read_network(facts, topology))


def _read_user_cluster(facts: RowCells, own: Cluster) -> Cluster:
    """The cluster over the devices of a row, with the network that the row states."""
    count = facts.size("n_devices")
    if count is None:
        raise SkippedRow("number of devices not stated", "n_devices")
    if not isinstance(own.topology, Switched):
        if count != own.num_devices:
            raise SkippedRow("of another torus than the cluster's", f"{count} chips")
        return own
    network = resize_tiers(own.topology, own.chip, count)
    if network is None:
        raise SkippedRow("devices do not divide evenly over the cluster's tiers", f"{count} devices")
    return replace(own, topology=_read_network(facts, network))


def catalogue_name(text: str) -> str:
    """The catalogue's name of a chip as a source writes it: A100-80GB-SXM is a100-80gb, TPU-v5p-256 is tpu-v5p."""
    if not text:
        raise SkippedRow("chip not stated")
    parts = re.split(r"[\s_\-]+", text.lower().removeprefix("nvidia").removeprefix("amd").strip())
    if re.fullmatch(r"v\d+[a-z]?", parts[0]) and "tpu-" + parts[0] in chip_names():
        parts = ["tpu", *parts]
    form = [part for part in parts if part == "pcie"]  # another product, wherever the name has it
    stem = [part for part in parts if part != "pcie"]
    names = ("-".join(stem[:length] + form) for length in range(len(stem), 0, -1))
    for known in (name for name in names if name in chip_names()):
        return known
    raise SkippedRow("chip not in the catalogue", text[:40])


def _count_in_name(text: str, name: str) -> int | None:
    found = re.fullmatch(r"(?:tpu-)?v\d+[a-z]?-(\d+)", text)
    return max(int(found[1]) // (2 if name in TWO_CORES else 1), 1) if found and len(found[1]) < 8 else None


def _read_chip(chip: Chip, facts: RowCells, text: str) -> Chip:
    """The catalogue's chip with the memory that is stated, and a power limit or another kind of memory from its name."""
    memory = facts.number("chip_mem_gb")
    if memory and not _is_size(memory, chip.memory_bytes):
        chip = replace(chip, memory_bytes=memory * 1e9)
    for (name, kind), rate in NAMED_BANDWIDTHS.items():
        if chip.name == name and kind in text:
            chip = replace(chip, memory_bytes_per_s=rate)
    limit = re.search(r"\b(\d{2,4})w\b", text)
    if limit and chip.power_w and float(limit[1]) < chip.power_w:
        power = float(limit[1])
        chip = replace(chip, power_w=power)
        chip = replace(chip, matmul_fraction=chip.matmul_fraction * relative_clock(chip))
    return chip


def _is_size(stated_gb: float, memory_bytes: float) -> bool:
    """Whether a row's "16 GB" is a memory of so many bytes: sources print GB for GB and for GiB alike."""
    return any(abs(stated_gb * unit / memory_bytes - 1) <= 0.01 for unit in (1e9, 2.0**30))


def _read_network(facts: RowCells, network: Switched) -> Switched:
    """The network between nodes as the row states it: Gb/s of a card or of a node; else the catalogue's.

    One rate alone is that of a node, as IBM states it for its A100s.
    """
    stated = re.search(r"(?:(\d+)\s*x\s*)?[^\d]*?(\d+)\s*gb(?:ps|/s|\b)", facts.text("inter_node_link").lower())
    if not stated or len(network.tiers) < 2:
        return network
    text = facts.text("inter_node_link").lower()
    node = facts.size("chips_per_node") or network.tiers[0].size
    of_node = int(stated[1] or 1) * int(stated[2]) * 1e9 / 8
    each = of_node if re.search(r"per (gpu|device|chip)|/(gpu|device|chip)", text) else of_node / node
    if re.search(rf"{stated[2]}\s*GB/s", facts.text("inter_node_link")):  # bytes, not bits
        each *= 8.0
    if not 0 < each < 1e13:
        raise SkippedRow("no network", f"inter_node_link is {text[:40]!r}")
    return Switched(tiers=(*network.tiers[:-1], replace(network.tiers[-1], bytes_per_s=each)))


def _read_slices(facts: RowCells, name: str, chip: Chip, count: int) -> tuple[int, Topology]:
    """TPU slices: their number from the stated network, their shape as stated or the vendor's of that many chips."""
    found = re.search(r"between (\d{1,6}) slices", facts.text("inter_node_link").lower())
    slices = int(found[1]) if found else 1
    if slices < 1 or count % slices:
        raise SkippedRow("devices do not divide into slices", f"{count} in {slices}")
    chips = count // slices
    stated = re.search(r"\b(\d{1,4}(?:x\d{1,4}){1,2})\b", facts.text("intra_node_link").lower())
    shape = tuple(map(int, stated[1].split("x"))) if stated else ()
    if math.prod(shape) != chips:
        shape = slice_shape(chips, get_catalog_entry(name)["torus"]["num_axes"])
    return slices, build_shorthand_topology(Shorthand(name, shape, False, slices if slices > 1 else None), chip)


def slice_shape(num_chips: int, num_axes: int) -> tuple[int, ...]:
    """The most cubic of the shapes that Google offers: sides of 1, 2, 4, 8 and 16 on 2D tori; 1, 2 and multiples of 4 on 3D.

    Source: Google Cloud documentation, TPU configurations of v4, v5e, v5p and v6e.
    """
    allowed = [1, 2, 4, 8, 16, 32] if num_axes == 2 else [1, 2, *range(4, 65, 4)]
    shapes = list(_shapes(num_chips, num_axes, allowed))
    if not shapes:
        raise SkippedRow("no slice of so many chips", f"{num_chips} on {num_axes} axes")
    return min(shapes, key=lambda shape: (sum(shape), shape))


def _shapes(count: int, num_axes: int, allowed: list[int]) -> Iterator[tuple[int, ...]]:
    """Products of non-decreasing allowed sides."""
    if num_axes == 1:
        if count in allowed:
            yield (count,)
        return
    for side in allowed:
        if count % side == 0:
            yield from ((side, *rest) for rest in _shapes(count // side, num_axes - 1, allowed) if rest[0] >= side)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSoftware:
    """The stack of a row, whether its attention keeps its scores on the chip, whether the host waits for the router's
    counts, and the sustained clock over the chip's usual one."""

    stack: Stack
    fused_attention: bool
    synchronises: bool
    clock: float

    def calibration(self, chip: Chip) -> Calibration:
        """What published runs say about the chip under this software."""
        return self.apply_to(published_calibration(chip.name, self.stack))

    def apply_to(self, calibration: Calibration) -> Calibration:
        """A calibration with what the row states."""
        return replace(
            calibration, clock=self.clock, fused_attention=self.fused_attention, synchronises=self.synchronises
        )


def read_software(facts: RowCells, clock: float) -> RowSoftware:
    """The software of a row. Where tokens over a capacity are dropped, the host knows all sizes beforehand."""
    stack = match_stack(facts.text("software"))
    stated, routing = facts.flag("flash_attn"), facts.text("model") + facts.text("notes")
    return RowSoftware(
        stack=stack, fused_attention=not stack.unfused_attention if stated is None else stated,
        synchronises=not re.search(r"token-?drop|capacity", routing), clock=clock,
    )  # fmt: skip
