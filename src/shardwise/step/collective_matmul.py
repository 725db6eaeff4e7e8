"""Collective matmul: rewrite of a tensor-parallel collective and the products beside it into one instruction, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardwise.derive import ComputeStep
from shardwise.layout import TP_AXES
from shardwise.sharding import CollectiveKind
from shardwise.step.instructions import (
    Instruction,
    KernelLaunch,
    LocalSlice,
    ShardedTensor,
    StartCollective,
    UnitCollective,
    before_and_after,
    operand_tensors,
    result_tensors,
)

__all__ = ["CollectiveMatmul", "fuse_collective_matmuls", "operand_tensors"]


@dataclass(frozen=True, slots=True)
class CollectiveMatmul:
    """Products that read the blocks of a gathered tensor, or make the partial sums of the blocks of a scattered one.

    `terms` are the other terms of the sum. `keeps_gathered`: other instructions read the gathered tensor too, so its
    blocks are assembled.
    """

    collective: UnitCollective
    products: tuple[ComputeStep, ...]
    terms: tuple[ShardedTensor, ...] = ()
    keeps_gathered: bool = False

    @property
    def is_gather(self) -> bool:
        return self.collective.kind is CollectiveKind.ALL_GATHER

    @property
    def ends(self) -> tuple[ShardedTensor, ShardedTensor]:
        """The moved tensor in its sharding before and after the collective."""
        return self.collective.ends

    @property
    def block(self) -> ShardedTensor:
        """The moved tensor in the sharding of which a rank has one block."""
        return self.ends[0] if self.is_gather else self.ends[1]

    @property
    def dim(self) -> str:
        """Dim along which blocks lie."""
        before, after = (tensor.spec for tensor in self.ends)
        return next(dim for dim in before.dims if before.axes_of(dim) != after.axes_of(dim))

    @property
    def reads(self) -> tuple[ShardedTensor, ...]:
        """Tensors that it reads, each once; of the gathered tensor the rank's own block."""
        gathered = self.ends[1] if self.is_gather else None
        operands = [tensor for step in self.products for tensor in operand_tensors(step) if tensor != gathered]
        return tuple(dict.fromkeys([*([self.block] if self.is_gather else []), *operands, *self.terms]))

    @property
    def writes(self) -> tuple[ShardedTensor, ...]:
        """Tensors that it makes."""
        if not self.is_gather:
            return (self.block,)
        results = tuple(tensor for step in self.products for tensor in result_tensors(step))
        return (*results, *([self.ends[1]] if self.keeps_gathered else []))


def fuse_collective_matmuls(instructions: Iterable[Instruction]) -> Iterator[Instruction | CollectiveMatmul]:
    """Yield the instructions, with each chunked collective and its products as one `CollectiveMatmul`.

    A gather is placed at its last product, a reduction where the collective started.
    """
    listed = list(instructions)
    started = [instruction.collective for instruction in listed if isinstance(instruction, StartCollective)]
    rings = [collective for collective in started if collective.axes == TP_AXES and collective.chunked_with]
    ring_of = {result: ring for ring in rings for result in ring.chunked_with}
    summing = {ring.tensors[0]: ring for ring in rings if ring.kind is not CollectiveKind.ALL_GATHER} | ring_of
    products: dict[int, list[ComputeStep]] = {id(ring): [] for ring in rings}
    terms: dict[int, list[ShardedTensor]] = {id(ring): [] for ring in rings}
    for instruction in listed:
        if isinstance(instruction, KernelLaunch):
            ring = summing.get(instruction.kernel.outputs[0])
        else:
            ring = getattr(instruction, "collective", None)
        if ring is None or id(ring) not in products:
            yield instruction
        elif isinstance(instruction, KernelLaunch):
            (step,) = instruction.kernel.steps
            if instruction.kernel.outputs[0] not in ring.chunked_with:
                terms[id(ring)] = [tensor for tensor in operand_tensors(step) if tensor.name not in ring.chunked_with]
                continue
            products[id(ring)].append(step)
            if ring.kind is CollectiveKind.ALL_GATHER and len(products[id(ring)]) == len(ring.chunked_with):
                fused = CollectiveMatmul(ring, tuple(products[id(ring)]))
                yield replace(fused, keeps_gathered=_is_read_by_others(listed, fused))
        elif isinstance(instruction, StartCollective) and ring.kind is not CollectiveKind.ALL_GATHER:
            yield CollectiveMatmul(ring, tuple(products[id(ring)]), tuple(terms[id(ring)]))


def _is_read_by_others(listed: Iterable[Instruction], ring: CollectiveMatmul) -> bool:
    """Return True if instructions other than its products read what a collective gathers."""
    gathered, ring_steps = ring.ends[1], {id(step) for step in ring.products}
    for instruction in listed:
        read: list[ShardedTensor] = []
        if isinstance(instruction, KernelLaunch):
            outside = (step for step in instruction.kernel.steps if id(step) not in ring_steps)
            read = [tensor for step in outside for tensor in operand_tensors(step)]
        elif isinstance(instruction, StartCollective | LocalSlice):
            steps = instruction.collective.derived if isinstance(instruction, StartCollective) else (instruction.step,)
            read = [before_and_after(step)[0] for step in steps]
        if gathered in read:
            return True
    return False
