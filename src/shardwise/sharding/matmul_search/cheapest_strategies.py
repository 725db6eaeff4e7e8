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
from shardwise.sharding.contraction import kept_dims, natural
from shardwise.sharding.matmul_search.cheapest_paths import (
    Cost,
    Joined,
    Lattice,
    Node,
    PriceCollective,
    Tensor,
    add,
    costs_to,
    reach_all,
)
from shardwise.sharding.matmul_search.local_products import Joiner
from shardwise.sharding.matmul_search.numbered_shardings import AxisGroups, Shardings
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes, Spec
from shardwise.values.errors import ShardingError

PriceProduct = Callable[[float], Cost]  # FLOPs on one device


LARGEST_OUTER_PRODUCT = 2  # dims; more would make a chain's search long for nothing


@dataclass(frozen=True, slots=True)
class Move:
    """One collective on one tensor (an operand, or the product of some)."""

    tensor: str
    collective: Collective


@dataclass(frozen=True, slots=True)
class Product:
    """One local product of two tensors, or the sum of one over some of its dims."""

    operands: tuple[str, ...]
    result: str
    specs: tuple[Spec, ...]  # of the operands
    result_spec: Spec


Action = Move | Product


@dataclass(frozen=True, slots=True)
class Strategy:
    """Actions in order of execution, their cost, the shardings that operands start in, and that of the result.

    `tensor` is the name of the result among the actions.
    """

    tensor: str
    actions: tuple[Action, ...]
    cost: Cost
    starts: Mapping[str, Spec]
    result: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
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
    bound: Cost | None = None


def cheapest(
    problem: Problem, collective: PriceCollective, product: PriceProduct, *, alternatives: int = 3
) -> list[Strategy]:
    """The cheapest strategy first, then the cheapest of every other way to join the operands, up to `alternatives`.

    Raises `ShardingError` when no sequence of collectives and products leads to the result; below a bound, nothing is found
    instead.
    """
    return _Search(problem, collective, product).run(alternatives)


