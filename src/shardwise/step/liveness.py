"""What a unit holds at each moment of its backward pass: what it recomputed, makes and moves, and what it still has saved.

The moments are those of the pass's instructions: one operation that is recomputed, all transposes of one operation, or the start
or the end of a collective on activations. What a moment reads and makes is there at once, and what it was the last to touch goes
when it is done. Source: run/engine/unit_passes.py, which frees likewise (tests/train/test_memory.py follows the storages).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import groupby
from typing import NamedTuple

from shardwise.derive.sharded_program import Compute
from shardwise.derive.sharded_unit import Unit
from shardwise.model.decoder import PREDICTS
from shardwise.model.operations import ScanGradient
from shardwise.model.program import Role
from shardwise.sharding.collectives import Kind
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.collective_matmul import InPieces, with_rings
from shardwise.step.instructions import Held, Launch, Slice, Start, Traffic, Wait
from shardwise.step.unit_instructions import Template, touched

OUTSIDE = (Role.WEIGHT, Role.WEIGHT_GRADIENT, Role.CONSTANT)
CUT = (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)  # what is sent is laid out part by part
LAID = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)  # parts that have come are laid out along their dim


class Part(NamedTuple):
    """A tensor as a moment has it. It is there only where the group of devices along `over` is more than one, and
    so are the `rows` (a spec of the dims before the one along which parts lie)."""

    name: str
    spec: Spec
    over: Axes = ()
    rows: Spec | None = None


class Moment(NamedTuple):
    """One of them; `gradients` are weights' that it makes, by their shardings, before they go to where they rest. `makes`: some
    were made by then.

    `scores`: attention's are there, where they are written; `gradient_of_scores`: so is the gradient of them.
    """

    parts: tuple[Part, ...]
    gradients: tuple[Spec, ...]
    makes: bool
    scores: bool
    gradient_of_scores: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of what is there."""
        return tuple(dict.fromkeys(part.name for part in self.parts))


Event = tuple[Compute, ...] | Start | Wait | Slice | InPieces


def moments(template: Template) -> Iterator[Moment]:
    """All of them, in order."""
    unit, events = template.unit, tuple(_events(template))
    touches = [tuple(_touches(unit, event)) for event in events]
    last = {held: place for place, names in enumerate(touches) for held in names}
    moves = _Moves(events)
    scanned = {out for one in unit.forward.program.operations if one.kind == "scan" for out in one.outputs}
    here = last.keys() - {held for event in events for held in _made(event)}
    makes = False
    for place, (event, names) in enumerate(zip(events, touches, strict=True)):
        here = here | set(names)
        gradients = tuple(_gradients(unit, event))
        makes = makes or bool(gradients)
        yield Moment(
            (*moves.parts(here), *moves.copies(event), *_waiting(unit)), gradients, makes,
            not scanned.isdisjoint(held.name for held in here), _is_gradient_of_scores(event),
        )  # fmt: skip
        here = {held for held in here if last[held] > place}


class _Moves:
    """What collectives bring, and slices are of, by how they lie behind them."""

    def __init__(self, events: tuple[Event, ...]) -> None:
        started = [one.traffic for one in events if isinstance(one, Start)]
        self.source = {_ends(one)[1]: (one.axes, _ends(one)[0]) for one in started}
        self.source |= {one.ends[1]: (one.traffic.axes, one.ends[0]) for one in events if isinstance(one, InPieces)}
        self.sliced = {Held(*_of(one, after=True)): _of(one) for one in events if isinstance(one, Slice)}
        self.pieces = {}
        for one in started:
            if one.beside:
                small, whole = _ends(one) if one.kind is Kind.ALL_GATHER else _ends(one)[::-1]
                self.pieces[whole] = one.axes, small

    def parts(self, here: Set[Held]) -> Iterator[Part]:
        """What tensors take: a slice as much as what it is of; what has moved over one device is where it was."""
        for held in sorted(here, key=str):
            if held in self.sliced:
                yield from () if self.sliced[held] in here else (Part(*self.sliced[held]),)
            elif held in self.pieces:
                yield from self.in_pieces(held, here)
            else:
                axes, before = self.source.get(held, ((), held))
                yield Part(*held, over=axes if before in here else ())

    def in_pieces(self, whole: Held, here: Set[Held]) -> Iterator[Part]:
        """Of what runs in pieces the one that is used and the one that moves."""
        axes, small = self.pieces[whole]
        yield Part(*small, over=axes)
        yield Part(*small, over=axes if small in here else ())

    @staticmethod
    def copies(event: Event) -> Iterator[Part]:
        """The buffers that collectives copy into; parts along the first dim need no copy, and rows of experts are sorted. What
        runs in pieces has one buffer to send and one to receive."""
        if isinstance(event, InPieces):
            yield from [Part(*event.block, over=event.traffic.axes)] * 2
            return
        if not isinstance(event, (Start, Wait)) or event.traffic.beside:
            return
        traffic, (before, after) = event.traffic, _ends(event.traffic)
        if traffic.kind not in (CUT if isinstance(event, Start) else LAID):
            return
        held = before if isinstance(event, Start) else after
        whole, cut = (before, after) if traffic.kind is Kind.REDUCE_SCATTER else (after, before)
        dim = next((place for place, axes in enumerate(whole.spec.axes) if len(cut.spec.axes[place]) > len(axes)), 0)
        if traffic.role is Role.ROUTED:
            yield Part(*held, over=traffic.axes)
        elif dim:
            yield Part(*held, over=traffic.axes, rows=Spec(held.spec.dims[:dim], held.spec.axes[:dim]))


