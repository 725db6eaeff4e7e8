"""Every local product of two tensors: which of their shardings agree, and how the product then lies.

Each axis splits one dim of the product's index space (on both tensors, where both have the dim), or is a partial sum of
one tensor, or does nothing. Products are ranked as if the axes were placed one after the other, the first axis the slowest, on
the dims in order, then as a partial sum of the left, of the right, and nowhere; of two that cost the same the first stands.
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
    """One tensor's part in a product: of the right one what the left one does not say already.

    `mask`: axes in use; `groups`: of the dims of the result that it decides; `partial`: the mask of axes that the result is a
    partial sum over; `rank`: its part of the product's rank; `elements`: of its part of the local index space.
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
    """The cheapest product found that lies so, and the rank of the first one that does."""

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
        self, nodes: dict[int, ReachedSharding], product: Callable[[float], CostVector], bound: CostVector | None
    ) -> None:
        """Put the products that are cheaper than what is known into `nodes`, those that permute the order of ranks."""
        found = self.cheapest_by_result(product, bound)
        for key in sorted(found, key=lambda key: found[key].first):
            best, number = found[key], self.result_number(key)
            if number not in nodes or best.cost < nodes[number].cost:
                nodes[number] = ReachedSharding(best.cost, ByProduct((self.left, self.right), best.numbers))

    def cheapest_by_result(
        self, product: Callable[[float], CostVector], bound: CostVector | None
    ) -> dict[tuple[int, ...], BestProduct]:
        """The cheapest product for each way that it may lie: the groups of the dims, then the mask of its partial sums."""
        found: dict[tuple[int, ...], BestProduct] = {}
        known: dict[float, CostVector] = {}
        times = 2.0 if self.sums else 1.0
        for left, right in self.compatible_pairs():
            flops = left.elements * right.elements * times
            if flops not in known:
                known[flops] = product(flops)
            cost = add_costs(add_costs(left.cost, right.cost), known[flops])
            if bound is not None and not cost < bound:
                continue
            key, rank = (*left.groups, *right.groups, left.partial | right.partial), left.rank + right.rank
            best = found.get(key)
            if best is None:
                found[key] = BestProduct(cost, rank, rank, (left.number, right.number))
                continue
            best.first = min(best.first, rank)
            if cost < best.cost or (cost == best.cost and rank < best.rank):
                best.cost, best.rank, best.numbers = cost, rank, (left.number, right.number)
        return found

    def result_number(self, key: tuple[int, ...]) -> int:
        *groups, partial = key
        place = (*(groups[position] for position in self.order), self.groups.partial[partial])
        return self.result.shardings.encode(place)

    def compatible_pairs(self) -> Iterator[tuple[OperandSharding, OperandSharding]]:
        """Shardings of both that agree on the dims that both have, and use no axis twice otherwise."""
        rights: dict[tuple[int, ...], dict[int, list[OperandSharding]]] = {}
        for agreed, half in self.operand_shardings(self.right, "right"):
            rights.setdefault(agreed, {}).setdefault(half.mask, []).append(half)
        for agreed, left in self.operand_shardings(self.left, "left"):
            for mask, halves in rights.get(agreed, {}).items():
                if not mask & left.mask:
                    for right in halves:
                        yield left, right

    def operand_shardings(self, tensor: SearchTensor, side: str) -> Iterator[tuple[tuple[int, ...], OperandSharding]]:
        """For each known sharding of a tensor the groups of the shared dims, and its part in a product."""
        shardings, mask = tensor.graph.shardings, self.groups.mask
        agreed = [tensor.dims.index(dim) for dim in self.shared]
        own = [i for i, dim in enumerate(tensor.dims) if side == "left" or dim not in self.left.dims]
        kept = [i for i in own if tensor.dims[i] in self.result.dims]
        summed = [i for i in own if i not in kept]
        ranks = [self.groups.rank_digits(len(self.union) + 2 - self.union.index(dim)) for dim in tensor.dims]
        partial_ranks = self.groups.rank_digits(2 if side == "left" else 1)
        for number, node in tensor.nodes.items():
            place = shardings.decode(number)
            partial = mask[place[-1]]
            yield tuple(place[i] for i in agreed), OperandSharding(
                number=number, cost=node.cost, mask=partial | sum(mask[place[i]] for i in own),
                groups=tuple(place[i] for i in kept), partial=partial | sum(mask[place[i]] for i in summed),
                rank=partial_ranks[self.groups.by_mask[partial]] + sum(ranks[i][place[i]] for i in own),
                elements=math.prod((tensor.graph.local_sizes[i][place[i]] for i in own), start=1.0),
            )  # fmt: skip