class _Search:
    def __init__(self, problem: Problem, collective: PriceCollective, product: PriceProduct) -> None:
        self.problem, self.collective, self.product = problem, collective, product
        self.groups = AxisGroups(dict(problem.mesh.axes))
        self.known_shardings: dict[int, Shardings] = {}
        self.known_lattices: dict[Axes, Lattice] = {}
        self.zero: Cost = tuple(0.0 for _ in product(0.0))

    def run(self, alternatives: int) -> list[Strategy]:
        root = self.root([self.leaf(i) for i in range(len(self.problem.operands))])
        ends = self.ends(root)
        if not ends and self.problem.bound is not None:
            return []
        if not ends:
            raise ShardingError(f"no way found to {self.problem.goal or self.problem.result}; check that sizes divide")
        best = self.strategy(root, min(ends, key=lambda number: _by_cost(root, number)))
        return [best, *self.others(root, best, alternatives)]

    def lattice(self, dims: Axes) -> Lattice:
        """The graph of a tensor's shardings; tensors with as many dims share its edges, but for their prices."""
        if dims not in self.known_lattices:
            shardings = self.known_shardings.setdefault(len(dims), Shardings(len(dims), self.groups))
            self.known_lattices[dims] = Lattice(dims, self.problem.sizes, shardings, self.collective)
        return self.known_lattices[dims]

    def tensor(self, name: str, members: frozenset[int], dims: Axes, nodes: dict[int, Node]) -> Tensor:
        lattice = self.lattice(dims)
        return Tensor(name, members, lattice, reach_all(lattice, nodes, self.problem.bound))

    def leaf(self, index: int) -> Tensor:
        name, spec = self.problem.names[index], self.problem.operands[index]
        lattice = self.lattice(spec.dims)
        numbers = [lattice.shardings.number_of(spec)] if name not in self.problem.free else list(self.whole(lattice))
        nodes = {number: Node(self.zero, None) for number in numbers}
        return self.summed(self.tensor(name, frozenset([index]), spec.dims, nodes))

    def whole(self, lattice: Lattice) -> Iterator[int]:
        """Every sharding without partial sums."""
        for split in self.groups.splits(len(lattice.dims)):
            number = lattice.shardings.number((*split, 0))
            if lattice.elements(number):
                yield number

    # Products

    def summed(self, leaf: Tensor) -> Tensor:
        """The operand without the dims that nothing else has; of a single operand, with the result's dims."""
        dims = self.dims(leaf.members)
        if dims == leaf.dims:
            return leaf
        nodes: dict[int, Node] = {}
        shardings, times = self.lattice(dims).shardings, 1.0 if set(leaf.dims) - set(dims) else 0.0
        for number, node in leaf.nodes.items():
            result = shardings.number_of(natural((leaf.lattice.spec(number),), dims))
            cost = add(node.cost, self.product(leaf.lattice.elements(number) * times))
            if self.within(cost) and (result not in nodes or cost < nodes[result].cost):
                nodes[result] = Node(cost, Joined((leaf,), (number,)))
        return self.tensor(summed_name(leaf.name), leaf.members, dims, nodes)

    def within(self, cost: Cost) -> bool:
        return self.problem.bound is None or cost < self.problem.bound

    def root(self, leaves: Sequence[Tensor]) -> Tensor:
        """The whole product: every way to split the operands in two, the parts built the same way."""
        built: dict[frozenset[int], Tensor] = {leaf.members: leaf for leaf in leaves}
        outer = not _connected([leaf.dims for leaf in leaves])
        for count in range(2, len(leaves) + 1):
            for members in map(frozenset, itertools.combinations(range(len(leaves)), count)):
                # outer products are tried where they cannot be avoided, and where they stay small
                small = len(self.dims(members)) <= LARGEST_OUTER_PRODUCT
                self.build(members, built, outer=outer or small or count == len(leaves))
        whole = frozenset(range(len(leaves)))
        return built.get(whole) or Tensor("", whole, self.lattice(self.problem.result), {})

    def build(self, members: frozenset[int], built: dict[frozenset[int], Tensor], *, outer: bool) -> None:
        first, dims = min(members), self.dims(members)
        nodes: dict[int, Node] = {}
        for part in _subsets(members):
            left, right = built.get(part), built.get(members - part)
            if first in part and left is not None and right is not None and (outer or set(left.dims) & set(right.dims)):
                Joiner(left, right, self.lattice(dims), self.groups).join(nodes, self.product, self.problem.bound)
        if nodes:
            name = "*".join(self.problem.names[i] for i in sorted(members))
            built[members] = self.tensor(name, members, dims, nodes)

    def dims(self, members: frozenset[int]) -> Axes:
        """Dims of a partial product."""
        inside: list[Axes] = []
        outside: list[Axes] = []
        for index, spec in enumerate(self.problem.operands):
            (inside if index in members else outside).append(spec.dims)
        return kept_dims(inside, outside, self.problem.result)

    # From the graph back to actions

    def ends(self, root: Tensor) -> list[int]:
        """Shardings in which the result may be left: the one asked for or, where none is, those that are no partial sums."""
        if self.problem.goal is not None:
            goal = root.lattice.shardings.number_of(self.problem.goal)
            return [goal] if goal in root.nodes else []
        return [number for number in root.nodes if root.lattice.shardings.place(number)[-1] == 0]

    def strategy(self, tensor: Tensor, end: int) -> Strategy:
        starts: dict[str, Spec] = {}
        actions = tuple(self.actions(tensor, end, starts))
        return Strategy(tensor.name, actions, tensor.nodes[end].cost, starts, tensor.lattice.spec(end))

    def actions(self, tensor: Tensor, number: int, starts: dict[str, Spec]) -> Iterator[Action]:
        origin = tensor.nodes[number].origin
        if isinstance(origin, Joined):
            for operand, own in zip(origin.tensors, origin.numbers, strict=True):
                yield from self.actions(operand, own, starts)
            specs = tuple(t.lattice.spec(own) for t, own in zip(origin.tensors, origin.numbers, strict=True))
            yield Product(tuple(t.name for t in origin.tensors), tensor.name, specs, tensor.lattice.spec(number))
        elif origin is not None:
            yield from self.actions(tensor, origin.before, starts)
            yield Move(tensor.name, tensor.lattice.collective(origin.before, origin.operation, number))
        else:
            starts[tensor.name] = tensor.lattice.spec(number)

    def others(self, root: Tensor, best: Strategy, count: int) -> list[Strategy]:
        """The cheapest strategies whose last product joins its operands in another way."""
        if not count:
            return []
        joined = {number: node for number, node in root.nodes.items() if isinstance(node.origin, Joined)}
        ahead = costs_to(root.lattice, root.nodes, dict.fromkeys(self.ends(root), self.zero))
        costs = {number: add(node.cost, ahead[number]) for number, node in joined.items() if number in ahead}
        reachable = [number for number, cost in costs.items() if self.within(cost)]
        reachable.sort(key=lambda number: (costs[number], str(root.lattice.spec(number))))
        different = {self.signature(best): best}
        for number in reachable:
            if len(different) > count:
                break
            alone = self.tensor(root.name, root.members, root.dims, {number: joined[number]})
            other = self.strategy(alone, min(self.ends(alone), key=lambda end: _by_cost(alone, end)))
            different.setdefault(self.signature(other), other)
        return list(different.values())[1:]

    def signature(self, strategy: Strategy) -> tuple[object, ...]:
        """What makes strategies essentially different: kinds and degrees, but not which of two equal axes does it."""

        def degrees(spec: Spec) -> tuple[int, ...]:
            return (*map(self.groups.size_of, spec.axes), self.groups.size_of(spec.partial))

        return tuple(
            (a.tensor, a.collective.kind, degrees(a.collective.after))
            if isinstance(a, Move)
            else (a.operands, tuple(map(degrees, a.specs)))
            for a in strategy.actions
        )


def summed_name(name: str) -> str:
    """The name of an operand once it is summed over the dims that it alone has."""
    return f"{name}.sum"


def _by_cost(tensor: Tensor, number: int) -> tuple[Cost, str]:
    return tensor.nodes[number].cost, str(tensor.lattice.spec(number))


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
