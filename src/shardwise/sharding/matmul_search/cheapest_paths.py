"""The cheapest ways from some shardings of a tensor to all others: its shardings are nodes, collectives are edges.

Costs add along a path (Dijkstra); of two paths that cost the same the one that is found first stands.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.sharding.collectives import Collective, CollectiveKind
from shardwise.sharding.matmul_search.numbered_shardings import NumberedShardings
from shardwise.sharding.spec import Axes, Spec

CostVector = tuple[float, ...]  # compared in order; costs add part by part
Edge = tuple[
    int, CostVector, int
]  # the number of the sharding behind a collective, its cost, and the number of its operation
PriceCollective = Callable[[CollectiveKind, Axes, float], CostVector]  # kind, axes, elements of the payload


class ByCollective(NamedTuple):
    """A sharding that was reached from another one by a collective."""

    before: int
    operation: int


class ByProduct(NamedTuple):
    """A sharding that a local product of tensors (or the sum of one) gives, each lying as its number says."""

    tensors: tuple[SearchTensor, ...]
    numbers: tuple[int, ...]


class ReachedSharding(NamedTuple):
    """The cheapest way to a sharding that is known: its cost, and its last step (none where the tensor starts so)."""

    cost: CostVector
    origin: ByCollective | ByProduct | None


class ShardingGraph:
    """The shardings of a tensor with these dims, by their numbers in `shardings`, and the price of each collective."""

    def __init__(
        self, dims: Axes, sizes: Mapping[str, int], shardings: NumberedShardings, price: PriceCollective
    ) -> None:
        self.dims, self.shardings, self.price = dims, shardings, price
        self.sizes = [sizes[dim] for dim in dims]
        degrees = shardings.groups.size
        self.local_sizes = [[0.0 if size % n else size / n for n in degrees] for size in self.sizes]
        self.elements_cache: dict[int, float] = {}
        self.edges_cache: dict[int, list[Edge]] = {}
        self.prices_cache: dict[tuple[int, float], CostVector] = {}

    def spec(self, number: int) -> Spec:
        return self.shardings.spec(number, self.dims)

    def collective(self, number: int, operation: int, after: int) -> Collective:
        kind, axes, _ = self.shardings.operations[operation]
        return Collective(kind, axes, self.spec(number), self.spec(after))

    def elements(self, number: int) -> float:
        """Elements on one device; 0 where the axes do not divide the dims."""
        known = self.elements_cache.get(number)
        if known is None:
            known = 1.0
            for sizes, group in zip(self.local_sizes, self.shardings.decode(number), strict=False):
                known *= sizes[group]
            self.elements_cache[number] = known
        return known

    def edges(self, number: int) -> list[Edge]:
        """Every collective that applies to the tensor lying so."""
        if number not in self.edges_cache:
            self.edges_cache[number] = list(self._edges(number))
        return self.edges_cache[number]

    def _edges(self, number: int) -> Iterator[Edge]:
        """The payload is `Collective.payload_elements` for the tensor's sizes."""
        before, prices, operations = self.elements(number), self.prices_cache, self.shardings.operations
        for operation, after in self.shardings.edges_from(number):
            behind = self.elements(after)
            if behind:
                kind, axes, factor = operations[operation]
                key = operation, before * factor or behind
                price = prices.get(key)
                if price is None:
                    price = prices[key] = self.price(kind, axes, key[1])
                yield after, price, operation


@dataclass(slots=True, eq=False)
class SearchTensor:
    """A tensor of an expression (an operand, or the product of those in `members`) with the cheapest way to its shardings."""

    name: str
    members: frozenset[int]
    graph: ShardingGraph
    nodes: dict[int, ReachedSharding]

    @property
    def dims(self) -> Axes:
        return self.graph.dims


def find_cheapest_paths(
    lattice: ShardingGraph, nodes: dict[int, ReachedSharding], bound: CostVector | None = None
) -> dict[int, ReachedSharding]:
    """Reach every sharding from those in `nodes`, each the cheapest way; with a bound, those that cost less.

    `nodes` is completed and given back.
    """
    order = itertools.count()
    heap = [(node.cost, next(order), number) for number, node in nodes.items()]
    heapq.heapify(heap)
    done: set[int] = set()
    while heap:
        cost, _, number = heapq.heappop(heap)
        if number in done:
            continue
        done.add(number)
        for after, price, operation in lattice.edges(number):
            if after in done:
                continue
            total = add_costs(cost, price)
            known = nodes.get(after)
            if (known is None or total < known.cost) and (bound is None or total < bound):
                nodes[after] = ReachedSharding(total, ByCollective(number, operation))
                heapq.heappush(heap, (total, next(order), after))
    return nodes


def costs_to_go(
    lattice: ShardingGraph, numbers: Mapping[int, ReachedSharding], ends: Mapping[int, CostVector]
) -> dict[int, CostVector]:
    """What it costs from each sharding to the nearest of `ends`: the same graph among `numbers`, walked backwards."""
    into: dict[int, list[tuple[int, CostVector]]] = {}
    for number in numbers:
        for after, price, _ in lattice.edges(number):
            into.setdefault(after, []).append((number, price))
    ahead = dict(ends)
    order = itertools.count()
    heap = [(cost, next(order), number) for number, cost in ahead.items()]
    done: set[int] = set()
    while heap:
        cost, _, number = heapq.heappop(heap)
        if number in done:
            continue
        done.add(number)
        for before, price in into.get(number, ()):
            total = add_costs(cost, price)
            if before not in ahead or total < ahead[before]:
                ahead[before] = total
                heapq.heappush(heap, (total, next(order), before))
    return ahead


def add_costs(first: CostVector, second: CostVector) -> CostVector:
    return tuple(map(operator.add, first, second))
