"""Computations that run around a ring in place of the collectives that the derivation has beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardwise.derive.ring_attention_and_matmul import RING_AXES
from shardwise.derive.sharded_program import CollectiveStep, ComputeStep
from shardwise.model.operations import Scan
from shardwise.run.engine.call_builder import RING_MASKS, CallBuilder, KernelCall
from shardwise.run.engine.collective_matmul import BlockMatmul, GatherMatmul, MatmulScatter, RingBlocks
from shardwise.run.engine.ring_attention import RingAttention
from shardwise.run.kernels.attention import Attention
from shardwise.run.kernels.matmul import matmul_or_einsum
from shardwise.step.collective_matmul import CollectiveMatmul, fuse_collective_matmuls, operand_tensors
from shardwise.step.instructions import (
    Instruction,
    KernelLaunch,
    ShardedTensor,
    StartCollective,
    UnitCollective,
    WaitCollective,
)


class RingAttentionStep(NamedTuple):
    """An attention, or its gradient, and the collectives that it takes the place of."""

    step: ComputeStep
    moved: tuple[CollectiveStep, ...]


RingStep = RingAttentionStep | CollectiveMatmul


def substitute_rings(calls: CallBuilder, instructions: Iterable[Instruction]) -> Iterator[Instruction | RingStep]:
    """Instructions, with rings in place of the kernels and collectives that they stand for."""
    found = list(fuse_collective_matmuls(instructions))
    moved: dict[str, list[CollectiveStep]] = {}
    replaced: set[int] = set()
    for traffic in _ring_collectives(calls, found):
        replaced.add(id(traffic))
        for result in traffic.chunked_with:
            moved.setdefault(result, []).extend(traffic.derived)
    for one in found:
        if isinstance(one, KernelLaunch) and (around := moved.get(one.kernel.outputs[0])):
            (step,) = one.kernel.steps
            yield RingAttentionStep(step, tuple(around))
        elif not (isinstance(one, StartCollective | WaitCollective) and id(one.collective) in replaced):
            yield one


def _ring_collectives(
    calls: CallBuilder, instructions: Iterable[Instruction | CollectiveMatmul]
) -> Iterator[UnitCollective]:
    """The collectives that run around a ring of several ranks."""
    if calls.unit.family.is_ring and calls.rank.nontrivial_axes(RING_AXES):
        for one in instructions:
            if isinstance(one, StartCollective) and one.collective.axes == RING_AXES and one.collective.chunked_with:
                yield one.collective


def ring_outputs(ring: RingStep) -> tuple[str, ...]:
    """The results of the computations of a ring."""
    steps = (ring.step,) if isinstance(ring, RingAttentionStep) else ring.products
    return tuple(name for step in steps for name in step.operation.outputs)


def build_ring_call(calls: CallBuilder, ring: RingStep, phase: str) -> KernelCall:
    """The call of a ring."""
    return (
        _attention_call(calls, ring, phase) if isinstance(ring, RingAttentionStep) else _matmul_call(calls, ring, phase)
    )


def _attention_call(calls: CallBuilder, ring: RingAttentionStep, phase: str) -> KernelCall:
    """Keys and values are taken, and their gradients given, as they rest."""
    operation, placed = ring.step.operation, ring.step.placed
    exchange = calls.rank.exchange
    assert exchange is not None, "a rank of several has an exchange"
    attention = RingAttention(
        Attention.of(calls.numerics, calls.sizes["H"]), exchange, RING_AXES, calls.rank.position(RING_AXES)
    )
    resting = {one.tensor.name: one.collective for one in ring.moved}
    operands = zip(operation.operands, placed.inputs, strict=False)
    keys = {name: calls.key(name, resting[name].before if name in resting else spec) for name, spec in operands}
    outputs = zip(operation.outputs, placed.outputs, strict=True)
    writes = tuple(calls.key(name, resting[name].after if name in resting else spec) for name, spec in outputs)
    q, k, v, _, _, *others = operation.operands
    reads = (*(keys[name] for name in (q, k, v)), calls.cut(RING_MASKS, RING_AXES), *(keys[name] for name in others))
    kernel = attention.forward if isinstance(operation, Scan) else attention.backward
    return KernelCall(kernel, reads, writes, phase, never_compiled=True)


def _matmul_call(calls: CallBuilder, ring: CollectiveMatmul, phase: str) -> KernelCall:
    """Of what is gathered a product takes the blocks as they come; of a sum this rank's block is made."""
    exchange, axes = calls.rank.exchange, calls.rank.nontrivial_axes(ring.collective.axes)
    assert exchange is not None, "a rank of several has an exchange"
    dim = ring.dim
    place, count = calls.rank.position(axes), calls.rank.mesh.size(axes)
    around = RingBlocks(exchange, axes, place, count, ring.block.spec.dims.index(dim))
    products = [_blockwise_matmul(calls, step, dim) for step in ring.products]
    writes = tuple(calls.key(*held) for held in ring.writes)
    if not ring.is_gather:
        reads = (*(held for step in ring.products for held in operand_tensors(step)), *ring.terms)
        return KernelCall(
            MatmulScatter(around, products), _tensor_keys(calls, reads), writes, phase, never_compiled=True
        )
    pairs = [operand_tensors(step) for step in ring.products]
    sides = [pair.index(ring.ends[1]) for pair in pairs]
    others = (pair[1 - side] for pair, side in zip(pairs, sides, strict=True))
    kernel = GatherMatmul(around, products, sides, ring.keeps_gathered)
    one = len(writes) == 1
    return KernelCall(
        (lambda *tensors: kernel(*tensors)[0]) if one else kernel, _tensor_keys(calls, (ring.block, *others)), writes, phase,
        into_each=kernel.into, never_compiled=True,
    )  # fmt: skip


def _tensor_keys(calls: CallBuilder, held: Iterable[ShardedTensor]) -> tuple[str, ...]:
    return tuple(calls.key(*one) for one in held)


def _blockwise_matmul(calls: CallBuilder, step: ComputeStep, dim: str) -> BlockMatmul:
    """A product of what lies in blocks along a dim."""
    (left, right), result = (spec.dims for spec in step.placed.inputs), step.placed.outputs[0].dims
    cuts = tuple(dims.index(dim) if dim in dims else None for dims in (left, right))
    product = matmul_or_einsum(left, right, result, calls.local_sizes(step))
    return BlockMatmul(product, cuts, result.index(dim) if dim in result else None)
