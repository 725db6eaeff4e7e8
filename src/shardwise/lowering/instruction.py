"""What one device does, in order: values that are priced, drawn and executed alike. Durations are not in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from shardwise.derive.walk import Communicate
from shardwise.lowering.kernels import Kernel
from shardwise.lowering.traffic import Traffic
from shardwise.sharding.spec import Spec

COMPUTE = "compute"  # the stream of kernels
KERNEL, START, WAIT = "kernel", "start", "wait"  # what an instruction is, for whoever watches it run


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a kernel on the compute stream."""

    kernel: Kernel
    stream: ClassVar[str] = COMPUTE


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
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, slots=True)
class Slice:
    """Each device keeps its part of a tensor: nothing moves."""

    step: Communicate
    stream: ClassVar[str] = COMPUTE


class Held(NamedTuple):
    """A tensor in one of the shardings that a device holds it in."""

    name: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class Free:
    """Nothing reads these any more."""

    held: tuple[Held, ...]
    stream: ClassVar[str] = COMPUTE

    @property
    def tensors(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(dict.fromkeys(one.name for one in self.held))


class Identity(NamedTuple):
    """Which instructions of a unit something that ran stands for: `KERNEL`, `START` or `WAIT`, the name that they have where a
    step is simulated, their phase, and of kernels the results."""

    kind: str
    name: str
    phase: str
    results: tuple[str, ...] = ()


Instruction = Launch | Start | Wait | Slice | Free
