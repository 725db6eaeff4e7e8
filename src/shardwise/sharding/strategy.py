"""The cheapest way to compute a sharded product: exact, over collectives and local products in any order.

The shardings of one tensor are the nodes of a graph, collectives its edges, and costs add: shortest paths (Dijkstra) give
the cost of every sharding of every operand. Two operands meet in a local product wherever their shardings agree; the
product's natural sharding starts the result's own graph. For a chain every order of multiplying is tried. An operand is
summed over the dims that it alone has before it meets another: that is never dearer. The price of a collective and of a
product is handed in.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.errors import ShardingError
from shardwise.sharding.collective import Collective, Kind
from shardwise.sharding.einsum import kept_dims, natural
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.moves import collectives_from, local_products
from shardwise.sharding.spec import Axes, Spec

Cost = tuple[float, ...]  # compared in order; costs add part by part
PriceCollective = Callable[[Kind, Axes, float], Cost]  # kind, axes, elements of the payload
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


class _Node(NamedTuple):
    """How a sharding of a tensor was reached, and at what cost."""

    cost: Cost
    origin: tuple[Spec, Collective] | _Join | None


class _Join(NamedTuple):
    """A local product of tensors (or the sum of one), each in one of its shardings."""

    tensors: tuple[_Tensor, ...]
    specs: tuple[Spec, ...]


@dataclass(slots=True, eq=False)
class _Tensor:
    """A tensor of the expression tree with the cheapest way to each of its shardings."""

    name: str
    dims: Axes
    members: frozenset[int]
    nodes: dict[Spec, _Node]


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
        self.degree = dict(problem.mesh.axes)
        self.known_moves: dict[Spec, list[tuple[Collective, Cost]]] = {}
        self.zero: Cost = tuple(0.0 for _ in product(0.0))

    def run(self, alternatives: int) -> list[Strategy]:
        leaves = [self.leaf(i) for i in range(len(self.problem.operands))]
        root = self.root(leaves)
        ends = self.ends(root)
        if not ends and self.problem.bound is not None:
            return []
        if not ends:
            raise ShardingError(f"no way found to {self.problem.goal or self.problem.result}; check that sizes divide")
        found: list[Strategy] = []
        for spec in sorted(ends, key=lambda s: (root.nodes[s].cost, str(s)))[:1]:
            found.append(self.strategy(root, spec))
        return found + self.others(root, found[0], alternatives)

    def leaf(self, index: int) -> _Tensor:
        name, spec = self.problem.names[index], self.problem.operands[index]
        start = {spec: _Node(self.zero, None)}
        if name in self.problem.free:
            start = {s: _Node(self.zero, None) for s in self.shardings(spec.dims)}
        return self.summed(self.close(_Tensor(name, spec.dims, frozenset([index]), start)))

    def summed(self, leaf: _Tensor) -> _Tensor:
        """The operand without the dims that nothing else has; of a single operand, with the result's dims."""
        dims = self.dims(leaf.members)
        if dims == leaf.dims:
            return leaf
        nodes: dict[Spec, _Node] = {}
        for spec in leaf.nodes:
            self.join((leaf,), (spec,), natural((spec,), dims), nodes)
        return self.close(_Tensor(summed_name(leaf.name), dims, leaf.members, nodes))

    def shardings(self, dims: Axes) -> Iterator[Spec]:
        """Every legal sharding of a tensor without partial sums."""
        for places in itertools.product((None, *dims), repeat=len(self.degree)):
            used: dict[str, list[str]] = {}
            for axis, place in zip(self.degree, places, strict=True):
                if place is not None:
                    used.setdefault(place, []).append(axis)
            for orders in itertools.product(*(itertools.permutations(axes) for axes in used.values())):
                spec = Spec.of(dims, dict(zip(used, orders, strict=True)))
                if self.divides(spec):
                    yield spec

    def divides(self, spec: Spec) -> bool:
        return all(self.problem.sizes[d] % self.size(a) == 0 for d, a in zip(spec.dims, spec.axes, strict=True))

    def size(self, axes: Iterable[str]) -> int:
        result = 1
        for axis in axes:
            result *= self.degree[axis]
        return result

    # Shortest paths over the shardings of one tensor

    def close(self, tensor: _Tensor) -> _Tensor:
        """Reach every sharding from those known, each the cheapest way."""
        order = itertools.count()
        heap = [(node.cost, next(order), spec) for spec, node in tensor.nodes.items()]
        heapq.heapify(heap)
        done: set[Spec] = set()
        while heap:
            cost, _, spec = heapq.heappop(heap)
            if spec in done:
                continue
            done.add(spec)
            for collective, price in self.moves(spec):
                after = collective.after
                total = _add(cost, price)
                if self.within(total) and (after not in tensor.nodes or total < tensor.nodes[after].cost):
                    tensor.nodes[after] = _Node(total, (spec, collective))
                    heapq.heappush(heap, (total, next(order), after))
        return tensor

    def within(self, cost: Cost) -> bool:
        return self.problem.bound is None or cost < self.problem.bound

    def moves(self, spec: Spec) -> list[tuple[Collective, Cost]]:
        """Every collective that applies to a tensor lying as `spec`, with its price."""
        if spec not in self.known_moves:
            found = []
            for collective in collectives_from(spec, self.degree):
                if self.divides(collective.after):
                    found.append((collective, self.price(collective)))
            self.known_moves[spec] = found
        return self.known_moves[spec]

    def price(self, collective: Collective) -> Cost:
        return self.collective(collective.kind, collective.axes, self.payload(collective))

    def payload(self, collective: Collective) -> float:
        """Elements of `Collective.payload_elements` for the problem's sizes."""
        if collective.kind is Kind.ALL_GATHER:
            return self.local(collective.before) * self.size(collective.axes)
        if collective.kind is Kind.PERMUTE:
            return self.local(collective.after)
        return self.local(collective.before)

    def local(self, spec: Spec) -> float:
        elements = 1.0
        for dim, axes in zip(spec.dims, spec.axes, strict=True):
            elements *= self.problem.sizes[dim] / self.size(axes)
        return elements

    # Products

    def root(self, leaves: Sequence[_Tensor]) -> _Tensor:
        """The whole product: every way to split the operands in two, the parts built the same way."""
        built: dict[frozenset[int], _Tensor] = {leaf.members: leaf for leaf in leaves}
        outer = not _connected([leaf.dims for leaf in leaves])
        for count in range(2, len(leaves) + 1):
            for members in map(frozenset, itertools.combinations(range(len(leaves)), count)):
                # outer products are tried where they cannot be avoided, and where they stay small
                small = len(self.dims(members)) <= LARGEST_OUTER_PRODUCT
                self.build(members, built, outer=outer or small or count == len(leaves))
        whole = frozenset(range(len(leaves)))
        return built.get(whole) or _Tensor("", self.problem.result, whole, {})

    def build(self, members: frozenset[int], built: dict[frozenset[int], _Tensor], *, outer: bool) -> None:
        first = min(members)
        nodes: dict[Spec, _Node] = {}
        dims = self.dims(members)
        for part in _subsets(members):
            left, right = built.get(part), built.get(members - part)
            if first in part and left is not None and right is not None and (outer or set(left.dims) & set(right.dims)):
                for left_spec, right_spec, result in local_products(left.dims, right.dims, dims, tuple(self.degree)):
                    if left_spec in left.nodes and right_spec in right.nodes and self.divides(result):
                        self.join((left, right), (left_spec, right_spec), result, nodes)
        if nodes:
            name = "*".join(self.problem.names[i] for i in sorted(members))
            built[members] = self.close(_Tensor(name, dims, members, nodes))

    def dims(self, members: frozenset[int]) -> Axes:
        """Dims of a partial product."""
        inside: list[Axes] = []
        outside: list[Axes] = []
        for index, spec in enumerate(self.problem.operands):
            (inside if index in members else outside).append(spec.dims)
        return kept_dims(inside, outside, self.problem.result)

    def join(
        self, tensors: tuple[_Tensor, ...], specs: tuple[Spec, ...], result: Spec, nodes: dict[Spec, _Node]
    ) -> None:
        """Note the local product of tensors in these shardings, which lies as `result`, where it is the cheapest to lie so."""
        parts = [tensor.nodes[spec].cost for tensor, spec in zip(tensors, specs, strict=True)]
        cost = tuple(map(sum, zip(*parts, self.product(self.flops(specs, result.dims)), strict=True)))
        if self.within(cost) and (result not in nodes or cost < nodes[result].cost):
            nodes[result] = _Node(cost, _Join(tensors, specs))

    def flops(self, specs: Sequence[Spec], result: Axes) -> float:
        """FLOPs on one device, as `Contract.flops` counts them: for each element of the local index space one for the
        product and one for the sum, where there is one."""
        sizes = {d: self.problem.sizes[d] / self.size(s.axes_of(d)) for s in specs for d in s.dims}
        elements = 1.0
        for size in sizes.values():
            elements *= size
        return elements * (len(specs) - 1 + bool(set(sizes) - set(result)))

    # From the graph back to actions

    def ends(self, root: _Tensor) -> list[Spec]:
        goal = self.problem.goal
        if goal is not None:
            return [goal] if goal in root.nodes else []
        return [spec for spec in root.nodes if not spec.partial]

    def strategy(self, tensor: _Tensor, end: Spec) -> Strategy:
        starts: dict[str, Spec] = {}
        return Strategy(tensor.name, tuple(self.actions(tensor, end, starts)), tensor.nodes[end].cost, starts, end)

    def actions(self, tensor: _Tensor, spec: Spec, starts: dict[str, Spec]) -> Iterator[Action]:
        origin = tensor.nodes[spec].origin
        if isinstance(origin, _Join):
            for operand, own in zip(origin.tensors, origin.specs, strict=True):
                yield from self.actions(operand, own, starts)
            yield Product(tuple(operand.name for operand in origin.tensors), tensor.name, origin.specs, spec)
        elif origin is not None:
            yield from self.actions(tensor, origin[0], starts)
            yield Move(tensor.name, origin[1])
        else:
            starts[tensor.name] = spec

    def others(self, root: _Tensor, best: Strategy, count: int) -> list[Strategy]:
        """The cheapest strategies whose last product joins its operands in another way."""
        joined = {spec: node for spec, node in root.nodes.items() if isinstance(node.origin, _Join)}
        ahead = self.costs_ahead(root)
        reachable = [s for s in joined if s in ahead and self.within(_add(joined[s].cost, ahead[s]))]
        reachable.sort(key=lambda spec: (_add(joined[spec].cost, ahead[spec]), str(spec)))
        different = {self.signature(best): best}
        for spec in reachable:
            if len(different) > count:
                break
            alone = self.close(_Tensor(root.name, root.dims, root.members, {spec: joined[spec]}))
            end = min(self.ends(alone), key=lambda s: (alone.nodes[s].cost, str(s)))
            other = self.strategy(alone, end)
            different.setdefault(self.signature(other), other)
        return list(different.values())[1:]

    def costs_ahead(self, root: _Tensor) -> dict[Spec, Cost]:
        """What it still costs from each sharding of the result to the nearest end: the same graph, walked backwards."""
        into: dict[Spec, list[tuple[Spec, Cost]]] = {}
        for spec in root.nodes:
            for collective, price in self.moves(spec):
                into.setdefault(collective.after, []).append((spec, price))
        ahead: dict[Spec, Cost] = dict.fromkeys(self.ends(root), self.zero)
        order = itertools.count()
        heap = [(cost, next(order), spec) for spec, cost in ahead.items()]
        done: set[Spec] = set()
        while heap:
            cost, _, spec = heapq.heappop(heap)
            if spec in done:
                continue
            done.add(spec)
            for before, price in into.get(spec, ()):
                total = _add(cost, price)
                if before not in ahead or total < ahead[before]:
                    ahead[before] = total
                    heapq.heappush(heap, (total, next(order), before))
        return ahead

    def signature(self, strategy: Strategy) -> tuple[object, ...]:
        """What makes strategies essentially different: kinds and degrees, but not which of two equal axes does it."""

        def degrees(spec: Spec) -> tuple[int, ...]:
            return (*(self.size(axes) for axes in spec.axes), self.size(spec.partial))

        return tuple(
            (a.tensor, a.collective.kind, degrees(a.collective.after))
            if isinstance(a, Move)
            else (a.operands, tuple(map(degrees, a.specs)))
            for a in strategy.actions
        )


def summed_name(name: str) -> str:
    """The name of an operand once it is summed over the dims that it alone has."""
    return f"{name}.sum"


def _add(first: Cost, second: Cost) -> Cost:
    return tuple([a + b for a, b in zip(first, second, strict=True)])


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
