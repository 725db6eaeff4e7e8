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

from shardwise.derive.sharded_program import Communicate, Step
from shardwise.derive.sharded_unit import MOST_UNITS, Unit, derived_unit
from shardwise.layout.sharding_scheme import Family
from shardwise.model.architecture import Structure
from shardwise.model.optimizer_program import directions
from shardwise.model.program import Role
from shardwise.sharding.collectives import Kind
from shardwise.sharding.spec import Spec
from shardwise.step.collectives import CONTROL_UNIT, control_traffic, unit_traffic
from shardwise.step.instructions import Free, Held, Instruction, Kernel, Launch, Slice, Start, Traffic, Wait
from shardwise.step.kernel_fusion import placed_kernels
from shardwise.values.issue_policy import IssuePolicy

# The phases of a derivation by the pass that they run in.
PASSES: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",), "backward": ("recompute", "backward"), "update": ("update",),
}  # fmt: skip
Ordered = Kernel | Traffic | Slice  # what the derivation puts in order


@dataclass(frozen=True)
class Template:
    """A unit's instructions by pass; over the axes of one device, `single`, there is no collective."""

    unit: Unit
    passes: Mapping[str, tuple[Instruction, ...]]
    single: frozenset[str] = frozenset()

    @cached_property
    def of_inputs(self) -> tuple[Instruction, ...]:
        """The backward pass as far as the gradient of the unit's input needs it."""
        return tuple(one for one, needed in self._backward if needed)

    @cached_property
    def of_weights(self) -> tuple[Instruction, ...]:
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
            *self._of_several(
                Held(name, backward.specs[name])
                for name in backward.program.outputs
                if self.unit.tensors[name].role is Role.RESIDUAL
            )
        }
        for one in reversed(self.passes["backward"]):
            if isinstance(one, Free):
                continue
            ends = list(_ends(one))
            needed = any(not wanted.isdisjoint(self._of_several(writes)) for _, writes in ends)
            needed = needed or _brings_weights(one) or any(self._reads_weights(reads) for reads, _ in ends)
            wanted |= {held for reads, _ in ends for held in self._of_several(reads) if needed}
            found.append((one, needed))
        return tuple(reversed(found))

    def _reads_weights(self, held: Iterable[Held]) -> bool:
        return any(self.unit.tensors[one.name].role is Role.WEIGHT for one in held)

    def _of_several(self, held: Iterable[Held]) -> Iterator[Held]:
        """Tensors by the axes of several devices that split them."""
        for name, spec in held:
            partial = tuple(axis for axis in spec.partial if axis not in self.single)
            yield Held(name, Spec(spec.dims, spec.without(self.single).axes, partial))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel that is launched, in order."""
        return tuple(one.kernel for each in self.passes.values() for one in each if isinstance(one, Launch))

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """Every collective that is started, in order."""
        return tuple(one.traffic for each in self.passes.values() for one in each if isinstance(one, Start))


@lru_cache(maxsize=MOST_UNITS)
def unit_template(
    structure: Structure, family: Family, name: str, policy: IssuePolicy, single: frozenset[str] = frozenset()
) -> Template:
    """The template of a unit in a layout of this family under a policy. The step's control traffic is the head's.

    `single`: axes that are known to have one device; over them alone there is no collective.
    """
    control = control_traffic(structure, family, policy) if name == CONTROL_UNIT else ()
    return template_of(derived_unit(structure, family, name), policy, single, control)


def template_of(
    unit: Unit, policy: IssuePolicy, single: frozenset[str] = frozenset(), control: Iterable[Traffic] = ()
) -> Template:
    """The template of any derived unit, with the control traffic that it has."""
    issued = (*unit_traffic(unit, policy, single), *control)
    traffic, launched = [one for one in issued if not single.issuperset(one.axes)], placed_kernels(unit)
    passes = {}
    for name, phases in PASSES.items():
        ordered = [step for phase in phases for step in _in_order(unit, phase, launched[phase], traffic)]
        unplaced = [one for one in traffic if one.phase in phases and one.place < 0]
        passes[name] = tuple(_freed(unit, name, [*_Pass(unit, ordered).instructions(unplaced)]))
    return Template(unit, passes, single)


def _in_order(
    unit: Unit, phase: str, launched: Iterable[tuple[int, Kernel]], traffic: Iterable[Traffic]
) -> list[Ordered]:
    """A phase's kernels, slices and collectives on activations by their places among the derived steps."""
    placed: list[tuple[int, Ordered]] = [*launched]
    placed += [(one.place, one) for one in traffic if one.phase == phase and one.place >= 0]
    placed += [(place, Slice(step)) for place, step in enumerate(unit.phases()[phase]) if _is_slice(step)]
    return [step for _, step in sorted(placed, key=lambda pair: pair[0])]


def _is_slice(step: Step) -> TypeGuard[Communicate]:
    return isinstance(step, Communicate) and step.collective.kind is Kind.SLICE


