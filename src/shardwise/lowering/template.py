"""The instructions of one unit by pass, with expressions for sizes and counts: priced with numbers, or with arrays of them.

Forward; backward, with what is recomputed in front of it; update. Kernels and collectives on activations come in the order of the
derived steps. Weights are gathered at the head of a pass and waited for where they are first read; gradients leave as soon as the
last of their group is made, and are waited for before anything reads them. A tensor is freed behind its last reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.derive.derivation import Unit, derived_unit
from shardwise.issuing import IssuePolicy
from shardwise.layout.family import Family
from shardwise.lowering.control import CONTROL_UNIT, control_traffic
from shardwise.lowering.instruction import Free, Instruction, Launch, Start, Wait
from shardwise.lowering.kernels import Kernel, placed_kernels
from shardwise.lowering.traffic import Traffic, unit_traffic
from shardwise.model.architecture import Structure
from shardwise.model.program import Role

# The phases of a derivation by the pass that they run in.
PASSES: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",), "backward": ("recompute", "backward"), "update": ("update",),
}  # fmt: skip
LASTING = (Role.WEIGHT_GRADIENT, Role.STATE, Role.CONSTANT)  # what no pass frees

Ordered = Kernel | Traffic  # what the derivation puts in order


@dataclass(frozen=True)
class Template:
    """A unit's instructions by pass."""

    unit: Unit
    passes: Mapping[str, tuple[Instruction, ...]]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel that is launched, in order."""
        return tuple(one.kernel for each in self.passes.values() for one in each if isinstance(one, Launch))

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """Every collective that is started, in order."""
        return tuple(one.traffic for each in self.passes.values() for one in each if isinstance(one, Start))


@lru_cache(maxsize=1024)
def unit_template(
    structure: Structure, family: Family, name: str, policy: IssuePolicy, single: frozenset[str] = frozenset()
) -> Template:
    """The template of a unit in a layout of this family under a policy. The step's control traffic is the head's.

    `single`: axes that are known to have one device; over them alone there is no collective.
    """
    unit = derived_unit(structure, family, name)
    control = control_traffic(structure, family, policy) if name == CONTROL_UNIT else ()
    issued = (*unit_traffic(unit, policy, single), *control)
    traffic, launched = [one for one in issued if not single.issuperset(one.axes)], placed_kernels(unit)
    passes = {}
    for name_of_pass, phases in PASSES.items():
        ordered = [step for phase in phases for step in _in_order(phase, launched[phase], traffic)]
        unplaced = [one for one in traffic if one.phase in phases and one.place < 0]
        passes[name_of_pass] = tuple(_freed(unit, name_of_pass, [*_Pass(unit, ordered).instructions(unplaced)]))
    return Template(unit, passes)


def _in_order(phase: str, launched: Iterable[tuple[int, Kernel]], traffic: Iterable[Traffic]) -> list[Ordered]:
    """A phase's kernels and its collectives on activations by their places among the derived steps."""
    placed: list[tuple[int, Ordered]] = [*launched]
    placed += [(one.place, one) for one in traffic if one.phase == phase and one.place >= 0]
    return [step for _, step in sorted(placed, key=lambda pair: pair[0])]


class _Pass:
    """Puts starts and waits around the steps of one pass."""

    def __init__(self, unit: Unit, steps: Sequence[Ordered]) -> None:
        self.unit, self.steps = unit, steps
        self.moving: list[Traffic] = []

    def instructions(self, unplaced: Sequence[Traffic]) -> Iterator[Instruction]:
        """The steps, with the collectives that have no place among them as soon as what they carry is there."""
        made = {name for step in self.steps if isinstance(step, Kernel) for name in step.outputs}
        held_back = list(unplaced)
        for one in [one for one in held_back if made.isdisjoint(carried(self.unit, one))]:
            held_back.remove(one)
            yield from self.start(one)
        for step in self.steps:
            if isinstance(step, Traffic):
                yield from self.start(step)
                continue
            yield from self.wait(step.reads)
            yield Launch(step)
            made -= set(step.outputs)
            for one in [one for one in held_back if made.isdisjoint(carried(self.unit, one))]:
                held_back.remove(one)
                yield from self.start(one)
        yield from (Wait(one) for one in self.moving)

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
    return one.tensors


def _freed(unit: Unit, name_of_pass: str, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions, each followed by what it was the last to touch; the update frees nothing."""
    last: dict[str, int] = {}
    for place, one in enumerate(instructions):
        last |= dict.fromkeys(_touched(unit, one), place)
    kept = {**unit.saved, **unit.kept} if name_of_pass == "forward" else {}
    stays = {*kept, *unit.forward.program.outputs, *unit.backward.program.outputs}
    gathered = {name for one in instructions if isinstance(one, Start) for name in one.traffic.tensors}
    for place, one in enumerate(instructions):
        yield one
        freed = tuple(name for name, end in last.items() if end == place and name not in stays)
        freed = tuple(name for name in freed if _passes(unit, name, gathered))
        if freed and name_of_pass != "update":
            yield Free(freed)


def _passes(unit: Unit, name: str, gathered: Collection[str]) -> bool:
    """Whether a tensor is there for a pass only: no weight that rests whole, no weight's gradient, nothing of the optimizer's."""
    role = unit.tensors[name].role if name in unit.tensors else Role.CONSTANT
    return role not in LASTING and (role is not Role.WEIGHT or name in gathered)


def _touched(unit: Unit, one: Instruction) -> tuple[str, ...]:
    match one:
        case Launch():
            return (*one.kernel.reads, *one.kernel.outputs)
        case Start() | Wait():
            return carried(unit, one.traffic)
        case Free():
            return ()
