"""Cheapest strategies of a sharded product: exact, over collectives and local products in any order.

Shortest paths over the shardings of each tensor (`cheapest_paths`) give the cost of every sharding of every operand. Two
operands are multiplied locally wherever their shardings agree (`local_products`); the product's natural sharding starts the
result's own graph. For a chain every order of multiplication is tried. An operand is summed over the dims that it alone has
before it is multiplied: that is never dearer. The prices of collectives and products are passed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.sharding.collectives import Collective
from shardwise.sharding.contraction import infer_product_spec, remaining_dims
from shardwise.sharding.matmul_search.cheapest_paths import (
    ByProduct,
    CostVector,
    PriceCollective,
    ReachedSharding,
    SearchTensor,
    ShardingGraph,
    add_costs,
    costs_to_go,
    find_cheapest_paths,
)
from shardwise.sharding.matmul_search.local_products import LocalProducts
from shardwise.sharding.matmul_search.numbered_shardings import AxisGroups, NumberedShardings
from shardwise.sharding.spec import Axes, Mesh, Spec
from shardwise.values import ShardingError

PriceProduct = Callable[[float], CostVector]  # FLOPs on one device


LARGEST_OUTER_PRODUCT = 2  # dims; larger ones lengthen a chain's search and do not pay


@dataclass(frozen=True, slots=True)
class ProductCollective:
    """One collective on one tensor (an operand, or the product of some)."""

    tensor: str
    collective: Collective


@dataclass(frozen=True, slots=True)
class ProductStep:
    """One local product of two tensors, or the sum of one over some of its dims."""

    operands: tuple[str, ...]
    result: str
    specs: tuple[Spec, ...]  # of the operands
    result_spec: Spec


StrategyStep = ProductCollective | ProductStep


@dataclass(frozen=True, slots=True)
class ProductStrategy:
    """Actions in order of execution, their cost, the initial shardings of the operands, and the sharding of the result.

    `tensor` is the name of the result among the actions.
    """

    tensor: str
    actions: tuple[StrategyStep, ...]
    cost: CostVector
    starts: Mapping[str, Spec]
    result: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductProblem:
    """Product to compute: operands with their shardings, the result's dims, and its sharding if one is required.

    A dim that the result lacks is summed once no tensor outside a product has it. `free` operands may start in any sharding.
    Strategies that do not cost less than `bound`, if there is one, are ignored.
    """

    names: tuple[str, ...]
    operands: tuple[Spec, ...]
    result: Axes
    goal: Spec | None
    mesh: Mesh
    sizes: Mapping[str, int]
    free: frozenset[str] = frozenset()
    bound: CostVector | None = None


def find_cheapest_strategies(
    problem: ProductProblem, collective: PriceCollective, product: PriceProduct, *, alternatives: int = 3
) -> list[ProductStrategy]:
    """Return the cheapest strategy, then the cheapest of every other way to join the operands, up to `alternatives`.

    Raises `ShardingError` if no sequence of collectives and products leads to the result; with a bound the list is empty
    instead.
    """
    return _StrategySearch(problem, collective, product).run(alternatives)


class _StrategySearch:
    def __init__(self, problem: ProductProblem, collective: PriceCollective, product: PriceProduct) -> None:
        self.problem, self.collective, self.product = problem, collective, product
        self.groups = AxisGroups(dict(problem.mesh.axes))
        self.shardings_cache: dict[int, NumberedShardings] = {}
        self.graphs_cache: dict[Axes, ShardingGraph] = {}
        self.zero: CostVector = tuple(0.0 for _ in product(0.0))

    def run(self, alternatives: int) -> list[ProductStrategy]:
        root = self.root([self.leaf(i) for i in range(len(self.problem.operands))])
        ends = self.final_shardings(root)
        if not ends and self.problem.bound is not None:
            return []
        if not ends:
            raise ShardingError(f"no way found to {self.problem.goal or self.problem.result}; check that sizes divide")
        best = self.strategy(root, min(ends, key=lambda number: _by_cost(root, number)))
        return [best, *self.find_alternatives(root, best, alternatives)]

    def graph(self, dims: Axes) -> ShardingGraph:
        """Return the graph of a tensor's shardings; tensors with the same number of dims share its edges, but not their
        prices."""
        if dims not in self.graphs_cache:
            shardings = self.shardings_cache.setdefault(len(dims), NumberedShardings(len(dims), self.groups))
            self.graphs_cache[dims] = ShardingGraph(dims, self.problem.sizes, shardings, self.collective)
        return self.graphs_cache[dims]

    def tensor(self, name: str, members: frozenset[int], dims: Axes, nodes: dict[int, ReachedSharding]) -> SearchTensor:
        graph = self.graph(dims)
        return SearchTensor(name, members, graph, find_cheapest_paths(graph, nodes, self.problem.bound))

    def leaf(self, index: int) -> SearchTensor:
        name, spec = self.problem.names[index], self.problem.operands[index]
        graph = self.graph(spec.dims)
        numbers = (
            [graph.shardings.encode_spec(spec)]
            if name not in self.problem.free
            else list(self.unreduced_shardings(graph))
        )
        nodes = {number: ReachedSharding(self.zero, None) for number in numbers}
        return self.sum_private_dims(self.tensor(name, frozenset([index]), spec.dims, nodes))

    def unreduced_shardings(self, graph: ShardingGraph) -> Iterator[int]:
        """Yield every sharding without partial sums."""
        for split in self.groups.enumerate_splits(len(graph.dims)):
            number = graph.shardings.encode((*split, 0))
            if graph.elements(number):
                yield number

    # Products

    def sum_private_dims(self, leaf: SearchTensor) -> SearchTensor:
        """Return the operand summed over the dims that no other tensor has; of a single operand, with the result's dims."""
        dims = self.dims(leaf.members)
        if dims == leaf.dims:
            return leaf
        nodes: dict[int, ReachedSharding] = {}
        shardings, flops_per_element = self.graph(dims).shardings, 1.0 if set(leaf.dims) - set(dims) else 0.0
        for number, node in leaf.nodes.items():
            result = shardings.encode_spec(infer_product_spec((leaf.graph.spec(number),), dims))
            cost = add_costs(node.cost, self.product(leaf.graph.elements(number) * flops_per_element))
            if self.is_below_bound(cost) and (result not in nodes or cost < nodes[result].cost):
                nodes[result] = ReachedSharding(cost, ByProduct((leaf,), (number,)))
        return self.tensor(summed_name(leaf.name), leaf.members, dims, nodes)

    def is_below_bound(self, cost: CostVector) -> bool:
        return self.problem.bound is None or cost < self.problem.bound

    def root(self, leaves: Sequence[SearchTensor]) -> SearchTensor:
        """Return the whole product: every way to split the operands in two, whose parts are built in the same way."""
        built: dict[frozenset[int], SearchTensor] = {leaf.members: leaf for leaf in leaves}
        outer = not _connected([leaf.dims for leaf in leaves])
        for count in range(2, len(leaves) + 1):
            for members in map(frozenset, itertools.combinations(range(len(leaves)), count)):
                # outer products only where they cannot be avoided or stay small
                is_small = len(self.dims(members)) <= LARGEST_OUTER_PRODUCT
                self.build(members, built, outer=outer or is_small or count == len(leaves))
        all_operands = frozenset(range(len(leaves)))
        return built.get(all_operands) or SearchTensor("", all_operands, self.graph(self.problem.result), {})

    def build(self, members: frozenset[int], built: dict[frozenset[int], SearchTensor], *, outer: bool) -> None:
        first, dims = min(members), self.dims(members)
        nodes: dict[int, ReachedSharding] = {}
        for part in _subsets(members):
            left, right = built.get(part), built.get(members - part)
            if first in part and left is not None and right is not None and (outer or set(left.dims) & set(right.dims)):
                LocalProducts(left, right, self.graph(dims), self.groups).join(nodes, self.product, self.problem.bound)
        if nodes:
            name = "*".join(self.problem.names[i] for i in sorted(members))
            built[members] = self.tensor(name, members, dims, nodes)

    def dims(self, members: frozenset[int]) -> Axes:
        """Return the dims of the product of some operands."""
        inside: list[Axes] = []
        outside: list[Axes] = []
        for index, spec in enumerate(self.problem.operands):
            (inside if index in members else outside).append(spec.dims)
        return remaining_dims(inside, outside, self.problem.result)

    # From the graph back to actions

    def final_shardings(self, root: SearchTensor) -> list[int]:
        """Return the shardings in which the result may end: the goal, or without one all that are no partial sums."""
        if self.problem.goal is not None:
            goal = root.graph.shardings.encode_spec(self.problem.goal)
            return [goal] if goal in root.nodes else []
        return [number for number in root.nodes if root.graph.shardings.decode(number)[-1] == 0]

    def strategy(self, tensor: SearchTensor, end: int) -> ProductStrategy:
        starts: dict[str, Spec] = {}
        actions = tuple(self.actions(tensor, end, starts))
        return ProductStrategy(tensor.name, actions, tensor.nodes[end].cost, starts, tensor.graph.spec(end))

    def actions(self, tensor: SearchTensor, number: int, starts: dict[str, Spec]) -> Iterator[StrategyStep]:
        origin = tensor.nodes[number].origin
        if isinstance(origin, ByProduct):
            for operand, end in zip(origin.tensors, origin.numbers, strict=True):
                yield from self.actions(operand, end, starts)
            specs = tuple(t.graph.spec(end) for t, end in zip(origin.tensors, origin.numbers, strict=True))
            yield ProductStep(tuple(t.name for t in origin.tensors), tensor.name, specs, tensor.graph.spec(number))
        elif origin is not None:
            yield from self.actions(tensor, origin.before, starts)
            yield ProductCollective(tensor.name, tensor.graph.collective(origin.before, origin.operation, number))
        else:
            starts[tensor.name] = tensor.graph.spec(number)

    def find_alternatives(self, root: SearchTensor, best: ProductStrategy, count: int) -> list[ProductStrategy]:
        """Return the cheapest strategies whose last product joins its operands in another way."""
        if not count:
            return []
        products = {number: node for number, node in root.nodes.items() if isinstance(node.origin, ByProduct)}
        # Cost of each product's sharding to the goal, by Dijkstra backwards over the nodes that the search reached.
        to_go = costs_to_go(root.graph, root.nodes, dict.fromkeys(self.final_shardings(root), self.zero))
        costs = {number: add_costs(node.cost, to_go[number]) for number, node in products.items() if number in to_go}
        reachable = [number for number, cost in costs.items() if self.is_below_bound(cost)]
        reachable.sort(key=lambda number: (costs[number], str(root.graph.spec(number))))
        by_signature = {self.signature(best): best}
        for number in reachable:
            if len(by_signature) > count:
                break
            restarted = self.tensor(root.name, root.members, root.dims, {number: products[number]})
            alternative = self.strategy(
                restarted, min(self.final_shardings(restarted), key=lambda end: _by_cost(restarted, end))
            )
            by_signature.setdefault(self.signature(alternative), alternative)
        return list(by_signature.values())[1:]

    def signature(self, strategy: ProductStrategy) -> tuple[object, ...]:
        """Return what makes strategies essentially different: kinds and degrees, but not which of two equal axes is used."""

        def degrees(spec: Spec) -> tuple[int, ...]:
            return (*map(self.groups.size_of, spec.axes), self.groups.size_of(spec.partial))

        return tuple(
            (action.tensor, action.collective.kind, degrees(action.collective.after))
            if isinstance(action, ProductCollective)
            else (action.operands, tuple(map(degrees, action.specs)))
            for action in strategy.actions
        )


def summed_name(name: str) -> str:
    """Return the name of an operand once it is summed over the dims that it alone has."""
    return f"{name}.sum"


def _by_cost(tensor: SearchTensor, number: int) -> tuple[CostVector, str]:
    return tensor.nodes[number].cost, str(tensor.graph.spec(number))


def _connected(groups: Sequence[Axes]) -> bool:
    """Return True if operands with these dims form one component by shared dims."""
    reached, remaining = set(groups[0]), list(groups[1:])
    while adjacent := [group for group in remaining if reached & set(group)]:
        reached.update(*adjacent)
        remaining = [group for group in remaining if group not in adjacent]
    return not remaining


def _subsets(members: frozenset[int]) -> Iterator[frozenset[int]]:
    for count in range(1, len(members)):
        yield from map(frozenset, itertools.combinations(sorted(members), count))