class _Pass:
    """Puts starts and waits around the steps of one pass."""

    def __init__(self, unit: Unit, steps: Sequence[Ordered]) -> None:
        self.unit, self.steps = unit, steps
        self.moving: list[Traffic] = []

    def instructions(self, unplaced: Sequence[Traffic]) -> Iterator[Instruction]:
        """The steps, with the collectives that have no place among them as soon as what they carry is there."""
        unmade = {name for step in self.steps if isinstance(step, Kernel) for name in step.outputs}
        held_back = list(unplaced)
        yield from self.start_ready(held_back, unmade)
        for step in self.steps:
            if isinstance(step, Traffic):
                yield from self.start(step)
                continue
            if isinstance(step, Slice):
                yield from self.wait([step.step.tensor.name])
                yield step
                continue
            yield from self.wait(step.reads)
            yield Launch(step)
            unmade -= set(step.outputs)
            yield from self.start_ready(held_back, unmade)
        yield from (Wait(one) for one in self.moving)

    def start_ready(self, held_back: list[Traffic], unmade: set[str]) -> Iterator[Instruction]:
        """Start those that are held back and carry nothing that has still to be made."""
        for one in [one for one in held_back if unmade.isdisjoint(carried(self.unit, one))]:
            held_back.remove(one)
            yield from self.start(one)

    def start(self, one: Traffic) -> Iterator[Instruction]:
        """Start a collective when what it carries has arrived; control traffic, which all waits for, is waited for at once."""
        yield from self.wait(carried(self.unit, one) if not one.is_control else self.everything())
        yield Start(one)
        self.moving.append(one)
        if one.is_control:
            yield from self.wait(one.tensors)

    def everything(self) -> list[str]:
        return [name for one in self.moving for name in carried(self.unit, one)]

    def wait(self, names: Iterable[str]) -> Iterator[Wait]:
        """Wait for what brings any of these tensors."""
        wanted = set(names)
        for one in [one for one in self.moving if not wanted.isdisjoint(carried(self.unit, one))]:
            self.moving.remove(one)
            yield Wait(one)


def carried(unit: Unit, one: Traffic) -> tuple[str, ...]:
    """The tensors that a collective moves, by the names that kernels have for them: weights, as updated, or their gradients."""
    if one.role is Role.WEIGHT_GRADIENT:
        return tuple(unit.gradients[name] for name in one.tensors)
    if one.role is Role.WEIGHT and one.phase == "update":
        return tuple(f"{name}'" for name in one.tensors)
    if one.role is Role.DIRECTION and one.place < 0:
        return tuple(name for name, weight in directions(unit.update.program).items() if weight in one.tensors)
    if one.role is Role.MEAN:
        return tuple(step.tensor.name for step in one.derived)
    return one.tensors


def _freed(unit: Unit, name_of_pass: str, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions, each followed by what it was the last to touch; the update frees nothing."""
    last: dict[Held, int] = {}
    pieces = _in_pieces(instructions)
    for place, one in enumerate(instructions):
        last |= dict.fromkeys((*touched(one), *pieces.get(place, ())), place)
    stays, freed = _stays(unit, name_of_pass), dict[int, list[Held]]()
    for held, place in last.items():
        if held not in stays and unit.tensors[held.name].role is not Role.CONSTANT and name_of_pass != "update":
            freed.setdefault(place, []).append(held)
    for place, one in enumerate(instructions):
        yield one
        if place in freed:
            yield Free(tuple(freed[place]))


def _in_pieces(instructions: Sequence[Instruction]) -> dict[int, list[Held]]:
    """By its place what a kernel touches of collectives that run in pieces beside it, until it has taken the last piece."""
    found: dict[str, list[Held]] = {}
    for one in instructions:
        for result in one.traffic.beside if isinstance(one, Start) else ():
            found.setdefault(result, []).extend(touched(one))
    launched = ((place, one.kernel) for place, one in enumerate(instructions) if isinstance(one, Launch))
    return {place: found[kernel.outputs[0]] for place, kernel in launched if kernel.outputs[0] in found}


def _stays(unit: Unit, name_of_pass: str) -> set[Held]:
    """What a later pass reads: weights and their gradients as they rest, what is saved, and what the pass gives."""
    forward, backward = unit.forward, unit.backward
    stays = {Held(name, forward.specs[name]) for name in (*forward.program.weights, *forward.program.outputs)}
    if name_of_pass == "forward":  # scalars are summed in the update
        stays |= {
            Held(step.tensor.name, step.collective.before) for step in forward.communication if not step.tensor.dims
        }
        return stays | {Held(*one) for one in (*unit.saved.items(), *unit.kept.items())}
    return stays | {Held(name, backward.specs[name]) for name in backward.program.outputs}


def touched(one: Instruction) -> Iterator[Held]:
    """What an instruction reads, and what it makes."""
    for reads, writes in _ends(one):
        yield from (*reads, *writes)


def _ends(one: Instruction) -> Iterator[tuple[Iterable[Held], Iterable[Held]]]:
    """What each step of an instruction reads and what it writes."""
    match one:
        case Launch():
            for step in one.kernel.steps:
                operation, placed = step.operation, step.placed
                yield [*map(Held, operation.operands, placed.inputs)], [*map(Held, operation.outputs, placed.outputs)]
        case Start() | Wait() | Slice():
            for each in (one.step,) if isinstance(one, Slice) else one.traffic.derived:
                before, after = _around(each)
                yield [Held(each.tensor.name, before)], [Held(each.tensor.name, after)]


def _brings_weights(one: Instruction) -> bool:
    return isinstance(one, (Start, Wait)) and one.traffic.role is Role.WEIGHT


def _around(step: Communicate) -> tuple[Spec, Spec]:
    return step.collective.before, step.collective.after
