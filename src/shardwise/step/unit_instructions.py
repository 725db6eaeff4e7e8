"""Instructions of one unit by pass, with sizes as expressions that are priced with numbers or with arrays of them.

A unit has a forward pass, a backward pass that begins with what is recomputed, and an update. Kernels and collectives
on activations keep the order of the derived steps. Weights are gathered at the start of a pass and waited for where
they are first read; gradients leave once the last of their group is made, and are waited for before anything reads
them. A tensor is freed after its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import TypeGuard

from shardwise.derive import CollectiveStep, ProgramStep, Ring, ShardedTensor, ShardedUnit, derived_unit
from shardwise.derive.sharded_unit import MAX_CACHED_UNITS
from shardwise.layout import ShardingScheme
from shardwise.model import Role, whole_matrix_inputs
from shardwise.sharding import CollectiveKind, Spec
from shardwise.step.collectives import CONTROL_UNIT, control_collectives, list_unit_collectives
from shardwise.step.instructions import (
    FreeTensors,
    Instruction,
    Kernel,
    LocalSlice,
    RunRing,
    SingleInstruction,
    StartCollective,
    UnitCollective,
    WaitCollective,
    unroll_rings,
)
from shardwise.step.kernel_fusion import fuse_kernels
from shardwise.values import IssuePolicy

# The phases of a derivation by the pass that they run in.
PHASES_OF_PASS: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",), "backward": ("recompute", "backward"), "update": ("update",),
}  # fmt: skip
PlacedItem = Kernel | UnitCollective | LocalSlice  # what the derivation puts in order


@dataclass(frozen=True)
class UnitInstructions:
    """Instructions of a unit by pass; collectives over `single_device_axes` alone are left out."""

    unit: ShardedUnit
    passes: Mapping[str, tuple[Instruction, ...]]
    single_device_axes: frozenset[str] = frozenset()

    @cached_property
    def backward_input(self) -> tuple[Instruction, ...]:
        """Part of the backward pass that the gradient of the unit's input depends on (I)."""
        return self._select_backward(for_input=True)

    @cached_property
    def backward_weight(self) -> tuple[Instruction, ...]:
        """Rest of the backward pass, which can wait: weight gradients (W)."""
        return self._select_backward(for_input=False)

    def _select_backward(self, *, for_input: bool) -> tuple[Instruction, ...]:
        selected = [instruction for instruction, is_needed in self._backward if is_needed is for_input]
        return tuple(_bind_rings(self.unit, "backward", selected, self.single_device_axes))

    @cached_property
    def _backward(self) -> tuple[tuple[SingleInstruction, bool], ...]:
        """Instructions of the backward pass without frees, each with whether the gradient of the unit's input needs it.

        A kernel that gives both gradients, such as a norm's, counts as needed. Source: Qi et al. 2023, "Zero Bubble
        Pipeline Parallelism", section 2.
        """
        backward, marked = self.unit.backward, []
        inputs = [name for name in backward.program.outputs if self.unit.tensors[name].role is Role.RESIDUAL]
        required = {*self._without_single_axes(ShardedTensor(name, backward.specs[name]) for name in inputs)}
        # Backwards, so that all readers of a tensor are known before its writer. What reads weights belongs to the input
        # gradient, because weights are gathered for that part alone.
        for instruction in reversed([*unroll_rings(self.passes["backward"])]):
            if isinstance(instruction, FreeTensors):
                continue
            steps = instruction.steps
            is_needed = any(not required.isdisjoint(self._without_single_axes(step.writes)) for step in steps)
            is_needed = is_needed or any(self._reads_weights(step.reads) for step in steps)
            is_needed = is_needed or _carries_weights(instruction)
            if is_needed:
                required |= {tensor for step in steps for tensor in self._without_single_axes(step.reads)}
            marked.append((instruction, is_needed))
        return tuple(reversed(marked))

    def _reads_weights(self, tensors: Iterable[ShardedTensor]) -> bool:
        return any(self.unit.tensors[tensor.name].role is Role.WEIGHT for tensor in tensors)

    def _without_single_axes(self, tensors: Iterable[ShardedTensor]) -> Iterator[ShardedTensor]:
        """Yield the tensors with axes of one device dropped from their specs, so that equal layouts compare equal."""
        for name, spec in tensors:
            partial = tuple(axis for axis in spec.partial if axis not in self.single_device_axes)
            yield ShardedTensor(name, Spec(spec.dims, spec.gather_axes(self.single_device_axes).axes, partial))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel that is launched, in order."""
        return tuple(kernel for kernel in self._instructions if isinstance(kernel, Kernel))

    @property
    def collectives(self) -> tuple[UnitCollective, ...]:
        """Every collective that is started, in order."""
        return tuple(start.collective for start in self._instructions if isinstance(start, StartCollective))

    @property
    def _instructions(self) -> Iterator[SingleInstruction]:
        return unroll_rings(chain.from_iterable(self.passes.values()))


@lru_cache(maxsize=MAX_CACHED_UNITS)
def lower_unit(
    scheme: ShardingScheme, name: str, policy: IssuePolicy,
    single_device_axes: frozenset[str] = frozenset(),
) -> UnitInstructions:  # fmt: skip
    """Lower a unit, derived in this scheme, to instructions under an issue policy; the head has the step's control
    collectives.

    `single_device_axes`: axes known to have one device; collectives over them alone are left out.
    """
    control = control_collectives(scheme, policy) if name == CONTROL_UNIT else ()
    return lower_derived_unit(derived_unit(scheme, name), policy, single_device_axes, control)


def lower_derived_unit(
    unit: ShardedUnit,
    policy: IssuePolicy,
    single_device_axes: frozenset[str] = frozenset(),
    control: Iterable[UnitCollective] = (),
) -> UnitInstructions:
    """Lower any derived unit to instructions, with the given control collectives."""
    issued = (*list_unit_collectives(unit, policy, single_device_axes), *control)
    collectives = [collective for collective in issued if not single_device_axes.issuperset(collective.axes)]
    kernels = fuse_kernels(unit)
    passes = {}
    for name, phases in PHASES_OF_PASS.items():
        ordered = [step for phase in phases for step in _order_phase(unit, phase, kernels[phase], collectives)]
        unplaced = [collective for collective in collectives if collective.phase in phases and collective.position < 0]
        instructions = [*_CollectivePlacement(unit, ordered).instructions(unplaced)]
        with_frees = [*_insert_frees(unit, name, instructions)]
        passes[name] = tuple(_bind_rings(unit, name, with_frees, single_device_axes))
    return UnitInstructions(unit, passes, single_device_axes)


def _bind_rings(
    unit: ShardedUnit,
    name_of_pass: str,
    instructions: Sequence[SingleInstruction],
    single_device_axes: frozenset[str],
) -> Iterator[Instruction]:
    """Yield the instructions with each ring as one; a ring that is not whole, or has one device, stays unrolled."""
    nodes = (node for phase in PHASES_OF_PASS[name_of_pass] for node in unit.phase_nodes()[phase])
    rings = [node for node in nodes if isinstance(node, Ring) and not single_device_axes.issuperset(node.axes)]
    ring_of = {id(step): ring for ring in rings for step in ring.steps}
    indices: dict[int, list[int]] = {id(ring): [] for ring in rings}
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Kernel | StartCollective) and instruction.steps:
            ring = ring_of.get(id(instruction.steps[0]))
            if ring is not None:
                indices[id(ring)].append(index)
    end = 0
    for ring in rings:
        if len(indices[id(ring)]) == len(ring.steps):
            first, last = indices[id(ring)][0], indices[id(ring)][-1]
            yield from instructions[end:first]
            end = last + 1
            yield RunRing(ring, tuple(instructions[first:end]))
    yield from instructions[end:]


def _order_phase(
    unit: ShardedUnit, phase: str, kernels: Iterable[tuple[int, Kernel]], collectives: Iterable[UnitCollective]
) -> list[PlacedItem]:
    """Return a phase's kernels, slices and activation collectives in the order of the derived steps."""
    placed: list[tuple[int, PlacedItem]] = [*kernels]
    placed += [(moved.position, moved) for moved in collectives if moved.phase == phase and moved.position >= 0]
    placed += [(position, LocalSlice(step)) for position, step in enumerate(unit.phases()[phase]) if _is_slice(step)]
    return [step for _, step in sorted(placed, key=lambda pair: pair[0])]


