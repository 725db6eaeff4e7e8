"""What of a list of instructions runs as a ring of tensor parallelism: a collective with the products beside it, in one go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep
from shardwise.layout.sharding_scheme import TP_AXES
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.instructions import (
    Instruction,
    KernelLaunch,
    LocalSlice,
    ShardedTensor,
    StartCollective,
    UnitCollective,
)


@dataclass(frozen=True, slots=True)
class CollectiveMatmul:
    """Products that take the blocks of what is gathered, or make parts of the blocks of a sum; `terms` are what else is in the
    sum. `keeps_gathered`: what is gathered is read by others as well, so that its blocks are put together."""

    collective: UnitCollective
    products: tuple[ComputeStep, ...]
    terms: tuple[ShardedTensor, ...] = ()
    keeps_gathered: bool = False

    @property
    def moved(self) -> CollectiveStep:
        """The collective as it was derived."""
        (found,) = self.collective.derived
        return found

    @property
    def is_gather(self) -> bool:
        return self.collective.kind is CollectiveKind.ALL_GATHER

    @property
    def ends(self) -> tuple[ShardedTensor, ShardedTensor]:
        """What moves, as it lies before and behind the collective."""
        moved = self.moved
        return ShardedTensor(moved.tensor.name, moved.collective.before), ShardedTensor(
            moved.tensor.name, moved.collective.after
        )

    @property
    def block(self) -> ShardedTensor:
        """What a rank has of it."""
        return self.ends[0] if self.is_gather else self.ends[1]

    @property
    def dim(self) -> str:
        """Along which blocks lie."""
        before, after = (held.spec for held in self.ends)
        return next(dim for dim in before.dims if before.axes_of(dim) != after.axes_of(dim))

    @property
    def reads(self) -> tuple[ShardedTensor, ...]:
        """What it takes, each once: of what is gathered the rank's own block."""
        whole = self.ends[1] if self.is_gather else None
        read = [held for step in self.products for held in operand_tensors(step) if held != whole]
        return tuple(dict.fromkeys([*([self.block] if self.is_gather else []), *read, *self.terms]))

    @property
    def writes(self) -> tuple[ShardedTensor, ...]:
        """What it makes."""
        if not self.is_gather:
            return (self.block,)
        made = tuple(held for step in self.products for held in _result_tensors(step))
        return (*made, *([self.ends[1]] if self.keeps_gathered else []))


def fuse_collective_matmuls(instructions: Iterable[Instruction]) -> Iterator[Instruction | CollectiveMatmul]:
    """Instructions, each ring where the last of its products stood, or where the collective did of which they make parts."""
    listed = list(instructions)
    rings = [
        one.collective
        for one in listed
        if isinstance(one, StartCollective) and one.collective.axes == TP_AXES and one.collective.chunked_with
    ]
    ring_of = {result: ring for ring in rings for result in ring.chunked_with}
    summing = {ring.tensors[0]: ring for ring in rings if ring.kind is not CollectiveKind.ALL_GATHER} | ring_of
    products: dict[int, list[ComputeStep]] = {id(ring): [] for ring in rings}
    terms: dict[int, list[ShardedTensor]] = {id(ring): [] for ring in rings}
    for one in listed:
        ring = summing.get(one.kernel.outputs[0]) if isinstance(one, KernelLaunch) else getattr(one, "collective", None)
        if ring is None or id(ring) not in products:
            yield one
        elif isinstance(one, KernelLaunch):
            (step,) = one.kernel.steps
            if one.kernel.outputs[0] not in ring.chunked_with:
                terms[id(ring)] = [held for held in operand_tensors(step) if held.name not in ring.chunked_with]
                continue
            products[id(ring)].append(step)
            if ring.kind is CollectiveKind.ALL_GATHER and len(products[id(ring)]) == len(ring.chunked_with):
                own = tuple(products[id(ring)])
                yield CollectiveMatmul(
                    ring, own, keeps_gathered=_is_read_by_others(listed, CollectiveMatmul(ring, own))
                )
        elif isinstance(one, StartCollective) and ring.kind is not CollectiveKind.ALL_GATHER:
            yield CollectiveMatmul(ring, tuple(products[id(ring)]), tuple(terms[id(ring)]))


def _is_read_by_others(listed: Iterable[Instruction], ring: CollectiveMatmul) -> bool:
    """Whether others read what a ring gathers."""
    whole, own = ring.ends[1], {id(step) for step in ring.products}
    for one in listed:
        if isinstance(one, KernelLaunch):
            if any(whole in operand_tensors(step) for step in one.kernel.steps if id(step) not in own):
                return True
        elif isinstance(one, StartCollective | LocalSlice):
            moved = one.collective.derived if isinstance(one, StartCollective) else (one.step,)
            if any(ShardedTensor(step.tensor.name, step.collective.before) == whole for step in moved):
                return True
    return False


def operand_tensors(step: ComputeStep) -> list[ShardedTensor]:
    """What a step reads, as it lies."""
    return [ShardedTensor(*one) for one in zip(step.operation.operands, step.placed.inputs, strict=False)]


def _result_tensors(step: ComputeStep) -> list[ShardedTensor]:
    return [ShardedTensor(*one) for one in zip(step.operation.outputs, step.placed.outputs, strict=True)]
