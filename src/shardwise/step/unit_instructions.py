"""The instructions of one unit by pass, with expressions for sizes and counts: priced with numbers, or with arrays of them.

Forward; backward, with what is recomputed in front of it; update. Kernels and collectives on activations come in the order of the
derived steps. Weights are gathered at the head of a pass and waited for where they are first read; gradients leave as soon as the
last of their group is made, and are waited for before anything reads them. A tensor is freed behind its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeGuard

from shardwise.derive.sharded_program import CollectiveStep, ProgramStep
from shardwise.derive.sharded_unit import MAX_CACHED_UNITS, ShardedUnit, derived_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import ModelStructure
from shardwise.model.optimizer_program import whole_matrix_inputs
from shardwise.model.program import Role
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Spec
from shardwise.step.collectives import CONTROL_UNIT, control_collectives, list_unit_collectives
from shardwise.step.instructions import (
    FreeTensors,
    Instruction,
    Kernel,
    KernelLaunch,
    LocalSlice,
    ShardedTensor,
    StartCollective,
    UnitCollective,
    WaitCollective,
)
from shardwise.step.kernel_fusion import fuse_kernels
from shardwise.values.issue_policy import IssuePolicy

# The phases of a derivation by the pass that they run in.
PHASES_OF_PASS: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",), "backward": ("recompute", "backward"), "update": ("update",),
}  # fmt: skip
PlacedItem = Kernel | UnitCollective | LocalSlice  # what the derivation puts in order


@dataclass(frozen=True)
class UnitInstructions:
    """A unit's instructions by pass; over the axes of one device, `single_device_axes`, there is no collective."""

    unit: ShardedUnit
    passes: Mapping[str, tuple[Instruction, ...]]
    single_device_axes: frozenset[str] = frozenset()

    @cached_property
    def backward_input(self) -> tuple[Instruction, ...]:
        """The backward pass as far as the gradient of the unit's input needs it."""
        return tuple(one for one, needed in self._backward if needed)

    @cached_property
    def backward_weight(self) -> tuple[Instruction, ...]:
        """The rest of it, which can wait: gradients of weights."""
        return tuple(one for one, needed in self._backward if not needed)

    @cached_property
    def _backward(self) -> tuple[tuple[Instruction, bool], ...]:
        """The instructions of the backward pass without frees, each with whether the gradient of the unit's input needs it.

        A kernel that gives a weight's beside it counts as needed, such as a norm's, and so does what reads a weight: these are
        gathered for the first part alone. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
        """
        backward, found = self.unit.backward, []
        wanted = {
            *self._without_single_axes(
                ShardedTensor(name, backward.specs[name])
                for name in backward.program.outputs
                if self.unit.tensors[name].role is Role.RESIDUAL
            )
        }
        for one in reversed(self.passes["backward"]):
            if isinstance(one, FreeTensors):
                continue
            ends = list(_reads_and_writes(one))
            needed = any(not wanted.isdisjoint(self._without_single_axes(writes)) for _, writes in ends)
            needed = needed or _carries_weights(one) or any(self._reads_weights(reads) for reads, _ in ends)
            wanted |= {held for reads, _ in ends for held in self._without_single_axes(reads) if needed}
            found.append((one, needed))
        return tuple(reversed(found))

    def _reads_weights(self, held: Iterable[ShardedTensor]) -> bool:
        return any(self.unit.tensors[one.name].role is Role.WEIGHT for one in held)

    def _without_single_axes(self, held: Iterable[ShardedTensor]) -> Iterator[ShardedTensor]:
        """Tensors by the axes of several devices that split them."""
        for name, spec in held:
            partial = tuple(axis for axis in spec.partial if axis not in self.single_device_axes)
            yield ShardedTensor(name, Spec(spec.dims, spec.gather_axes(self.single_device_axes).axes, partial))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel that is launched, in order."""
        return tuple(one.kernel for each in self.passes.values() for one in each if isinstance(one, KernelLaunch))

    @property
    def collectives(self) -> tuple[UnitCollective, ...]:
        """Every collective that is started, in order."""
        return tuple(
            one.collective for each in self.passes.values() for one in each if isinstance(one, StartCollective)
        )


@lru_cache(maxsize=MAX_CACHED_UNITS)
def lower_unit(
    structure: ModelStructure,
    family: ShardingScheme,
    name: str,
    policy: IssuePolicy,
    single: frozenset[str] = frozenset(),
) -> UnitInstructions:
    """The template of a unit in a layout of this family under a policy. The step's control traffic is the head's.

    `single_device_axes`: axes that are known to have one device; over them alone there is no collective.
    """
    control = control_collectives(structure, family, policy) if name == CONTROL_UNIT else ()
    return lower_derived_unit(derived_unit(structure, family, name), policy, single, control)


def lower_derived_unit(
    unit: ShardedUnit, policy: IssuePolicy, single: frozenset[str] = frozenset(), control: Iterable[UnitCollective] = ()
) -> UnitInstructions:
    """The template of any derived unit, with the control traffic that it has."""
    issued = (*list_unit_collectives(unit, policy, single), *control)
    traffic, launched = [one for one in issued if not single.issuperset(one.axes)], fuse_kernels(unit)
    passes = {}
    for name, phases in PHASES_OF_PASS.items():
        ordered = [step for phase in phases for step in _order_phase(unit, phase, launched[phase], traffic)]
        unplaced = [one for one in traffic if one.phase in phases and one.position < 0]
        passes[name] = tuple(_insert_frees(unit, name, [*_CollectivePlacement(unit, ordered).instructions(unplaced)]))
    return UnitInstructions(unit, passes, single)


def _order_phase(
    unit: ShardedUnit, phase: str, launched: Iterable[tuple[int, Kernel]], traffic: Iterable[UnitCollective]
) -> list[PlacedItem]:
    """A phase's kernels, slices and collectives on activations by their places among the derived steps."""
    placed: list[tuple[int, PlacedItem]] = [*launched]
    placed += [(one.position, one) for one in traffic if one.phase == phase and one.position >= 0]
    placed += [(place, LocalSlice(step)) for place, step in enumerate(unit.phases()[phase]) if _is_slice(step)]
    return [step for _, step in sorted(placed, key=lambda pair: pair[0])]


