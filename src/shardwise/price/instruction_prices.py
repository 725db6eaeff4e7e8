"""Seconds, bytes and FLOPs of each instruction of a unit by itself, at the rates and links of a layout's pricing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.price.layout_pricer import Pricing
from shardwise.price.overlap import BLOCKING
from shardwise.price.stage_contents import NO_RECOMPUTE
from shardwise.price.unit_cost import HOST_PASSES
from shardwise.price.unit_inputs import UnitCostInputs
from shardwise.sharding import CollectiveKind
from shardwise.step import (
    Kernel,
    LocalSlice,
    StartCollective,
    UnitCollective,
    UnitInstructions,
    WaitCollective,
)
from shardwise.step.instructions import FreeTensors, SingleInstruction
from shardwise.step.unit_instructions import lower_unit
from shardwise.values import sum_values

# Why a tensor moves, where the derivation says no more than its kind.
MOVE_REASONS: Mapping[CollectiveKind, str] = {
    CollectiveKind.ALL_GATHER: "it lies in parts and is read whole",
    CollectiveKind.REDUCE_SCATTER: "it is a partial sum and lies in parts",
    CollectiveKind.ALL_REDUCE: "it is a partial sum and is read whole",
    CollectiveKind.ALL_TO_ALL: "its parts are read along another dim",
    CollectiveKind.PERMUTE: "its parts are read on other devices",
    CollectiveKind.SEND_RECV: "the next stage reads it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedInstruction:
    """An instruction with numbers. `kind`: launch, start, wait, slice or free; `operation` is the kind of a kernel or collective.

    `count` collectives of `num_bytes` together (their payload), or a kernel that reads and writes so many; `flops` of products
    and attention. `over`: the axes of more than one device. `seconds` is None where nothing takes time.
    """

    kind: str
    stream: str
    operation: str = ""
    tensors: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    count: int = 1
    num_bytes: float = 0.0
    flops: float = 0.0
    seconds: float | None = None
    why: str = ""


class InstructionPricer:
    """Prices the instructions of a unit of a layout; one named `stage_contents.NO_RECOMPUTE` + unit recomputes nothing."""

    def __init__(self, pricing: Pricing, unit: str) -> None:
        self.pricer, self.links, self.values = pricing.pricer, pricing.links, pricing.unit_values.of(unit)
        self.scheme = pricing.scheme.with_recompute("none") if unit.startswith(NO_RECOMPUTE) else pricing.scheme
        self.unit = unit.removeprefix(NO_RECOMPUTE)
        self.single_device_axes = frozenset(axis for axis, degree in pricing.degrees.items() if degree == 1)

    @cached_property
    def unit_instructions(self) -> UnitInstructions:
        """The unit's instructions."""
        return lower_unit(self.scheme, self.unit, self.pricer.rates.policy, self.single_device_axes)

    @cached_property
    def parts(self) -> UnitCostInputs:
        """Cost inputs of the unit."""
        return self.pricer.parts(self.scheme, self.unit)

    def kernel_s(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel on the device."""
        return float(self.pricer.kernel_s(kernel, self.parts, self.values))

    def collective_s(self, collective: UnitCollective) -> float:
        """Return the seconds of a collective, or of one for each of its flat arrays, one after the other."""
        return float(self.pricer.collective_s(collective, self.parts, self.values, self.links))

    def casts_s(self, phase: str) -> float:
        """Return the seconds of the casts of a phase's product operands, and of the kernels that scale the products' results."""
        return float(self.pricer.casts_s(self.parts, phase, self.values))

    def gap_s(self, phase: str) -> float:
        """Return the seconds that launches add to each kernel of a phase, minus those that collectives fill."""
        num_kernels = sum(kernel.phase == phase for kernel in self.parts.kernels)
        if not num_kernels:
            return 0.0
        device_s = self._device_s(phase)
        added_s = float(self.pricer.with_launches_s(self.parts, phase, device_s)) - device_s
        return (added_s + self._unfilled_s(phase)) / num_kernels

    def _device_s(self, phase: str) -> float:
        """Return the seconds of a phase's kernels and casts on the device."""
        other_s = self.pricer.compute_s(self.parts, phase, self.values)
        return float(other_s + self.pricer.kernels_s(self.parts, phase, self.values, making_gradients=True))

    def _unfilled_s(self, phase: str) -> float:
        """Return the seconds of a phase in which the device waits for its host, less blocking collectives of that pass."""
        phases = next((phases for phases in HOST_PASSES if phase in phases), ())
        if not phases or not self.pricer.rates.host_s:
            return 0.0
        device_s = {name: self._device_s(name) for pass_phases in HOST_PASSES for name in pass_phases}
        idle = self.pricer.idle_s(self.parts, device_s)
        if not any(map(float, idle.values())):
            return 0.0
        exposed = self.pricer.exposed_activation_s(self.parts, self.values, self.links)
        blocking_s = float(sum_values(exposed.get((name, axis), 0.0) for name in phases for axis in BLOCKING))
        for earlier in phases[: phases.index(phase)]:
            blocking_s = max(blocking_s - float(idle[earlier]), 0.0)
        return max(float(idle[phase]) - blocking_s, 0.0)

    def price_instruction(self, instruction: SingleInstruction) -> PricedInstruction:
        """Return an instruction of a unit with its numbers."""
        match instruction:
            case Kernel():
                return self._price_kernel(instruction)
            case StartCollective():
                return self._price_start(instruction, instruction.collective)
            case WaitCollective():
                return PricedInstruction(
                    kind="wait", stream=instruction.stream, operation=str(instruction.collective.kind),
                    tensors=instruction.collective.tensors, why="what follows reads it",
                    over=self.drop_single_device_axes(instruction.collective),
                )  # fmt: skip
            case LocalSlice():
                return PricedInstruction(
                    kind="slice", stream=instruction.stream, tensors=(instruction.step.tensor.name,),
                    over=instruction.step.collective.axes, why=instruction.step.reason or "each device keeps its part",
                )  # fmt: skip
            case FreeTensors():
                return PricedInstruction(
                    kind="free", stream=instruction.stream, tensors=instruction.tensors, why="nothing reads it any more"
                )

    def _price_kernel(self, kernel: Kernel) -> PricedInstruction:
        return PricedInstruction(
            kind="launch", stream=kernel.stream, operation=kernel.kind, tensors=kernel.reads, results=kernel.outputs,
            num_bytes=float(self.pricer.kernel_bytes(kernel, self.parts, self.values)),
            flops=float(kernel.flops.evaluate(self.values)), seconds=self.kernel_s(kernel),
            why="a weight's gradient" if kernel.makes_weight_grads else kernel.phase,
        )  # fmt: skip

    def _price_start(self, start: StartCollective, collective: UnitCollective) -> PricedInstruction:
        count, elements = collective.extent(self.values, self.pricer.max_bucket_elements)
        return PricedInstruction(
            kind="start", stream=start.stream, operation=str(collective.kind), tensors=collective.tensors,
            over=self.drop_single_device_axes(collective), count=int(count),
            num_bytes=float(elements * self.pricer.formats.collective_width(collective, self.parts.products)),
            seconds=self.collective_s(collective),
            why=collective.reason or MOVE_REASONS[collective.kind],
        )  # fmt: skip

    def drop_single_device_axes(self, collective: UnitCollective) -> tuple[str, ...]:
        """Return the axes of more than one device that a collective runs over."""
        return tuple(axis for axis in collective.axes if axis not in self.single_device_axes)
