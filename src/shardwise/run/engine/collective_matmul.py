"""Products beside the blocks of a tensor that goes around a ring of ranks: one that is gathered, or a sum that is scattered.

A block is on its way while products with the one before it run (Wang et al. 2023, Overlap communication with dependent
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
from shardwise.sharding.spec import Axes


@dataclass(frozen=True)
class RingBlocks:
    """A ring of `count` ranks, this one at `place`, whose tensor lies in blocks along `dim`."""

    exchange: CollectiveOps
    axes: Axes
    place: int
    count: int
    dim: int

    def block(self, whole: Tensor, dim: int | None, place: int) -> Tensor:
        """Of blocks along a dim the one at a place; a tensor without blocks is taken whole."""
        if dim is None:
            return whole
        width = whole.shape[dim] // self.count
        return whole.narrow(dim, place * width, width)

    def empty_blocks(self, shape: Sequence[int], dim: int, like: Tensor) -> Tensor:
        """For as many blocks of a shape, along a dim."""
        return like.new_empty([size * (self.count if at == dim else 1) for at, size in enumerate(shape)])

    def send(self, block: Tensor) -> RingTransfer:
        return RingTransfer(self.exchange, self.axes, [block])


@dataclass(frozen=True)
class BlockMatmul:
    """A product whose operands lie in blocks along the dims `cuts`, and its result along `dim`; None: not in blocks."""

    product: Matmul | Einsum
    cuts: tuple[int | None, ...]
    dim: int | None

    def place(self, whole: Tensor | None, operands: Sequence[Tensor], ring: RingBlocks, place: int) -> Tensor:
        """The product of blocks to its place in the whole result."""
        assert self.dim is not None
        left, right = operands
        if whole is None:
            whole = ring.empty_blocks(self.product.shape(left, right), self.dim, left)
        target = ring.block(whole, self.dim, place)
        if target.is_contiguous():
            self.product.into(target, left, right, add=False)
        else:
            target.copy_(self.product(left, right))
        return whole

    def add(self, total: Tensor | None, operands: Sequence[Tensor], *, adds: bool = True) -> Tensor:
        """The product of blocks, written to the total or added to what is there."""
        left, right = operands
        if total is None:
            return self.product(left, right)
        self.product.into(total, left, right, add=adds)
        return total


@dataclass(frozen=True)
class GatherMatmul:
    """Products that take what is gathered, each as its operand on one of the `sides`. `keeps`: that is put together as well."""

    ring: RingBlocks
    products: Sequence[BlockMatmul]
    sides: Sequence[int]
    keeps: bool

    def __call__(self, own: Tensor, *others: Tensor) -> list[Tensor]:
        """The results of `others`, one for each product, with what all ranks have of the tensor."""
        return self.into([NO_TARGET] * len(self.products), own, *others)

    def into(self, targets: Sequence[OutputTarget], own: Tensor, *others: Tensor) -> list[Tensor]:
        """The same, with the sums of products written to their targets."""
        ring, block = self.ring, own.contiguous()
        made = [target for target, _ in targets[: len(self.products)]]
        whole = ring.empty_blocks(own.shape, ring.dim, own) if self.keeps else None
        for turn in range(ring.count):
            going = ring.send(block) if turn + 1 < ring.count else None
            at = (ring.place - turn) % ring.count
            if whole is not None:
                ring.block(whole, ring.dim, at).copy_(block)
            adds = [turn > 0 or target[1] for target in targets]
            made = [
                self._multiply_block(number, one, block, others, at, adds=adds[number])
                for number, one in enumerate(made)
            ]
            if going is not None:
                (block,) = going.wait()
        return [one for one in (*made, whole) if one is not None]

    def _multiply_block(
        self, number: int, made: Tensor | None, block: Tensor, others: Sequence[Tensor], at: int, *, adds: bool
    ) -> Tensor:
        """What a product has made with one block more."""
        product, side = self.products[number], self.sides[number]
        other = self.ring.block(others[number], product.cuts[1 - side], at)
        operands = (other, block) if side else (block, other)
        if product.dim is None:
            return product.add(made, operands, adds=adds)
        return product.place(made, operands, self.ring, at)


@dataclass(frozen=True)
class MatmulScatter:
    """Products, and `terms` beside them, whose sum over all ranks is scattered."""

    ring: RingBlocks
    products: Sequence[BlockMatmul]

    def __call__(self, *operands: Tensor) -> Tensor:
        """This rank's block of the sum, of both operands of each product and the terms. A block begins at the next rank, and
        comes home on the last turn."""
        ring, made = self.ring, self._part(operands, self.ring.place - 1)
        for turn in range(2, ring.count + 1):
            going = ring.send(made)
            made = self._part(operands, ring.place - turn)
            made.add_(*going.wait())
        return made

    def _part(self, operands: Sequence[Tensor], place: int) -> Tensor:
        """What this rank adds to a block."""
        ring, paired, made = self.ring, 2 * len(self.products), None
        at = place % ring.count
        for product, pair in zip(
            self.products, zip(operands[:paired:2], operands[1:paired:2], strict=True), strict=True
        ):
            made = product.add(made, [ring.block(one, cut, at) for one, cut in zip(pair, product.cuts, strict=True)])
        assert made is not None, "a sum has products"
        for term in operands[paired:]:
            made.add_(ring.block(term, ring.dim, at))
        return made