def _is_slice(step: ProgramStep) -> TypeGuard[CollectiveStep]:
    return isinstance(step, CollectiveStep) and step.collective.kind is CollectiveKind.SLICE


class _CollectivePlacement:
    """Puts starts and waits around the steps of one pass."""

    def __init__(self, unit: ShardedUnit, steps: Sequence[PlacedItem]) -> None:
        self.unit, self.steps = unit, steps
        self.moving: list[UnitCollective] = []

    def instructions(self, unplaced: Sequence[UnitCollective]) -> Iterator[Instruction]:
        """The steps, with the collectives that have no place among them as soon as what they carry is there."""
        unmade = {name for step in self.steps if isinstance(step, Kernel) for name in step.outputs}
        held_back = list(unplaced)
        yield from self.start_ready(held_back, unmade)
        for step in self.steps:
            if isinstance(step, UnitCollective):
                yield from self.start(step)
                continue
            if isinstance(step, LocalSlice):
                yield from self.wait([step.step.tensor.name])
                yield step
                continue
            yield from self.wait(step.reads)
            yield KernelLaunch(step)
            unmade -= set(step.outputs)
            yield from self.start_ready(held_back, unmade)
        yield from (WaitCollective(one) for one in self.moving)

    def start_ready(self, held_back: list[UnitCollective], unmade: set[str]) -> Iterator[Instruction]:
        """Start those that are held back and carry nothing that has still to be made."""
        for one in [one for one in held_back if unmade.isdisjoint(payload_tensors(self.unit, one))]:
            held_back.remove(one)
            yield from self.start(one)

    def start(self, one: UnitCollective) -> Iterator[Instruction]:
        """Start a collective when what it carries has arrived; control traffic, which all waits for, is waited for at once."""
        yield from self.wait(payload_tensors(self.unit, one) if not one.is_control else self.payloads_in_flight())
        yield StartCollective(one)
        self.moving.append(one)
        if one.is_control:
            yield from self.wait(one.tensors)

    def payloads_in_flight(self) -> list[str]:
        return [name for one in self.moving for name in payload_tensors(self.unit, one)]

    def wait(self, names: Iterable[str]) -> Iterator[WaitCollective]:
        """Wait for what brings any of these tensors."""
        wanted = set(names)
        for one in [one for one in self.moving if not wanted.isdisjoint(payload_tensors(self.unit, one))]:
            self.moving.remove(one)
            yield WaitCollective(one)


