"""Offload: what rests in the memory of the host in place of the device's, and the transfers over PCIe that it takes.

Activations leave for the host as the forward pass goes on and come back ahead of the backward pass, beside whatever the
device does; what is longer than that shows. Two layers stay: the one that runs and the one on its way.
Source: Transformer Engine, get_cpu_offload_context; Megatron-Core, cpu_offloading: double buffers, both ways beside compute.

The optimizer's moments and master weights stream through the device for the update, up and down at once (PCIe is
full-duplex), beside the update's own kernels; two units of the model are there at a time.
Source: MaxText, optimizer_memory_host_offload: state in pinned host memory that the device takes in for the update.
Differs: ZeRO-Offload (Ren et al. 2021) sends gradients down and weights up, 2 + 2 bytes for a parameter in place of 12 + 12, and
updates on the host, whose memory is slower still and has no source here. PCIe is assumed not to be shared with the network.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from shardwise.cluster.chip import Chip
from shardwise.layout.layout import offloaded_by
from shardwise.symbolic import Value, minimum

STAYING = 2  # layers, or units of the model, on the device at a time: one in work, one on its way


class Host(NamedTuple):
    """What a layout keeps on the host, and bytes/s between a device and its host in each direction."""

    optimizer: Annotated[bool, "whether the host has the optimizer's state", "optimizer_on_host"]
    activations: Annotated[bool, "whether the host has activations", "activations_on_host"]
    bytes_per_s: Annotated[float, "PCIe, each way", "pcie_bytes_per_s"]

    def resident(self, times: Value) -> Value:
        """How many of `times` saved copies of a unit's activations are on the device."""
        return minimum(times, STAYING) if self.activations else times


NOTHING = Host(optimizer=False, activations=False, bytes_per_s=float("inf"))


def host_of(offload: str, chip: Chip) -> Host:
    """The host's part of a layout's `offload`.

    Raises `MissingValueError` when the chip has no sourced `pcie_bytes_per_s`, `InputError` for an unknown offload.
    """
    kept = offloaded_by(offload)
    if not any(kept):
        return NOTHING
    rate = chip.known("pcie_bytes_per_s")
    assert isinstance(rate, (int, float))
    return Host(kept.optimizer, kept.activations, float(rate))
