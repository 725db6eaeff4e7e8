"""What a unit holds at each moment of its backward pass: what it recomputed, makes and moves, and what it still has saved.

The moments are those of the pass's instructions: one operation that is recomputed, all transposes of one operation, or the start
or the end of a collective on activations. What a moment reads and makes is there at once, and what it was the last to touch goes
when it is done. Source: run/engine/unit_passes.py, which frees likewise (tests/train/test_memory.py follows the storages).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import groupby
from typing import NamedTuple

from shardwise.derive.sharded_program import ComputeStep
from shardwise.derive.sharded_unit import ShardedUnit
from shardwise.model.decoder import MTP_UNITS
from shardwise.model.operations import ScanGradient
from shardwise.model.program import Role
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.collective_matmul import CollectiveMatmul, fuse_collective_matmuls
from shardwise.step.instructions import (
    KernelLaunch,
    LocalSlice,
    ShardedTensor,
    StartCollective,
    UnitCollective,
    WaitCollective,
)
from shardwise.step.unit_instructions import UnitInstructions, touched_tensors

UNCOUNTED_ROLES = (Role.WEIGHT, Role.WEIGHT_GRADIENT, Role.CONSTANT)
COPIED_BEFORE = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)  # what is sent is laid out part by part
COPIED_AFTER = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL,
)  # parts that have come are laid out along their dim


class LiveTensor(NamedTuple):
    """A tensor as a moment has it. It is there only where the group of devices along `over` is more than one, and
    so are the `rows` (a spec of the dims before the one along which parts lie)."""

    name: str
    spec: Spec
    over: Axes = ()
    rows: Spec | None = None


class LiveSet(NamedTuple):
    """One of them; `gradients` are weights' that it makes, by their shardings, before they go to where they rest.
    `has_made_weight_grads`: some were made by then.

    `scores`: attention's are there, where they are written; `gradient_of_scores`: so is the gradient of them.
    """

    parts: tuple[LiveTensor, ...]
    gradients: tuple[Spec, ...]
    has_made_weight_grads: bool
    scores: bool
    gradient_of_scores: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of what is there."""
        return tuple(dict.fromkeys(part.name for part in self.parts))


BackwardNode = tuple[ComputeStep, ...] | StartCollective | WaitCollective | LocalSlice | CollectiveMatmul


def live_sets(template: UnitInstructions) -> Iterator[LiveSet]:
    """All of them, in order."""
    unit, events = template.unit, tuple(_autograd_nodes(template))
    touches = [tuple(_touched_tensors(unit, event)) for event in events]
    last = {held: place for place, names in enumerate(touches) for held in names}
    moves = _MovedTensors(events)
    scanned = {out for one in unit.forward.program.operations if one.kind == "scan" for out in one.outputs}
    here = last.keys() - {held for event in events for held in _made_tensors(event)}
    makes = False
    for place, (event, names) in enumerate(zip(events, touches, strict=True)):
        here = here | set(names)
        gradients = tuple(_weight_gradient_specs(unit, event))
        makes = makes or bool(gradients)
        yield LiveSet(
            (*moves.parts(here), *moves.copies(event), *_pending_gradients(unit)), gradients, makes,
            not scanned.isdisjoint(held.name for held in here), _is_gradient_of_scores(event),
        )  # fmt: skip
        here = {held for held in here if last[held] > place}


class _MovedTensors:
    """What collectives bring, and slices are of, by how they lie behind them."""

    def __init__(self, events: tuple[BackwardNode, ...]) -> None:
        started = [one.collective for one in events if isinstance(one, StartCollective)]
        self.source = {_collective_ends(one)[1]: (one.axes, _collective_ends(one)[0]) for one in started}
        self.source |= {
            one.ends[1]: (one.collective.axes, one.ends[0]) for one in events if isinstance(one, CollectiveMatmul)
        }
        self.sliced = {
            ShardedTensor(*_slice_end(one, after=True)): _slice_end(one)
            for one in events
            if isinstance(one, LocalSlice)
        }
        self.pieces = {}
        for one in started:
            if one.chunked_with:
                small, whole = (
                    _collective_ends(one) if one.kind is CollectiveKind.ALL_GATHER else _collective_ends(one)[::-1]
                )
                self.pieces[whole] = one.axes, small

    def parts(self, here: Set[ShardedTensor]) -> Iterator[LiveTensor]:
        """What tensors take: a slice as much as what it is of; what has moved over one device is where it was."""
        for held in sorted(here, key=str):
            if held in self.sliced:
                yield from () if self.sliced[held] in here else (LiveTensor(*self.sliced[held]),)
            elif held in self.pieces:
                yield from self.in_pieces(held, here)
            else:
                axes, before = self.source.get(held, ((), held))
                yield LiveTensor(*held, over=axes if before in here else ())

    def in_pieces(self, whole: ShardedTensor, here: Set[ShardedTensor]) -> Iterator[LiveTensor]:
        """Of what runs in pieces the one that is used and the one that moves."""
        axes, small = self.pieces[whole]
        yield LiveTensor(*small, over=axes)
        yield LiveTensor(*small, over=axes if small in here else ())

    @staticmethod
    def copies(event: BackwardNode) -> Iterator[LiveTensor]:
        """The buffers that collectives copy into; parts along the first dim need no copy, and rows of experts are sorted. What
        runs in pieces has one buffer to send and one to receive."""
        if isinstance(event, CollectiveMatmul):
            yield from [LiveTensor(*event.block, over=event.collective.axes)] * 2
            return
        if not isinstance(event, (StartCollective, WaitCollective)) or event.collective.chunked_with:
            return
        traffic, (before, after) = event.collective, _collective_ends(event.collective)
        if traffic.kind not in (COPIED_BEFORE if isinstance(event, StartCollective) else COPIED_AFTER):
            return
        held = before if isinstance(event, StartCollective) else after
        whole, cut = (before, after) if traffic.kind is CollectiveKind.REDUCE_SCATTER else (after, before)
        dim = next((place for place, axes in enumerate(whole.spec.axes) if len(cut.spec.axes[place]) > len(axes)), 0)
        if traffic.role is Role.ROUTED:
            yield LiveTensor(*held, over=traffic.axes)
        elif dim:
            yield LiveTensor(*held, over=traffic.axes, rows=Spec(held.spec.dims[:dim], held.spec.axes[:dim]))


