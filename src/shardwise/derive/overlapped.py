"""Collectives that overlap, in pieces, with the computation that needs them: ring attention, asynchronous tensor parallelism.

Which bytes move is the derivation's; this says beside which computations. With a ring over `cp` each device attends to one
block of keys and values while the next arrives; on the way back the gradients of the blocks travel with them. With
asynchronous tensor parallelism products take or make the blocks (`pieces`). Sources: Liu et al. 2023 (Ring Attention); S1,
"ring attention".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.derive.pieces import MOVED_WHOLE, in_pieces
from shardwise.derive.walk import Communicate, Compute, Step
from shardwise.layout.family import Family
from shardwise.model.operations import Scan, ScanGradient
from shardwise.sharding.collective import Kind
from shardwise.sharding.spec import Axes

RING: Axes = ("cp",)
SCANS = (Scan, ScanGradient)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The collective at position `step`, which overlaps with the computations at the positions `beside`."""

    step: int
    beside: tuple[int, ...]


def overlapped(steps: Sequence[Step], family: Family) -> Iterator[Overlapped]:
    """The collectives of one phase that the family overlaps with computations, in order."""
    pieces = {id(one.moved): {id(product) for product in one.products} for one in in_pieces(steps, family)}
    for position, step in enumerate(steps):
        if not isinstance(step, Communicate):
            continue
        if family.ring and step.collective.axes == RING and step.tensor.role not in MOVED_WHOLE:
            beside = tuple(_beside(steps, position, step))
        else:
            beside = tuple(p for p, one in enumerate(steps) if id(one) in pieces.get(id(step), ()))
        if beside:
            yield Overlapped(position, beside)


def _beside(steps: Sequence[Step], position: int, moved: Communicate) -> Iterator[int]:
    """Attentions that take what is gathered, or that make what is scattered."""
    if moved.collective.kind is Kind.ALL_GATHER:
        yield from _takers(steps, position, moved)
    if moved.collective.kind is Kind.REDUCE_SCATTER:
        for index, step in enumerate(steps[:position]):
            if (
                isinstance(step, Compute)
                and isinstance(step.operation, SCANS)
                and moved.tensor.name in step.operation.outputs
            ):
                yield index


def _takers(steps: Sequence[Step], position: int, moved: Communicate) -> Iterator[int]:
    """Attentions that take what is gathered, until it is gathered again."""
    name, spec = moved.tensor.name, moved.collective.after
    for index, step in enumerate(steps[position + 1 :], start=position + 1):
        if isinstance(step, Communicate):
            if step.tensor.name == name and step.collective.after == spec:
                return
        elif isinstance(step.operation, SCANS):
            taken = zip(step.operation.operands, step.placed.inputs, strict=False)
            if (name, spec) in taken:
                yield index
