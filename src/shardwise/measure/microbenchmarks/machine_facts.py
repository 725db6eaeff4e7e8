"""Facts of a machine that need no timing: its processes, memory, and the chip of the catalogue that its GPU is."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.hardware import Chip, Cluster, chip_names, load_chip, load_measured_cluster
from shardwise.measure.microbenchmarks.benchmark_layers import MachineSizes
from shardwise.measure.microbenchmarks.timing import describe_device
from shardwise.run.machine_resources import device_bytes

# A GPU's memory may differ from the catalogue's by driver, and by what error correction takes; a part of a GPU (MIG), or a
# variant with another memory, differs by more.
MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts of a machine that are known before anything is timed.

    `nominal`: the catalogue's chip and network for this GPU, with the memory that it has; None for a CPU and for a GPU that the
    catalogue lacks, whose nominal rates are the best that is measured. `vendor` of its chip, "" for a CPU.
    """

    name: str
    source: str
    num_processes: int
    memory_bytes: float
    sizes: MachineSizes
    nominal: Cluster | None = None
    vendor: str = ""

    @property
    def dtype(self) -> str:
        """Format of the constants."""
        return self.sizes.dtype

    @property
    def is_gpu(self) -> bool:
        """True if devices are GPUs, whose hosts' constants are not those of a CPU."""
        return bool(self.vendor)


def match_chip(device_name: str, memory_bytes: float) -> str | None:
    """Return the catalogue's name of a GPU as PyTorch names it, or None.

    Each part of the chip's name is one of the device's, and the memory that a program sees differs by a tenth at most; of
    several chips the one with the longest name.

    >>> from shardwise.measure.microbenchmarks.machine_facts import match_chip
    >>> match_chip("NVIDIA H100 80GB HBM3", 84.9e9), match_chip("NVIDIA A100-SXM4-40GB", 42.3e9)
    ('h100', 'a100-40gb')
    >>> match_chip("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 42.2e9) is None
    True
    """
    device_parts = set(_name_parts(device_name))
    chips = [load_chip(name) for name in chip_names() if device_parts.issuperset(_name_parts(name))]
    matching = [chip for chip in chips if abs(memory_bytes / chip.capacity_bytes - 1.0) <= MEMORY_TOLERANCE]
    names = sorted((chip.name for chip in matching), key=lambda name: len(_name_parts(name)))
    return names[-1] if names else None


def _name_parts(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def cpu_facts(num_processes: int, sizes: MachineSizes) -> MachineFacts:
    """Return the facts of this host, shared by processes."""
    return MachineFacts(
        name=f"{platform.node() or 'this machine'}:{num_processes}", num_processes=num_processes, sizes=sizes,
        memory_bytes=device_bytes("cpu", num_processes),
        source=f"measured on this machine by shardwise bench machine, {num_processes} processes at once: "
        f"{describe_device('cpu')}, {platform.machine()}",
    )  # fmt: skip


def gpu_facts(num_processes: int, sizes: MachineSizes, cuda: Any = torch.cuda) -> MachineFacts:
    """Return the facts of the first GPUs of this host, all of one kind. `cuda`: what `torch.cuda` has."""
    properties = cuda.get_device_properties(0)
    memory_bytes = float(properties.total_memory)
    chip = match_chip(properties.name, memory_bytes)
    matched = f"{chip} of the catalogue" if chip else "a GPU that the catalogue lacks: peaks are the best measured"
    source = (
        f"measured on this machine by shardwise bench machine, {num_processes} GPUs at once: {properties.name}, "
        f"{memory_bytes / 1e9:.1f} GB, compute capability {properties.major}.{properties.minor} ({matched}); torch "
        f"{torch.__version__}"
    )
    return MachineFacts(
        name=f"{platform.node() or 'this machine'}:{num_processes}", num_processes=num_processes, memory_bytes=memory_bytes,
        sizes=sizes.within(memory_bytes, num_processes), nominal=_nominal_cluster(chip, num_processes, memory_bytes, source),
        vendor="AMD" if torch.version.hip else "NVIDIA", source=source,
    )  # fmt: skip


def _nominal_cluster(chip: str | None, num_devices: int, memory_bytes: float, source: str) -> Cluster | None:
    """Return the catalogue's cluster of a chip, with the memory that programs see here."""
    if chip is None:
        return None
    cluster = load_measured_cluster(f"{chip}:{num_devices}").nominal
    seen: Chip = replace(
        cluster.chip, usable_bytes=memory_bytes, sources={**cluster.chip.sources, "usable_bytes": source}
    )
    return replace(cluster, chip=seen)
