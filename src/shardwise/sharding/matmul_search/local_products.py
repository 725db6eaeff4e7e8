"""Local products of two tensors: which of their shardings agree, and the sharding of the product.

Each axis splits one dim of the product's index space (on both tensors, if both have the dim), or is a partial sum of one
tensor, or is unused. Products are ranked as if the axes were placed one after the other, the first axis the slowest, on the
dims in order, then as a partial sum of the left, of the right, and nowhere; of two with the same cost the first is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.sharding.matmul_search.cheapest_paths import (
    ByProduct,
    CostVector,
    ReachedSharding,
    SearchTensor,
    ShardingGraph,
    add_costs,
)
from shardwise.sharding.matmul_search.numbered_shardings import AxisGroups


class OperandSharding(NamedTuple):
    """One tensor's contribution to a product; of the right one only what the left one does not determine.

    `mask`: axes in use; `groups`: axis groups of the result's dims that it determines; `partial`: mask of the axes over which
    the result becomes a partial sum; `rank`: its part of the product's rank; `elements`: its factor of the local index space.
    """

    number: int
    cost: CostVector
    mask: int
    groups: tuple[int, ...]
    partial: int
    rank: int
    elements: float


@dataclass(slots=True)
class BestProduct:
    """Cheapest product with a given result sharding, and the rank of the first one found with it."""

    cost: CostVector
    rank: int
    first: int
    numbers: tuple[int, int]


class LocalProducts:
    """Local products of `left` and `right`, summed to the dims of `result`."""

    def __init__(self, left: SearchTensor, right: SearchTensor, result: ShardingGraph, groups: AxisGroups) -> None:
        self.left, self.right, self.result, self.groups = left, right, result, groups
        self.union = tuple(dict.fromkeys((*left.dims, *right.dims)))
        self.shared = [dim for dim in left.dims if dim in right.dims]
        decided = [d for d in (*left.dims, *(d for d in right.dims if d not in left.dims)) if d in result.dims]
        self.order = [decided.index(dim) for dim in result.dims]
        self.sums = len(decided) < len(self.union)

    def join(
        self, nodes: dict[int, ReachedSharding], price_product: Callable[[float], CostVector], bound: CostVector | None
    ) -> None:
        """Put products that are cheaper than the known nodes into `nodes`, in the order of their ranks."""
        best_by_result = self.cheapest_by_result(price_product, bound)
        for key in sorted(best_by_result, key=lambda key: best_by_result[key].first):
            best, number = best_by_result[key], self.result_number(key)
            if number not in nodes or best.cost < nodes[number].cost:
                nodes[number] = ReachedSharding(best.cost, ByProduct((self.left, self.right), best.numbers))

    def cheapest_by_result(
        self, price_product: Callable[[float], CostVector], bound: CostVector | None
    ) -> dict[tuple[int, ...], BestProduct]:
        """Return the cheapest product for each result sharding: axis groups of the dims, then the mask of partial sums."""
        best_by_result: dict[tuple[int, ...], BestProduct] = {}
        product_costs: dict[float, CostVector] = {}
        flops_per_element = 2.0 if self.sums else 1.0
        for left, right in self.compatible_pairs():
            flops = left.elements * right.elements * flops_per_element
            if flops not in product_costs:
                product_costs[flops] = price_product(flops)
            cost = add_costs(add_costs(left.cost, right.cost), product_costs[flops])
            if bound is not None and not cost < bound:
                continue
            key, rank = (*left.groups, *right.groups, left.partial | right.partial), left.rank + right.rank
            best = best_by_result.get(key)
            if best is None:
                best_by_result[key] = BestProduct(cost, rank, rank, (left.number, right.number))
                continue
            best.first = min(best.first, rank)
            if cost < best.cost or (cost == best.cost and rank < best.rank):
                best.cost, best.rank, best.numbers = cost, rank, (left.number, right.number)
        return best_by_result

    def result_number(self, key: tuple[int, ...]) -> int:
        *groups, partial = key
        group_numbers = (*(groups[position] for position in self.order), self.groups.partial[partial])
        return self.result.shardings.encode(group_numbers)

    def compatible_pairs(self) -> Iterator[tuple[OperandSharding, OperandSharding]]:
        """Yield shardings of both tensors that agree on the shared dims and otherwise use no axis twice."""
        rights: dict[tuple[int, ...], dict[int, list[OperandSharding]]] = {}
        for shared_groups, operand in self.operand_shardings(self.right, "right"):
            rights.setdefault(shared_groups, {}).setdefault(operand.mask, []).append(operand)
        for shared_groups, left in self.operand_shardings(self.left, "left"):
            for mask, operands in rights.get(shared_groups, {}).items():
                if not mask & left.mask:
                    for right in operands:
                        yield left, right

    def operand_shardings(self, tensor: SearchTensor, side: str) -> Iterator[tuple[tuple[int, ...], OperandSharding]]:
        """Yield each known sharding of an operand: axis groups of the shared dims, and what it adds to the product."""
        shardings, mask = tensor.graph.shardings, self.groups.mask
        shared_positions = [tensor.dims.index(dim) for dim in self.shared]
        decided = [i for i, dim in enumerate(tensor.dims) if side == "left" or dim not in self.left.dims]
        in_result = [i for i in decided if tensor.dims[i] in self.result.dims]
        summed = [i for i in decided if i not in in_result]
        ranks = [self.groups.rank_digits(len(self.union) + 2 - self.union.index(dim)) for dim in tensor.dims]
        partial_ranks = self.groups.rank_digits(2 if side == "left" else 1)
        for number, node in tensor.nodes.items():
            groups = shardings.decode(number)
            partial = mask[groups[-1]]
            yield tuple(groups[i] for i in shared_positions), OperandSharding(
                number=number, cost=node.cost, mask=partial | sum(mask[groups[i]] for i in decided),
                groups=tuple(groups[i] for i in in_result), partial=partial | sum(mask[groups[i]] for i in summed),
                rank=partial_ranks[self.groups.by_mask[partial]] + sum(ranks[i][groups[i]] for i in decided),
                elements=math.prod((tensor.graph.local_sizes[i][groups[i]] for i in decided), start=1.0),
            )  # fmt: skip