def _is_slice(step: ProgramStep) -> TypeGuard[CollectiveStep]:
    return isinstance(step, CollectiveStep) and step.collective.kind is CollectiveKind.SLICE


class _CollectivePlacement:
    """Places starts and waits around the steps of one pass."""

    def __init__(self, unit: ShardedUnit, steps: Sequence[PlacedItem]) -> None:
        self.unit, self.steps = unit, steps
        self.moving: list[UnitCollective] = []

    def instructions(self, unplaced: Sequence[UnitCollective]) -> Iterator[SingleInstruction]:
        """Yield the steps, with each collective that has no position among them started once its payload is made."""
        pending_results = {name for step in self.steps if isinstance(step, Kernel) for name in step.outputs}
        pending = list(unplaced)
        yield from self.start_ready(pending, pending_results)
        for step in self.steps:
            if isinstance(step, UnitCollective):
                yield from self.start(step)
                continue
            if isinstance(step, LocalSlice):
                yield from self.wait([step.step.tensor.name])
                yield step
                continue
            yield from self.wait(step.reads)
            yield step
            pending_results -= set(step.outputs)
            yield from self.start_ready(pending, pending_results)
        yield from (WaitCollective(collective) for collective in self.moving)

    def start_ready(self, pending: list[UnitCollective], pending_results: set[str]) -> Iterator[SingleInstruction]:
        """Start the collectives held back whose payload is complete."""
        for collective in list(pending):
            if pending_results.isdisjoint(payload_tensors(self.unit, collective)):
                pending.remove(collective)
                yield from self.start(collective)

    def start(self, collective: UnitCollective) -> Iterator[SingleInstruction]:
        """Start a collective once its payload has arrived."""
        # Control sums what all others bring, so it waits for all of them, and everything after it waits for it.
        payload = self.payloads_in_flight() if collective.is_control else payload_tensors(self.unit, collective)
        yield from self.wait(payload)
        yield StartCollective(collective)
        self.moving.append(collective)
        if collective.is_control:
            yield from self.wait(collective.tensors)

    def payloads_in_flight(self) -> list[str]:
        return [name for collective in self.moving for name in payload_tensors(self.unit, collective)]

    def wait(self, names: Iterable[str]) -> Iterator[WaitCollective]:
        """Wait for the collectives that bring any of these tensors."""
        awaited = set(names)
        for collective in list(self.moving):
            if not awaited.isdisjoint(payload_tensors(self.unit, collective)):
                self.moving.remove(collective)
                yield WaitCollective(collective)