def _autograd_nodes(template: UnitInstructions) -> Iterator[BackwardNode]:
    """The pass's computations by nodes of automatic differentiation, and what moves activations."""
    unit = template.unit
    recomputed = {id(step) for step in unit.recompute_steps}
    flat: list[ComputeStep | StartCollective | WaitCollective | LocalSlice | CollectiveMatmul] = []
    for one in fuse_collective_matmuls(template.passes["backward"]):
        if isinstance(one, KernelLaunch):
            flat += one.kernel.steps
        elif isinstance(one, LocalSlice | CollectiveMatmul) or (
            isinstance(one, (StartCollective, WaitCollective)) and _moves_activations(one.collective)
        ):
            flat.append(one)

    def node(step: ComputeStep | StartCollective | WaitCollective | LocalSlice | CollectiveMatmul) -> object:
        """Whose transpose it is; what adds the parts of a gradient up is the transpose of nothing, and a node of its own."""
        if not isinstance(step, ComputeStep) or id(step) in recomputed:
            return id(step)
        return unit.forward_index.get(step.operation.outputs[0], step.operation.outputs[0])

    for _, group in groupby(flat, node):
        first, *others = group
        yield (
            (first, *(one for one in others if isinstance(one, ComputeStep)))
            if isinstance(first, ComputeStep)
            else first
        )


def _moves_activations(traffic: UnitCollective) -> bool:
    return bool(traffic.derived) and not traffic.moves_weights and not traffic.is_control


def _collective_ends(traffic: UnitCollective) -> tuple[ShardedTensor, ShardedTensor]:
    """What a collective moves, as it lies before and behind it."""
    first, last = traffic.derived[0], traffic.derived[-1]
    return ShardedTensor(first.tensor.name, first.collective.before), ShardedTensor(
        last.tensor.name, last.collective.after
    )


def _slice_end(one: LocalSlice, *, after: bool = False) -> ShardedTensor:
    collective = one.step.collective
    return ShardedTensor(one.step.tensor.name, collective.after if after else collective.before)


def _touched_tensors(unit: ShardedUnit, event: BackwardNode) -> Iterator[ShardedTensor]:
    """What an event reads or makes, but for weights and what belongs to the batch."""
    if isinstance(event, CollectiveMatmul):
        found = [*event.reads, *event.writes]
    elif isinstance(event, tuple):
        found = [ShardedTensor(*one) for step in event for one in (*_operand_specs(step), *_result_specs(step))]
    else:
        found = [*(touched_tensors(event) if isinstance(event, LocalSlice) else _collective_ends(event.collective))]
    return (held for held in found if unit.tensors[held.name].role not in UNCOUNTED_ROLES)


def _operand_specs(step: ComputeStep) -> Iterator[tuple[str, Spec]]:
    return zip(step.operation.operands, step.placed.inputs, strict=False)


def _result_specs(step: ComputeStep) -> Iterator[tuple[str, Spec]]:
    return zip(step.operation.outputs, step.placed.outputs, strict=True)


def _made_tensors(event: BackwardNode) -> Iterator[ShardedTensor]:
    if isinstance(event, CollectiveMatmul):
        yield from event.writes
    elif isinstance(event, tuple):
        yield from (ShardedTensor(*one) for step in event for one in _result_specs(step))
    elif isinstance(event, LocalSlice):
        yield _slice_end(event, after=True)
    else:
        yield _collective_ends(event.collective)[1]


def _weight_gradient_specs(unit: ShardedUnit, event: BackwardNode) -> Iterator[Spec]:
    """Shardings of the weights' gradients that an event makes, as it makes them."""
    if isinstance(event, CollectiveMatmul):
        written: Iterable[tuple[str, Spec]] = event.writes
    else:
        written = [one for step in event for one in _result_specs(step)] if isinstance(event, tuple) else []
    return (spec for name, spec in written if unit.tensors[name].role is Role.WEIGHT_GRADIENT)


def _is_gradient_of_scores(event: BackwardNode) -> bool:
    steps = event if isinstance(event, tuple) and not isinstance(event, CollectiveMatmul) else ()
    return any(isinstance(step.operation, ScanGradient) for step in steps)


def _pending_gradients(unit: ShardedUnit) -> Iterator[LiveTensor]:
    """What the head gave as the gradient of the last hidden state, to which modules of multi-token prediction add theirs."""
    given = (name for name in unit.backward.program.outputs if unit.tensors[name].role is Role.RESIDUAL)
    yield from (LiveTensor(name, unit.backward.specs[name]) for name in given if unit.name in MTP_UNITS)
