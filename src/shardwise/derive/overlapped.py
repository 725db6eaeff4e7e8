"""Collectives that overlap, in pieces, with the computation that needs them: ring attention, asynchronous tensor parallelism.

Which bytes move is the derivation's; this says beside which computations. With a ring over `cp` each device attends to one
block of keys and values while the next arrives; on the way back the gradients of the blocks travel with them. With
asynchronous tensor parallelism a product starts with the rows that are there. Sources: Liu et al. 2023 (Ring Attention);
Wang et al. 2023 (Overlap communication with dependent computation via decomposition); S1, "ring attention".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.derive.walk import Communicate, Compute, Step
from shardwise.layout.family import TP, Family
from shardwise.model.operations import Accumulate, Contract, Operation, Scan, ScanGradient
from shardwise.model.program import Role
from shardwise.sharding.collective import Kind
from shardwise.sharding.spec import Axes

RING: Axes = ("cp",)
MOVED_WHOLE = (Role.WEIGHT, Role.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The collective at position `step`, which overlaps with the computations at the positions `beside`."""

    step: int
    beside: tuple[int, ...]


def overlapped(steps: Sequence[Step], family: Family) -> Iterator[Overlapped]:
    """The collectives of one phase that the family overlaps with computations, in order."""
    rings: list[tuple[Axes, tuple[type[Operation], ...]]] = []
    if family.ring:
        rings.append((RING, (Scan, ScanGradient)))
    if family.async_tp:
        rings.append((TP, (Contract,)))
    for position, step in enumerate(steps):
        for axes, kinds in rings:
            if isinstance(step, Communicate) and step.collective.axes == axes and step.tensor.role not in MOVED_WHOLE:
                beside = tuple(_beside(steps, position, step, kinds))
                if beside:
                    yield Overlapped(position, beside)


def _beside(
    steps: Sequence[Step], position: int, moved: Communicate, kinds: tuple[type[Operation], ...]
) -> Iterator[int]:
    """Computations that take what is gathered, or that make what is scattered."""
    if moved.collective.kind is Kind.ALL_GATHER:
        yield from _takers(steps, position, moved, kinds)
    if moved.collective.kind is Kind.REDUCE_SCATTER:
        makers = _makers(steps[:position], moved.tensor.name)
        for index, step in enumerate(steps[:position]):
            if isinstance(step, Compute) and isinstance(step.operation, kinds) and makers & set(step.operation.outputs):
                yield index


def _takers(
    steps: Sequence[Step], position: int, moved: Communicate, kinds: tuple[type[Operation], ...]
) -> Iterator[int]:
    """Computations that take what is gathered, until it is gathered again."""
    name, spec = moved.tensor.name, moved.collective.after
    for index, step in enumerate(steps[position + 1 :], start=position + 1):
        if isinstance(step, Communicate):
            if step.tensor.name == name and step.collective.after == spec:
                return
        elif isinstance(step.operation, kinds):
            taken = zip(step.operation.operands, step.placed.inputs, strict=False)
            if (name, spec) in taken:
                yield index


def _makers(steps: Sequence[Step], name: str) -> set[str]:
    """The tensor itself, and what it is the sum of."""
    for step in steps:
        if isinstance(step, Compute) and isinstance(step.operation, Accumulate) and name in step.operation.outputs:
            return {name, *step.operation.operands}
    return {name}
