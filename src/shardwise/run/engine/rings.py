"""Calls of rings: computations that run block by block while blocks travel around the ranks.

In ring attention keys and values travel while each rank attends to the block that it has; so do their gradients. A rank merges
attention over one block of keys after the other. In the backward pass a block's gradients travel with it, and end at the rank
that stores the block (Liu et al. 2023, Ring Attention).

In asynchronous tensor parallelism a block travels while the products with the one before it run: AllGather-matmul and
matmul-ReduceScatter (Wang et al. 2023, Overlap communication with dependent computation via decomposition).

Letters: n ranks, B sequences, T queries and keys of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.derive import ComputeStep, Ring, ShardedTensor
from shardwise.model.operations import Scan
from shardwise.run.engine.calls import NO_TARGET, RING_MASKS, CallBuilder, KernelCall, OutputTarget
from shardwise.run.engine.rank_coordinates import CollectiveHandle, CollectiveOps
from shardwise.run.kernels.attention import (
    Attention,
    lse_to_head_layout,
    lse_to_query_layout,
    merge_attention,
    pad_head_dim,
    to_head_layout,
    to_query_layout,
)
from shardwise.run.kernels.attention_backends import BackwardInputs, QkvGradients
from shardwise.run.kernels.matmul import Einsum, Matmul, matmul_or_einsum
from shardwise.run.kernels.positions_and_masks import AttentionMask
from shardwise.sharding import Axes


def build_ring_call(builder: CallBuilder, ring: Ring, phase: str) -> KernelCall:
    """Return the call of a ring. It reads and writes the rank's own blocks of what travels."""
    return (_attention_call if ring.is_attention else _matmul_call)(builder, ring, phase)


def _results(ring: Ring) -> tuple[str, ...]:
    return tuple(name for step in ring.computes for name in step.operation.outputs)


def _attention_call(builder: CallBuilder, ring: Ring, phase: str) -> KernelCall:
    (step,) = ring.computes
    attention = RingAttention(
        Attention.of(builder.numerics, builder.sizes["H"]), builder.rank.collectives, ring.axes, builder.rank.position(ring.axes)
    )  # fmt: skip
    before = {gather.after: gather.before for gather in ring.gathers}
    after = {scatter.before: scatter.after for scatter in ring.scatters}
    q, k, v, _, _, *rest = (builder.tensor_key(*before.get(tensor, tensor)) for tensor in step.reads)
    writes = tuple(builder.tensor_key(*after.get(tensor, tensor)) for tensor in step.writes)
    kernel = attention.forward if isinstance(step.operation, Scan) else attention.backward
    reads = (q, k, v, builder.batch_part(RING_MASKS, ring.axes), *rest)
    return KernelCall(kernel, reads, writes, phase, results=_results(ring))


def _matmul_call(builder: CallBuilder, ring: Ring, phase: str) -> KernelCall:
    """Return the call of an AllGather-matmul, which multiplies blocks as they arrive, or of a matmul-ReduceScatter."""
    axes, dim = builder.rank.nontrivial_axes(ring.axes), ring.dim
    position, count = builder.rank.position(axes), builder.rank.mesh.size(axes)
    ring_blocks = RingBlocks(builder.rank.collectives, axes, position, count, ring.block.spec.dims.index(dim))
    products = [_blockwise_matmul(builder, step, dim) for step in ring.computes]
    writes = _tensor_keys(builder, ring.writes)
    if not ring.gathers:
        reads = (*(tensor for step in ring.computes for tensor in step.reads), *ring.terms)
        return KernelCall(
            MatmulScatter(ring_blocks, products), _tensor_keys(builder, reads), writes, phase,
            results=_results(ring),
        )  # fmt: skip
    (gather,) = ring.gathers
    pairs = [step.reads for step in ring.computes]
    sides = [pair.index(gather.after) for pair in pairs]
    other_operands = (pair[1 - side] for pair, side in zip(pairs, sides, strict=True))
    kernel = GatherMatmul(ring_blocks, products, sides, ring.keeps_gathered)
    is_single = len(writes) == 1
    return KernelCall(
        (lambda *tensors: kernel(*tensors)[0]) if is_single else kernel,
        _tensor_keys(builder, (ring.block, *other_operands)), writes, phase, into_each=kernel.into,
        results=_results(ring),
    )  # fmt: skip


def _tensor_keys(builder: CallBuilder, tensors: Iterable[ShardedTensor]) -> tuple[str, ...]:
    return tuple(builder.tensor_key(*tensor) for tensor in tensors)


