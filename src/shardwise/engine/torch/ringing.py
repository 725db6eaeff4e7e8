"""Attention that runs around a ring in place of the collectives that the derivation has beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardwise.derive.overlapped import RING
from shardwise.derive.walk import Communicate, Compute
from shardwise.engine.torch.attention import Attention
from shardwise.engine.torch.calls import SIGHTS, Call, Calls
from shardwise.engine.torch.ring import RingAttention
from shardwise.lowering.instruction import Instruction, Launch, Start, Wait
from shardwise.lowering.traffic import Traffic
from shardwise.model.operations import Scan


class Ring(NamedTuple):
    """An attention, or its gradient, and the collectives that it takes the place of."""

    step: Compute
    moved: tuple[Communicate, ...]


def rings(calls: Calls, instructions: Iterable[Instruction]) -> Iterator[Instruction | Ring]:
    """Instructions, with rings in place of the kernels and collectives that they stand for."""
    found = list(instructions)
    moved: dict[str, list[Communicate]] = {}
    replaced: set[int] = set()
    for traffic in _around(calls, found):
        replaced.add(id(traffic))
        for result in traffic.beside:
            moved.setdefault(result, []).extend(traffic.derived)
    for one in found:
        if isinstance(one, Launch) and (around := moved.get(one.kernel.outputs[0])):
            (step,) = one.kernel.steps
            yield Ring(step, tuple(around))
        elif not (isinstance(one, Start | Wait) and id(one.traffic) in replaced):
            yield one


def _around(calls: Calls, instructions: Iterable[Instruction]) -> Iterator[Traffic]:
    """The collectives that run around a ring of several ranks."""
    if calls.unit.family.ring and calls.rank.several(RING):
        for one in instructions:
            if isinstance(one, Start) and one.traffic.axes == RING and one.traffic.beside:
                yield one.traffic


def ring_call(calls: Calls, ring: Ring, phase: str) -> Call:
    """Keys and values are taken, and their gradients given, as they rest."""
    operation, placed = ring.step.operation, ring.step.placed
    exchange = calls.rank.exchange
    assert exchange is not None, "a rank of several has an exchange"
    attention = RingAttention(Attention.of(calls.numerics, calls.sizes["H"]), exchange, RING, calls.rank.position(RING))
    resting = {one.tensor.name: one.collective for one in ring.moved}
    operands = zip(operation.operands, placed.inputs, strict=False)
    keys = {name: calls.key(name, resting[name].before if name in resting else spec) for name, spec in operands}
    outputs = zip(operation.outputs, placed.outputs, strict=True)
    writes = tuple(calls.key(name, resting[name].after if name in resting else spec) for name, spec in outputs)
    q, k, v, _, _, *others = operation.operands
    reads = (*(keys[name] for name in (q, k, v)), calls.cut(SIGHTS, RING), *(keys[name] for name in others))
    kernel = attention.forward if isinstance(operation, Scan) else attention.backward
    return Call(kernel, reads, writes, phase, alone=True)
