"""The cheapest way to compute a sharded product: exact, over collectives and local products in any order.

Shortest paths over the shardings of each tensor (`paths`) give the cost of every sharding of every operand. Two operands meet
in a local product wherever their shardings agree (`joins`); the product's natural sharding starts the result's own graph. For
a chain every order of multiplying is tried. An operand is summed over the dims that it alone has before it meets another:
that is never dearer. The price of a collective and of a product is handed in.
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
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes, Spec
from shardwise.values.errors import ShardingError

PriceProduct = Callable[[float], CostVector]  # FLOPs on one device


LARGEST_OUTER_PRODUCT = 2  # dims; more would make a chain's search long for nothing


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
    """Actions in order of execution, their cost, the shardings that operands start in, and that of the result.

    `tensor` is the name of the result among the actions.
    """

    tensor: str
    actions: tuple[StrategyStep, ...]
    cost: CostVector
    starts: Mapping[str, Spec]
    result: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductProblem:
    """What is to be computed: operands with their shardings, the result's dims, its sharding if one is asked for.

    A dim that the result lacks is summed, once nothing outside a product has it. `free` operands may start in any sharding.
    Only what costs less than `bound` is looked at, if there is one.
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
    """The cheapest strategy first, then the cheapest of every other way to join the operands, up to `alternatives`.

    Raises `ShardingError` when no sequence of collectives and products leads to the result; below a bound, nothing is found
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
        """The graph of a tensor's shardings; tensors with as many dims share its edges, but for their prices."""
        if dims not in self.graphs_cache:
            shardings = self.shardings_cache.setdefault(len(dims), NumberedShardings(len(dims), self.groups))
            self.graphs_cache[dims] = ShardingGraph(dims, self.problem.sizes, shardings, self.collective)
        return self.graphs_cache[dims]

    def tensor(self, name: str, members: frozenset[int], dims: Axes, nodes: dict[int, ReachedSharding]) -> SearchTensor:
        lattice = self.graph(dims)
        return SearchTensor(name, members, lattice, find_cheapest_paths(lattice, nodes, self.problem.bound))

    def leaf(self, index: int) -> SearchTensor:
        name, spec = self.problem.names[index], self.problem.operands[index]
        lattice = self.graph(spec.dims)
        numbers = (
            [lattice.shardings.encode_spec(spec)]
            if name not in self.problem.free
            else list(self.unreduced_shardings(lattice))
        )
        nodes = {number: ReachedSharding(self.zero, None) for number in numbers}
        return self.sum_private_dims(self.tensor(name, frozenset([index]), spec.dims, nodes))

    def unreduced_shardings(self, lattice: ShardingGraph) -> Iterator[int]:
        """Every sharding without partial sums."""
        for split in self.groups.enumerate_splits(len(lattice.dims)):
            number = lattice.shardings.encode((*split, 0))
            if lattice.elements(number):
                yield number

    # Products

    def sum_private_dims(self, leaf: SearchTensor) -> SearchTensor:
        """The operand without the dims that nothing else has; of a single operand, with the result's dims."""
        dims = self.dims(leaf.members)
        if dims == leaf.dims:
            return leaf
        nodes: dict[int, ReachedSharding] = {}
        shardings, times = self.graph(dims).shardings, 1.0 if set(leaf.dims) - set(dims) else 0.0
        for number, node in leaf.nodes.items():
            result = shardings.encode_spec(infer_product_spec((leaf.graph.spec(number),), dims))
            cost = add_costs(node.cost, self.product(leaf.graph.elements(number) * times))
            if self.is_below_bound(cost) and (result not in nodes or cost < nodes[result].cost):
                nodes[result] = ReachedSharding(cost, ByProduct((leaf,), (number,)))
        return self.tensor(summed_name(leaf.name), leaf.members, dims, nodes)

    def is_below_bound(self, cost: CostVector) -> bool:
        return self.problem.bound is None or cost < self.problem.bound

    def root(self, leaves: Sequence[SearchTensor]) -> SearchTensor:
        """The whole product: every way to split the operands in two, the parts built the same way."""
        built: dict[frozenset[int], SearchTensor] = {leaf.members: leaf for leaf in leaves}
        outer = not _connected([leaf.dims for leaf in leaves])
        for count in range(2, len(leaves) + 1):
            for members in map(frozenset, itertools.combinations(range(len(leaves)), count)):
                # outer products are tried where they cannot be avoided, and where they stay small
                small = len(self.dims(members)) <= LARGEST_OUTER_PRODUCT
                self.build(members, built, outer=outer or small or count == len(leaves))
        whole = frozenset(range(len(leaves)))
        return built.get(whole) or SearchTensor("", whole, self.graph(self.problem.result), {})

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
        """Dims of a partial product."""
        inside: list[Axes] = []
        outside: list[Axes] = []
        for index, spec in enumerate(self.problem.operands):
            (inside if index in members else outside).append(spec.dims)
        return remaining_dims(inside, outside, self.problem.result)

    # From the graph back to actions

    def final_shardings(self, root: SearchTensor) -> list[int]:
        """Shardings in which the result may be left: the one asked for or, where none is, those that are no partial sums."""
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
            for operand, own in zip(origin.tensors, origin.numbers, strict=True):
                yield from self.actions(operand, own, starts)
            specs = tuple(t.graph.spec(own) for t, own in zip(origin.tensors, origin.numbers, strict=True))
            yield ProductStep(tuple(t.name for t in origin.tensors), tensor.name, specs, tensor.graph.spec(number))
        elif origin is not None:
            yield from self.actions(tensor, origin.before, starts)
            yield ProductCollective(tensor.name, tensor.graph.collective(origin.before, origin.operation, number))
        else:
            starts[tensor.name] = tensor.graph.spec(number)

    def find_alternatives(self, root: SearchTensor, best: ProductStrategy, count: int) -> list[ProductStrategy]:
        """The cheapest strategies whose last product joins its operands in another way."""
        if not count:
            return []
        joined = {number: node for number, node in root.nodes.items() if isinstance(node.origin, ByProduct)}
        ahead = costs_to_go(root.graph, root.nodes, dict.fromkeys(self.final_shardings(root), self.zero))
        costs = {number: add_costs(node.cost, ahead[number]) for number, node in joined.items() if number in ahead}
        reachable = [number for number, cost in costs.items() if self.is_below_bound(cost)]
        reachable.sort(key=lambda number: (costs[number], str(root.graph.spec(number))))
        different = {self.signature(best): best}
        for number in reachable:
            if len(different) > count:
                break
            alone = self.tensor(root.name, root.members, root.dims, {number: joined[number]})
            other = self.strategy(alone, min(self.final_shardings(alone), key=lambda end: _by_cost(alone, end)))
            different.setdefault(self.signature(other), other)
        return list(different.values())[1:]

    def signature(self, strategy: ProductStrategy) -> tuple[object, ...]:
        """What makes strategies essentially different: kinds and degrees, but not which of two equal axes does it."""

        def degrees(spec: Spec) -> tuple[int, ...]:
            return (*map(self.groups.size_of, spec.axes), self.groups.size_of(spec.partial))

        return tuple(
            (a.tensor, a.collective.kind, degrees(a.collective.after))
            if isinstance(a, ProductCollective)
            else (a.operands, tuple(map(degrees, a.specs)))
            for a in strategy.actions
        )


def summed_name(name: str) -> str:
    """The name of an operand once it is summed over the dims that it alone has."""
    return f"{name}.sum"


def _by_cost(tensor: SearchTensor, number: int) -> tuple[CostVector, str]:
    return tensor.nodes[number].cost, str(tensor.graph.spec(number))


def _connected(groups: Sequence[Axes]) -> bool:
    """Whether operands with these dims hang together by shared dims."""
    reached, left = set(groups[0]), list(groups[1:])
    while near := [group for group in left if reached & set(group)]:
        reached.update(*near)
        left = [group for group in left if group not in near]
    return not left


def _subsets(members: frozenset[int]) -> Iterator[frozenset[int]]:
    for count in range(1, len(members)):
        yield from map(frozenset, itertools.combinations(sorted(members), count))