def _blockwise_matmul(builder: CallBuilder, step: ComputeStep, dim: str) -> BlockMatmul:
    """Return the product of a step whose tensors lie in blocks along a dim."""
    (left, right), result = (spec.dims for spec in step.placed.inputs), step.placed.outputs[0].dims
    cuts = tuple(dims.index(dim) if dim in dims else None for dims in (left, right))
    product = matmul_or_einsum(left, right, result, builder.local_sizes(step))
    return BlockMatmul(product, cuts, result.index(dim) if dim in result else None)


class RingTransfer:
    """Transfer of a block's tensors to the next rank of a ring, and of the previous rank's to this one."""

    def __init__(self, collectives: CollectiveOps, axes: Axes, blocks: Sequence[Tensor]) -> None:
        sent = [block.contiguous() for block in blocks]
        self.arriving = [torch.empty_like(block) for block in sent]
        self.sent = sent  # until they have been sent
        self.pending: CollectiveHandle = collectives.shift(self.arriving, sent, axes)

    def wait(self) -> list[Tensor]:
        """Return the received tensors, and free those sent."""
        self.pending.wait()
        received, self.arriving, self.sent = self.arriving, [], []
        return received


@dataclass(frozen=True)
class RingAttention:
    """Attention of one rank, at `place` along the axes of the ring."""

    attention: Attention
    collectives: CollectiveOps
    axes: Axes
    place: int

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[AttentionMask], sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output [B, T, K, G, U] and log-sum-exp [B, T, K, G] of q [B, T, K, G, H] over the keys of all ranks.

        This rank has k [B, T, K, H] and v [B, T, K, U]; `masks` are from its queries to the block of each rank.
        """
        query, blocks, merged = to_head_layout(q), [k, v], None
        for turn in range(len(masks)):
            transfer = RingTransfer(self.collectives, self.axes, blocks) if turn + 1 < len(masks) else None
            mask = masks[(self.place - turn) % len(masks)]
            keys, values = _sorted_block(mask, blocks)
            part = self.attention.attend_blocks(query, keys, values, mask)
            if merged is None:
                merged = part[0], part[1][..., : query.shape[2]].contiguous()
            else:
                merge_attention(merged, part)
            blocks = transfer.wait() if transfer else blocks
        assert merged is not None
        if sinks is not None:  # a key that all see, without a value
            logits = sinks.to(merged[1].dtype).flatten()[:, None].expand_as(merged[1])
            merge_attention(merged, (torch.zeros_like(merged[0]), logits))
        return to_query_layout(merged[0], q, v), lse_to_query_layout(merged[1], q)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[AttentionMask], out: Tensor, lse: Tensor, dy: Tensor
    ) -> QkvGradients:
        """Return the gradients of q, and of this rank's k and v."""
        lse = lse_to_head_layout(lse)
        query = to_head_layout(q)
        dy_heads = to_head_layout(pad_head_dim(dy, k))
        out_heads = to_head_layout(pad_head_dim(out, k))
        count, dq, blocks = len(masks), torch.zeros_like(query), [k, v]
        incoming: RingTransfer | None = None  # gradients of the block at hand, as the ranks before have left them
        arrived_block = RingTransfer(self.collectives, self.axes, blocks).wait() if count > 1 else blocks
        for turn in range(1, count + 1):  # a block begins at the next rank and comes home on the last turn
            transfer = RingTransfer(self.collectives, self.axes, arrived_block) if turn + 1 < count else None
            mask = masks[(self.place - turn) % count]
            block = arrived_block if turn < count else blocks
            inputs = BackwardInputs(dy_heads, query, *_sorted_block(mask, block), out_heads, lse)
            dq_block, dk, dv = self.attention.attend_blocks_backward(inputs, mask)
            dq += dq_block
            gradients = [mask.unsort_keys(gradient.transpose(1, 2), 1) for gradient in (dk, dv[..., : v.shape[-1]])]
            if incoming is not None:
                gradients = [total.add_(gradient) for total, gradient in zip(incoming.wait(), gradients, strict=True)]
            if turn < count:
                incoming = RingTransfer(self.collectives, self.axes, gradients)
            arrived_block = transfer.wait() if transfer else arrived_block
        dk, dv = gradients
        return to_query_layout(dq, q, q), dk, dv


