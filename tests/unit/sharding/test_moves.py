"""Numbered shardings have the collectives and local products enumerated on specs, in the same order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.matmul_search.cheapest_paths import (
    ByProduct,
    CostVector,
    ReachedSharding,
    SearchTensor,
    ShardingGraph,
)
from shardwise.sharding.matmul_search.local_products import LocalProducts
from shardwise.sharding.matmul_search.numbered_shardings import AxisGroups, NumberedShardings
from shardwise.sharding.shard_placement import list_legal_shardings
from shardwise.sharding.spec import Axes, Spec
from shardwise.values.symbolic import SymbolValues

from .naive import collectives_from, local_products

MESHES: tuple[dict[str, int], ...] = (
    {},
    {"X": 2},
    {"Y": 2, "X": 3},
    {"X": 2, "Y": 4, "Z": 2},
    {"X": 4, "Y": 1, "Z": 2},
)
SIZES = {"I": 16, "J": 24, "K": 48}


def shardings_of(dims: Axes, mesh: dict[str, int]) -> list[Spec]:
    """Every sharding, with every set of the unused axes as partial sums."""
    return [
        spec.with_partial(partial)
        for spec in list_legal_shardings(dims, tuple(mesh))
        for count in range(len(mesh) + 1)
        for partial in itertools.combinations([axis for axis in mesh if axis not in spec.sharded_axes], count)
    ]


def lattice(dims: Axes, groups: AxisGroups) -> ShardingGraph:
    return ShardingGraph(dims, SIZES, NumberedShardings(len(dims), groups), by_payload)


def by_payload(kind: CollectiveKind, axes: Axes, payload: float) -> CostVector:
    return (payload,)


@pytest.mark.parametrize("dims", [(), ("I",), ("I", "J")], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_sharding_has_a_number_and_its_collectives(mesh: dict[str, int], dims: Axes) -> None:
    graph = lattice(dims, AxisGroups(mesh))
    values = SymbolValues({**SIZES, **mesh})
    for spec in shardings_of(dims, mesh):
        number = graph.shardings.encode_spec(spec)
        assert graph.spec(number) == spec
        expected = [collective for collective in collectives_from(spec, mesh) if divides(collective.after, mesh)]
        edges = graph.edges(number)
        assert [graph.collective(number, operation, after) for after, _, operation in edges] == expected
        if divides(spec, mesh):
            payloads = [float(collective.payload_elements.evaluate(values)) for collective in expected]
            assert [cost for _, cost, _ in edges] == [(payload,) for payload in payloads]


def divides(spec: Spec, mesh: dict[str, int]) -> bool:
    return all(SIZES[d] % AxisGroups(mesh).size_of(axes) == 0 for d, axes in zip(spec.dims, spec.axes, strict=True))


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        (("I", "J"), ("J", "K"), ("I", "K")),
        (("I", "J"), ("J", "K"), ("K", "I")),
        (("I", "J"), ("I", "J"), ("I",)),  # J summed, I a batch dim
        (("J",), ("K", "I"), ("I", "J", "K")),  # an outer product
        (("I",), ("I",), ()),
        ((), ("I",), ("I",)),
    ],
)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_local_products_equal_the_enumeration(mesh: dict[str, int], left: Axes, right: Axes, result: Axes) -> None:
    """Costs are coarse, so that many products have the same cost and their order decides."""
    groups = AxisGroups(mesh)
    tensors = [tensor(dims, mesh, groups) for dims in (left, right)]
    target = lattice(result, groups)
    reached: dict[int, ReachedSharding] = {}
    LocalProducts(tensors[0], tensors[1], target, groups).join(reached, coarse, (9.0,))
    expected: dict[int, tuple[CostVector, tuple[int, ...]]] = {}
    for *specs, spec in local_products(left, right, result, tuple(mesh)):
        numbers = tuple(t.graph.shardings.encode_spec(index) for t, index in zip(tensors, specs, strict=True))
        if all(index in t.nodes for t, index in zip(tensors, numbers, strict=True)):
            operands_cost = sum(t.nodes[index].cost[0] for t, index in zip(tensors, numbers, strict=True))
            cost = (operands_cost + coarse(flops(specs, result, groups))[0],)
            number = target.shardings.encode_spec(spec)
            if cost < (9.0,) and (number not in expected or cost < expected[number][0]):
                expected[number] = cost, numbers
    assert list(reached) == list(expected)
    assert all(isinstance(node.origin, ByProduct) for node in reached.values())
    assert {n: (node.cost, node.origin.numbers) for n, node in reached.items()} == expected  # type: ignore[union-attr]


def tensor(dims: Axes, mesh: dict[str, int], groups: AxisGroups) -> SearchTensor:
    """A tensor with costs for most shardings, which are often equal."""
    graph = lattice(dims, groups)
    specs = [spec for spec in shardings_of(dims, mesh) if divides(spec, mesh)]
    numbers = [graph.shardings.encode_spec(spec) for index, spec in enumerate(specs) if index % 5]
    return SearchTensor(
        "T", frozenset(), graph, {n: ReachedSharding((float(index % 3),), None) for index, n in enumerate(numbers)}
    )


def coarse(flops: float) -> CostVector:
    return (float(flops > 1000) + float(flops > 10000),)


def flops(operands: Sequence[Spec], result: Axes, groups: AxisGroups) -> float:
    """One for each multiplication on a device and, where a dim is summed, one for each addition."""
    axes = {dim: spec.axes_of(dim) for spec in operands for dim in spec.dims}
    elements = math.prod(SIZES[dim] // groups.size_of(dim_axes) for dim, dim_axes in axes.items())
    return elements * (2.0 if set(axes) - set(result) else 1.0)