def payload_tensors(unit: ShardedUnit, collective: UnitCollective) -> tuple[str, ...]:
    """Return the tensors that a collective moves, by their names among kernels: (updated) weights, or their gradients."""
    if collective.role is Role.WEIGHT_GRADIENT:
        return tuple(unit.gradients[name] for name in collective.tensors)
    if collective.role is Role.WEIGHT and collective.phase == "update":
        return tuple(f"{name}'" for name in collective.tensors)
    if collective.role is Role.DIRECTION and collective.position < 0:
        directions = whole_matrix_inputs(unit.update.program)
        return tuple(name for name, weight in directions.items() if weight in collective.tensors)
    if collective.role is Role.MEAN:
        return tuple(step.tensor.name for step in collective.derived)
    return collective.tensors


def _insert_frees(
    unit: ShardedUnit, name_of_pass: str, instructions: Sequence[SingleInstruction]
) -> Iterator[SingleInstruction]:
    """Yield the instructions, each followed by a free of what it was the last to touch; the update frees nothing."""
    last: dict[ShardedTensor, int] = {}
    chunked = _chunked_tensors(instructions)
    for index, instruction in enumerate(instructions):
        last |= dict.fromkeys((*touched_tensors(instruction), *chunked.get(index, ())), index)
    live_out, freed = _live_out(unit, name_of_pass), dict[int, list[ShardedTensor]]()
    for tensor, index in last.items():
        if tensor not in live_out and unit.tensors[tensor.name].role is not Role.CONSTANT and name_of_pass != "update":
            freed.setdefault(index, []).append(tensor)
    for index, instruction in enumerate(instructions):
        yield instruction
        if index in freed:
            yield FreeTensors(tuple(freed[index]))


def _chunked_tensors(instructions: Sequence[SingleInstruction]) -> dict[int, list[ShardedTensor]]:
    """Return what each kernel touches of collectives in chunks beside it, by its index; they live until its last chunk
    is read."""
    tensors_by_kernel: dict[str, list[ShardedTensor]] = {}
    for instruction in instructions:
        for result in instruction.collective.chunked_with if isinstance(instruction, StartCollective) else ():
            tensors_by_kernel.setdefault(result, []).extend(touched_tensors(instruction))
    kernels = ((i, kernel) for i, kernel in enumerate(instructions) if isinstance(kernel, Kernel))
    first_results = ((i, kernel.outputs[0]) for i, kernel in kernels)
    return {index: tensors_by_kernel[name] for index, name in first_results if name in tensors_by_kernel}


def _live_out(unit: ShardedUnit, name_of_pass: str) -> set[ShardedTensor]:
    """Return what a later pass reads: resting weights and gradients, saved tensors, and the results of the pass."""
    forward, backward = unit.forward, unit.backward
    live = {ShardedTensor(name, forward.specs[name]) for name in (*forward.program.weights, *forward.program.outputs)}
    if name_of_pass == "forward":  # scalars are summed in the update
        live |= {step.before for step in forward.communication if not step.tensor.dims}
        return live | {ShardedTensor(*pair) for pair in (*unit.saved.items(), *unit.gathered_weights.items())}
    return live | {ShardedTensor(name, backward.specs[name]) for name in backward.program.outputs}


def touched_tensors(instruction: SingleInstruction) -> Iterator[ShardedTensor]:
    """Yield the tensors that an instruction reads, and those that it writes."""
    for step in instruction.steps:
        yield from (*step.reads, *step.writes)


def _carries_weights(instruction: SingleInstruction) -> bool:
    return isinstance(instruction, (StartCollective, WaitCollective)) and instruction.collective.role is Role.WEIGHT