def _sorted_block(mask: AttentionMask, block: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a block's keys and values [B, K, S, H] sorted by position, values padded to the width of keys."""
    keys, values = (mask.sort_keys(tensor, 1).transpose(1, 2) for tensor in block)
    return keys, pad_head_dim(values, keys)


@dataclass(frozen=True)
class RingBlocks:
    """A ring of `count` ranks, this one at `place`, whose tensor lies in blocks along `dim`."""

    collectives: CollectiveOps
    axes: Axes
    place: int
    count: int
    dim: int

    def block(self, tensor: Tensor, dim: int | None, block_index: int) -> Tensor:
        """Return a view of one block along a dim; with dim None the whole tensor."""
        if dim is None:
            return tensor
        width = tensor.shape[dim] // self.count
        return tensor.narrow(dim, block_index * width, width)

    def empty_blocks(self, shape: Sequence[int], dim: int, like: Tensor) -> Tensor:
        """Return an empty tensor for `count` blocks of a shape along a dim."""
        return like.new_empty([size * (self.count if i == dim else 1) for i, size in enumerate(shape)])

    def send(self, block: Tensor) -> RingTransfer:
        return RingTransfer(self.collectives, self.axes, [block])


@dataclass(frozen=True)
class BlockMatmul:
    """A product whose operands lie in blocks along the dims `cuts`, and its result along `dim`; None: not in blocks."""

    product: Matmul | Einsum
    cuts: tuple[int | None, ...]
    dim: int | None

    def place(self, full: Tensor | None, operands: Sequence[Tensor], ring: RingBlocks, block_index: int) -> Tensor:
        """Write the product of two blocks to its block of the full result."""
        assert self.dim is not None
        left, right = operands
        if full is None:
            full = ring.empty_blocks(self.product.shape(left, right), self.dim, left)
        target = ring.block(full, self.dim, block_index)
        if target.is_contiguous():
            self.product.into(target, left, right, add=False)
        else:
            target.copy_(self.product(left, right))
        return full

    def add(self, total: Tensor | None, operands: Sequence[Tensor], *, accumulates: bool = True) -> Tensor:
        """Write the product of two blocks to the total, or add it."""
        left, right = operands
        if total is None:
            return self.product(left, right)
        self.product.into(total, left, right, add=accumulates)
        return total


@dataclass(frozen=True)
class GatherMatmul:
    """AllGather-matmul: products with a gathered tensor, which is operand number `sides[i]` of product i.

    `keeps`: also return the gathered tensor.
    """

    ring: RingBlocks
    products: Sequence[BlockMatmul]
    sides: Sequence[int]
    keeps: bool

    def __call__(self, local_block: Tensor, *other_operands: Tensor) -> list[Tensor]:
        """Return the product of each other operand with the gathered tensor; this rank has `local_block`."""
        return self.into([NO_TARGET] * len(self.products), local_block, *other_operands)

    def into(self, targets: Sequence[OutputTarget], local_block: Tensor, *other_operands: Tensor) -> list[Tensor]:
        """Do the same, with the products that are sums over blocks written to their targets."""
        ring, block = self.ring, local_block.contiguous()
        totals = [target for target, _ in targets[: len(self.products)]]
        gathered = ring.empty_blocks(local_block.shape, ring.dim, local_block) if self.keeps else None
        for turn in range(ring.count):
            transfer = ring.send(block) if turn + 1 < ring.count else None
            block_index = (ring.place - turn) % ring.count
            if gathered is not None:
                ring.block(gathered, ring.dim, block_index).copy_(block)
            for i, other_operand in enumerate(other_operands):
                product, side = self.products[i], self.sides[i]
                other_block = ring.block(other_operand, product.cuts[1 - side], block_index)
                operands = (other_block, block) if side else (block, other_block)
                if product.dim is None:
                    totals[i] = product.add(totals[i], operands, accumulates=turn > 0 or targets[i][1])
                else:
                    totals[i] = product.place(totals[i], operands, ring, block_index)
            if transfer is not None:
                (block,) = transfer.wait()
        return [tensor for tensor in (*totals, gathered) if tensor is not None]


@dataclass(frozen=True)
class MatmulScatter:
    """Matmul-ReduceScatter: products, and terms added to them, whose sum over all ranks is scattered."""

    ring: RingBlocks
    products: Sequence[BlockMatmul]

    def __call__(self, *operands: Tensor) -> Tensor:
        """Return this rank's block of the sum of all products and terms.

        `operands` are both operands of each product, then the terms. A block starts at the next rank, and arrives at
        its own on the last turn.
        """
        ring, total = self.ring, self._part(operands, self.ring.place - 1)
        for turn in range(2, ring.count + 1):
            transfer = ring.send(total)
            total = self._part(operands, ring.place - turn)
            total.add_(*transfer.wait())
        return total

    def _part(self, operands: Sequence[Tensor], block_number: int) -> Tensor:
        """Return this rank's contribution to a block."""
        ring, paired, total = self.ring, 2 * len(self.products), None
        block_index = block_number % ring.count
        for product, pair in zip(
            self.products, zip(operands[:paired:2], operands[1:paired:2], strict=True), strict=True
        ):
            total = product.add(
                total, [ring.block(operand, cut, block_index) for operand, cut in zip(pair, product.cuts, strict=True)]
            )
        assert total is not None, "a sum has products"
        for term in operands[paired:]:
            total.add_(ring.block(term, ring.dim, block_index))
        return total