def payload_tensors(unit: ShardedUnit, one: UnitCollective) -> tuple[str, ...]:
    """The tensors that a collective moves, by the names that kernels have for them: weights, as updated, or their gradients."""
    if one.role is Role.WEIGHT_GRADIENT:
        return tuple(unit.gradients[name] for name in one.tensors)
    if one.role is Role.WEIGHT and one.phase == "update":
        return tuple(f"{name}'" for name in one.tensors)
    if one.role is Role.DIRECTION and one.position < 0:
        return tuple(name for name, weight in whole_matrix_inputs(unit.update.program).items() if weight in one.tensors)
    if one.role is Role.MEAN:
        return tuple(step.tensor.name for step in one.derived)
    return one.tensors


def _insert_frees(unit: ShardedUnit, name_of_pass: str, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions, each followed by what it was the last to touch; the update frees nothing."""
    last: dict[ShardedTensor, int] = {}
    pieces = _chunked_tensors(instructions)
    for place, one in enumerate(instructions):
        last |= dict.fromkeys((*touched_tensors(one), *pieces.get(place, ())), place)
    stays, freed = _live_out(unit, name_of_pass), dict[int, list[ShardedTensor]]()
    for held, place in last.items():
        if held not in stays and unit.tensors[held.name].role is not Role.CONSTANT and name_of_pass != "update":
            freed.setdefault(place, []).append(held)
    for place, one in enumerate(instructions):
        yield one
        if place in freed:
            yield FreeTensors(tuple(freed[place]))


def _chunked_tensors(instructions: Sequence[Instruction]) -> dict[int, list[ShardedTensor]]:
    """By its place what a kernel touches of collectives that run in pieces beside it, until it has taken the last piece."""
    found: dict[str, list[ShardedTensor]] = {}
    for one in instructions:
        for result in one.collective.chunked_with if isinstance(one, StartCollective) else ():
            found.setdefault(result, []).extend(touched_tensors(one))
    launched = ((place, one.kernel) for place, one in enumerate(instructions) if isinstance(one, KernelLaunch))
    return {place: found[kernel.outputs[0]] for place, kernel in launched if kernel.outputs[0] in found}


def _live_out(unit: ShardedUnit, name_of_pass: str) -> set[ShardedTensor]:
    """What a later pass reads: weights and their gradients as they rest, what is saved, and what the pass gives."""
    forward, backward = unit.forward, unit.backward
    stays = {ShardedTensor(name, forward.specs[name]) for name in (*forward.program.weights, *forward.program.outputs)}
    if name_of_pass == "forward":  # scalars are summed in the update
        stays |= {
            ShardedTensor(step.tensor.name, step.collective.before)
            for step in forward.communication
            if not step.tensor.dims
        }
        return stays | {ShardedTensor(*one) for one in (*unit.saved.items(), *unit.gathered_weights.items())}
    return stays | {ShardedTensor(name, backward.specs[name]) for name in backward.program.outputs}


def touched_tensors(one: Instruction) -> Iterator[ShardedTensor]:
    """What an instruction reads, and what it makes."""
    for reads, writes in _reads_and_writes(one):
        yield from (*reads, *writes)


def _reads_and_writes(one: Instruction) -> Iterator[tuple[Iterable[ShardedTensor], Iterable[ShardedTensor]]]:
    """What each step of an instruction reads and what it writes."""
    match one:
        case KernelLaunch():
            for step in one.kernel.steps:
                operation, placed = step.operation, step.placed
                yield (
                    [*map(ShardedTensor, operation.operands, placed.inputs)],
                    [*map(ShardedTensor, operation.outputs, placed.outputs)],
                )
        case StartCollective() | WaitCollective() | LocalSlice():
            for each in (one.step,) if isinstance(one, LocalSlice) else one.collective.derived:
                before, after = _specs_around(each)
                yield [ShardedTensor(each.tensor.name, before)], [ShardedTensor(each.tensor.name, after)]


def _carries_weights(one: Instruction) -> bool:
    return isinstance(one, (StartCollective, WaitCollective)) and one.collective.role is Role.WEIGHT


def _specs_around(step: CollectiveStep) -> tuple[Spec, Spec]:
    return step.collective.before, step.collective.after