def _events(template: Template) -> Iterator[Event]:
    """The pass's computations by nodes of automatic differentiation, and what moves activations."""
    unit = template.unit
    recomputed = {id(step) for step in unit.recompute_steps}
    flat: list[Compute | Start | Wait | Slice | InPieces] = []
    for one in with_rings(template.passes["backward"]):
        if isinstance(one, Launch):
            flat += one.kernel.steps
        elif isinstance(one, Slice | InPieces) or (isinstance(one, (Start, Wait)) and _moves_activations(one.traffic)):
            flat.append(one)

    def node(step: Compute | Start | Wait | Slice | InPieces) -> object:
        """Whose transpose it is; what adds the parts of a gradient up is the transpose of nothing, and a node of its own."""
        if not isinstance(step, Compute) or id(step) in recomputed:
            return id(step)
        return unit.nodes.get(step.operation.outputs[0], step.operation.outputs[0])

    for _, group in groupby(flat, node):
        first, *others = group
        yield (first, *(one for one in others if isinstance(one, Compute))) if isinstance(first, Compute) else first


def _moves_activations(traffic: Traffic) -> bool:
    return bool(traffic.derived) and not traffic.carries_weights and not traffic.is_control


def _ends(traffic: Traffic) -> tuple[Held, Held]:
    """What a collective moves, as it lies before and behind it."""
    first, last = traffic.derived[0], traffic.derived[-1]
    return Held(first.tensor.name, first.collective.before), Held(last.tensor.name, last.collective.after)


def _of(one: Slice, *, after: bool = False) -> Held:
    collective = one.step.collective
    return Held(one.step.tensor.name, collective.after if after else collective.before)


def _touches(unit: Unit, event: Event) -> Iterator[Held]:
    """What an event reads or makes, but for weights and what belongs to the batch."""
    if isinstance(event, InPieces):
        found = [*event.reads, *event.writes]
    elif isinstance(event, tuple):
        found = [Held(*one) for step in event for one in (*_read(step), *_written(step))]
    else:
        found = [*(touched(event) if isinstance(event, Slice) else _ends(event.traffic))]
    return (held for held in found if unit.tensors[held.name].role not in OUTSIDE)


def _read(step: Compute) -> Iterator[tuple[str, Spec]]:
    return zip(step.operation.operands, step.placed.inputs, strict=False)


def _written(step: Compute) -> Iterator[tuple[str, Spec]]:
    return zip(step.operation.outputs, step.placed.outputs, strict=True)


def _made(event: Event) -> Iterator[Held]:
    if isinstance(event, InPieces):
        yield from event.writes
    elif isinstance(event, tuple):
        yield from (Held(*one) for step in event for one in _written(step))
    elif isinstance(event, Slice):
        yield _of(event, after=True)
    else:
        yield _ends(event.traffic)[1]


def _gradients(unit: Unit, event: Event) -> Iterator[Spec]:
    """Shardings of the weights' gradients that an event makes, as it makes them."""
    if isinstance(event, InPieces):
        written: Iterable[tuple[str, Spec]] = event.writes
    else:
        written = [one for step in event for one in _written(step)] if isinstance(event, tuple) else []
    return (spec for name, spec in written if unit.tensors[name].role is Role.WEIGHT_GRADIENT)


def _is_gradient_of_scores(event: Event) -> bool:
    steps = event if isinstance(event, tuple) and not isinstance(event, InPieces) else ()
    return any(isinstance(step.operation, ScanGradient) for step in steps)


def _waiting(unit: Unit) -> Iterator[Part]:
    """What the head gave as the gradient of the last hidden state, to which modules of multi-token prediction add theirs."""
    given = (name for name in unit.backward.program.outputs if unit.tensors[name].role is Role.RESIDUAL)
    yield from (Part(name, unit.backward.specs[name]) for name in given if unit.name in PREDICTS)
