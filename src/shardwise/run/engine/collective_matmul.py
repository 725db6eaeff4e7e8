"""Products fused with a collective around a ring of ranks: AllGather-matmul and matmul-ReduceScatter.

A block travels while the products with the one before it run (Wang et al. 2023, Overlap communication with dependent
computation via decomposition).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.run.engine.call_builder import NO_TARGET, OutputTarget
from shardwise.run.engine.rank_coordinates import CollectiveOps
from shardwise.run.engine.ring_attention import RingTransfer
from shardwise.run.kernels.matmul import Einsum, Matmul
from shardwise.sharding import Axes


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
