"""Cheapest paths from some shardings of a tensor to all others: shardings are nodes, collectives are edges.

Costs add along a path (Dijkstra); of two paths with the same cost the one found first is kept.
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
Edge = tuple[int, CostVector, int]  # number of the sharding after a collective, its cost, number of its operation
PriceCollective = Callable[[CollectiveKind, Axes, float], CostVector]  # kind, axes, elements of the payload


class ByCollective(NamedTuple):
    """Origin of a sharding that was reached from another one by a collective."""

    before: int
    operation: int


class ByProduct(NamedTuple):
    """Origin of a sharding that results from a local product of tensors (or the sum of one), each in the sharding of its
    number."""

    tensors: tuple[SearchTensor, ...]
    numbers: tuple[int, ...]


class ReachedSharding(NamedTuple):
    """Cheapest known path to a sharding: its cost, and its last step (None if the tensor starts in it)."""

    cost: CostVector
    origin: ByCollective | ByProduct | None


class ShardingGraph:
    """Graph of the shardings of a tensor with these dims, by their numbers in `shardings`, with the price of each collective."""

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
        """Return the elements on one device; 0 if the axes do not divide the dims."""
        num_elements = self.elements_cache.get(number)
        if num_elements is None:
            num_elements = 1.0
            for sizes, group in zip(self.local_sizes, self.shardings.decode(number), strict=False):
                num_elements *= sizes[group]
            self.elements_cache[number] = num_elements
        return num_elements

    def edges(self, number: int) -> list[Edge]:
        """Return every collective that applies to the tensor in this sharding."""
        if number not in self.edges_cache:
            self.edges_cache[number] = list(self._edges(number))
        return self.edges_cache[number]

    def _edges(self, number: int) -> Iterator[Edge]:
        """Yield the edges; the payload is `Collective.payload_elements` for the tensor's sizes."""
        elements_before, prices, operations = self.elements(number), self.prices_cache, self.shardings.operations
        for operation, after in self.shardings.edges_from(number):
            elements_after = self.elements(after)
            if elements_after:
                kind, axes, factor = operations[operation]
                key = operation, elements_before * factor or elements_after
                price = prices.get(key)
                if price is None:
                    price = prices[key] = self.price(kind, axes, key[1])
                yield after, price, operation


@dataclass(slots=True, eq=False)
class SearchTensor:
    """Tensor of an expression (an operand, or the product of those in `members`) with the cheapest path to each sharding."""

    name: str
    members: frozenset[int]
    graph: ShardingGraph
    nodes: dict[int, ReachedSharding]

    @property
    def dims(self) -> Axes:
        return self.graph.dims


def find_cheapest_paths(
    graph: ShardingGraph, nodes: dict[int, ReachedSharding], bound: CostVector | None = None
) -> dict[int, ReachedSharding]:
    """Find the cheapest path from `nodes` to every sharding, or with a bound to those that cost less; complete and return
    `nodes`."""
    order = itertools.count()
    heap = [(node.cost, next(order), number) for number, node in nodes.items()]
    heapq.heapify(heap)
    settled: set[int] = set()
    while heap:
        cost, _, number = heapq.heappop(heap)
        if number in settled:
            continue
        settled.add(number)
        for after, price, operation in graph.edges(number):
            if after in settled:
                continue
            total = add_costs(cost, price)
            reached = nodes.get(after)
            if (reached is None or total < reached.cost) and (bound is None or total < bound):
                nodes[after] = ReachedSharding(total, ByCollective(number, operation))
                heapq.heappush(heap, (total, next(order), after))
    return nodes


def costs_to_go(
    graph: ShardingGraph, numbers: Mapping[int, ReachedSharding], ends: Mapping[int, CostVector]
) -> dict[int, CostVector]:
    """Return the cost from each sharding to the nearest of `ends`: Dijkstra backwards over the graph among `numbers`."""
    incoming: dict[int, list[tuple[int, CostVector]]] = {}
    for number in numbers:
        for after, price, _ in graph.edges(number):
            incoming.setdefault(after, []).append((number, price))
    cost_to_end = dict(ends)
    order = itertools.count()
    heap = [(cost, next(order), number) for number, cost in cost_to_end.items()]
    settled: set[int] = set()
    while heap:
        cost, _, number = heapq.heappop(heap)
        if number in settled:
            continue
        settled.add(number)
        for before, price in incoming.get(number, ()):
            total = add_costs(cost, price)
            if before not in cost_to_end or total < cost_to_end[before]:
                cost_to_end[before] = total
                heapq.heappush(heap, (total, next(order), before))
    return cost_to_end


def add_costs(first: CostVector, second: CostVector) -> CostVector:
    return tuple(map(operator.add, first, second))
