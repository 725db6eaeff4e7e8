"""Calls of computations that run around a ring, in place of collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardwise.derive import RING_AXES, CollectiveStep, ComputeStep
from shardwise.model.operations import Scan
from shardwise.run.engine.call_builder import RING_MASKS, CallBuilder, KernelCall
from shardwise.run.engine.collective_matmul import BlockMatmul, GatherMatmul, MatmulScatter, RingBlocks
from shardwise.run.engine.ring_attention import RingAttention
from shardwise.run.kernels.attention import Attention
from shardwise.run.kernels.matmul import matmul_or_einsum
from shardwise.step import Instruction, KernelLaunch, StartCollective, UnitCollective, WaitCollective
from shardwise.step.collective_matmul import CollectiveMatmul, fuse_collective_matmuls, operand_tensors
from shardwise.step.instructions import ShardedTensor


class RingAttentionStep(NamedTuple):
    """An attention, or its gradient, and the collectives that the ring replaces (`moved`)."""

    step: ComputeStep
    moved: tuple[CollectiveStep, ...]


RingStep = RingAttentionStep | CollectiveMatmul


def substitute_rings(builder: CallBuilder, instructions: Iterable[Instruction]) -> Iterator[Instruction | RingStep]:
    """Yield instructions, with rings in place of the kernels and collectives that they stand for."""
    fused = list(fuse_collective_matmuls(instructions))
    moved: dict[str, list[CollectiveStep]] = {}
    replaced: set[int] = set()
    for traffic in _ring_collectives(builder, fused):
        replaced.add(id(traffic))
        for result in traffic.chunked_with:
            moved.setdefault(result, []).extend(traffic.derived)
    for instruction in fused:
        if isinstance(instruction, KernelLaunch) and (collectives := moved.get(instruction.kernel.outputs[0])):
            (step,) = instruction.kernel.steps
            yield RingAttentionStep(step, tuple(collectives))
        elif not (isinstance(instruction, StartCollective | WaitCollective) and id(instruction.collective) in replaced):
            yield instruction


def _ring_collectives(
    builder: CallBuilder, instructions: Iterable[Instruction | CollectiveMatmul]
) -> Iterator[UnitCollective]:
    """Yield the collectives that run around a ring of several ranks."""
    if builder.unit.scheme.is_ring and builder.rank.nontrivial_axes(RING_AXES):
        for instruction in instructions:
            if (
                isinstance(instruction, StartCollective)
                and instruction.collective.axes == RING_AXES
                and instruction.collective.chunked_with
            ):
                yield instruction.collective


def ring_outputs(ring: RingStep) -> tuple[str, ...]:
    """Return the results of a ring's computations."""
    steps = (ring.step,) if isinstance(ring, RingAttentionStep) else ring.products
    return tuple(name for step in steps for name in step.operation.outputs)


def build_ring_call(builder: CallBuilder, ring: RingStep, phase: str) -> KernelCall:
    """Return the call of a ring."""
    return (
        _attention_call(builder, ring, phase)
        if isinstance(ring, RingAttentionStep)
        else _matmul_call(builder, ring, phase)
    )


def _attention_call(builder: CallBuilder, ring: RingAttentionStep, phase: str) -> KernelCall:
    """Return the call of ring attention, on keys, values and gradients as they are before the collectives."""
    operation, placed = ring.step.operation, ring.step.placed
    collectives = builder.rank.collectives
    attention = RingAttention(
        Attention.of(builder.numerics, builder.sizes["H"]), collectives, RING_AXES, builder.rank.position(RING_AXES)
    )
    resting = {collective_step.tensor.name: collective_step.collective for collective_step in ring.moved}
    operands = zip(operation.operands, placed.inputs, strict=False)
    keys = {
        name: builder.tensor_key(name, resting[name].before if name in resting else spec) for name, spec in operands
    }
    outputs = zip(operation.outputs, placed.outputs, strict=True)
    writes = tuple(builder.tensor_key(name, resting[name].after if name in resting else spec) for name, spec in outputs)
    q, k, v, _, _, *rest = operation.operands
    reads = (
        *(keys[name] for name in (q, k, v)),
        builder.batch_part(RING_MASKS, RING_AXES),
        *(keys[name] for name in rest),
    )
    kernel = attention.forward if isinstance(operation, Scan) else attention.backward
    return KernelCall(kernel, reads, writes, phase, never_compiled=True)


def _matmul_call(builder: CallBuilder, ring: CollectiveMatmul, phase: str) -> KernelCall:
    """Return the call of an AllGather-matmul, which multiplies blocks as they arrive, or of a matmul-ReduceScatter."""
    collectives, axes = builder.rank.collectives, builder.rank.nontrivial_axes(ring.collective.axes)
    dim = ring.dim
    position, count = builder.rank.position(axes), builder.rank.mesh.size(axes)
    ring_blocks = RingBlocks(collectives, axes, position, count, ring.block.spec.dims.index(dim))
    products = [_blockwise_matmul(builder, step, dim) for step in ring.products]
    writes = tuple(builder.tensor_key(*tensor) for tensor in ring.writes)
    if not ring.is_gather:
        reads = (*(tensor for step in ring.products for tensor in operand_tensors(step)), *ring.terms)
        return KernelCall(
            MatmulScatter(ring_blocks, products), _tensor_keys(builder, reads), writes, phase, never_compiled=True
        )
    pairs = [operand_tensors(step) for step in ring.products]
    sides = [pair.index(ring.ends[1]) for pair in pairs]
    other_operands = (pair[1 - side] for pair, side in zip(pairs, sides, strict=True))
    kernel = GatherMatmul(ring_blocks, products, sides, ring.keeps_gathered)
    is_single = len(writes) == 1
    return KernelCall(
        (lambda *tensors: kernel(*tensors)[0]) if is_single else kernel,
        _tensor_keys(builder, (ring.block, *other_operands)), writes, phase, into_each=kernel.into, never_compiled=True,
    )  # fmt: skip


def _tensor_keys(builder: CallBuilder, tensors: Iterable[ShardedTensor]) -> tuple[str, ...]:
    return tuple(builder.tensor_key(*tensor) for tensor in tensors)


def _blockwise_matmul(builder: CallBuilder, step: ComputeStep, dim: str) -> BlockMatmul:
    """Return the product of a step whose tensors lie in blocks along a dim."""
    (left, right), result = (spec.dims for spec in step.placed.inputs), step.placed.outputs[0].dims
    cuts = tuple(dims.index(dim) if dim in dims else None for dims in (left, right))
    product = matmul_or_einsum(left, right, result, builder.local_sizes(step))
    return BlockMatmul(product, cuts, result.index(dim) if dim in result else None)
