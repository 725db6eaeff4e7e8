"""Measures the machine, writes its cluster file, and says what came out."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from typing_extensions import TypedDict

from shardwise.bench.kernels import describe
from shardwise.bench.machine.fit import Fit, Machine, spread_of, typical
from shardwise.bench.machine.measure import Asked, measured
from shardwise.bench.machine.samples import SAMPLES, TINY, Sample
from shardwise.cluster.calibration import APART, CONSTANTS, Calibration
from shardwise.cluster.chip import Chip
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.written import cluster_toml
from shardwise.errors import InputError
from shardwise.network.topology import Switched
from shardwise.progress import Progress, silent
from shardwise.train.device_memory import device_bytes

SCHEMA = "shardwise.bench-machine/1"
# Formats that are measured: that of the constants, and others of which the best rate is known.
FORMATS = ("fp32", "bf16")


class MachinePayload(TypedDict):
    """This machine as a cluster: its chip and links at nominal rates, what is reached of them, and whole steps as a check."""

    schema: Literal["shardwise.bench-machine/1"]
    machine: str
    chip: Chip
    topology: Switched
    calibration: Calibration
    measured_over_predicted: dict[str, float]


class Found(NamedTuple):
    """The machine at nominal rates, and what it reaches of them."""

    cluster: Cluster
    calibration: Calibration
    misses: Mapping[str, float]  # of whole steps, measured seconds over those that the constants give

    def payload(self) -> dict[str, Any]:
        """The chip, its links and the constants as JSON has them."""
        return {
            "schema": SCHEMA, "machine": self.cluster.name,
            "chip": asdict(self.cluster.chip), "topology": asdict(self.cluster.topology),
            "calibration": asdict(self.calibration), "measured_over_predicted": dict(self.misses),
        }  # fmt: skip

    def toml(self) -> str:
        meanings = {name: one.meaning for name, one in {**CONSTANTS, **APART}.items()}
        meanings["network_fraction"] = "not measured: as link_fraction"
        meanings["fp8_matmul_fraction"] = "not measured: as matmul_fraction"
        return cluster_toml(self.cluster, self.calibration, meanings)


def machine(num_processes: int, samples: tuple[Sample, ...] = SAMPLES, progress: Progress = silent) -> Found:
    """Measure the CPU of this machine in so many processes. Raises `InputError` when one fails."""
    dtype, *others = FORMATS
    sized = tuple(sample.at(dtype) for sample in samples)
    rounds = measured(Asked(sized, tuple(others), TINY.at(dtype)), num_processes, progress)
    known = Machine(
        name=f"{platform.node() or 'this machine'}:{num_processes}", num_processes=num_processes, dtype=dtype,
        others=tuple(others), memory_bytes=device_bytes("cpu", num_processes),
        source=f"measured on this machine by shardwise bench machine, {num_processes} processes at once: "
        f"{describe('cpu')}, {platform.machine()}",
    )  # fmt: skip
    fit = Fit(typical(rounds), sized, TINY.at(dtype), known)
    misses = fit.misses()
    return Found(fit.cluster(), fit.calibration(spread_of(rounds, sized, misses.values())), misses)


def write(found: Found, out: Path) -> None:
    """Write the cluster file. Raises `InputError` where that cannot be."""
    try:
        out.write_text(found.toml(), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"bench: cannot write {out}: {error.strerror}; a path in a writable directory is required"
        ) from None
