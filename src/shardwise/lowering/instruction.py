"""What one device does, in order: values that are priced, drawn and executed alike. Durations are not in them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.lowering.kernels import Kernel
from shardwise.lowering.traffic import Traffic

COMPUTE = "compute"  # the stream of kernels


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a kernel on the compute stream."""

    kernel: Kernel

    @property
    def stream(self) -> str:
        return COMPUTE


@dataclass(frozen=True, slots=True)
class Start:
    """Start a collective, or one for each of its flat arrays, on the stream of the axis that it is charged to."""

    traffic: Traffic

    @property
    def stream(self) -> str:
        return self.traffic.group


@dataclass(frozen=True, slots=True)
class Wait:
    """What follows on the compute stream waits for a collective that was started."""

    traffic: Traffic

    @property
    def stream(self) -> str:
        return COMPUTE


@dataclass(frozen=True, slots=True)
class Free:
    """Nothing reads these tensors any more."""

    tensors: tuple[str, ...]

    @property
    def stream(self) -> str:
        return COMPUTE


Instruction = Launch | Start | Wait | Free
