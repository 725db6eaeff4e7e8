"""The cheapest program of a sharded product: S2's strategies, exactness against brute force, ties and refusals."""

from __future__ import annotations

import itertools

import pytest

from shardwise.sharding.collectives import CollectiveKind, received_elements
from shardwise.sharding.matmul_search.cheapest_paths import CostVector
from shardwise.sharding.matmul_search.cheapest_strategies import (
    ProductCollective,
    ProductProblem,
    ProductStep,
    ProductStrategy,
    find_cheapest_strategies,
)
from shardwise.sharding.notation import parse_expression, result_dims
from shardwise.sharding.spec import Axes, Mesh, Spec
from shardwise.values.errors import ShardingError
from shardwise.values.symbolic import SymbolValues, constant

from .naive import collectives_from


def solve(
    text: str, mesh: dict[str, int], sizes: dict[str, int], free: tuple[str, ...] = (), alternatives: int = 3
) -> list[ProductStrategy]:
    expression = parse_expression(text)
    problem = ProductProblem(
        names=tuple(o.name for o in expression.operands), operands=tuple(o.spec for o in expression.operands),
        result=result_dims(expression), goal=expression.result.spec if expression.result else None, mesh=Mesh.of(mesh),
        sizes=sizes, free=frozenset(free),
    )  # fmt: skip
    values = SymbolValues(dict(mesh))

    def bytes_of(kind: CollectiveKind, axes: Axes, payload: float) -> CostVector:
        moved = received_elements(kind, axes, constant(payload)).evaluate(values)
        return float(moved), 0.0, 0.0 if kind is CollectiveKind.SLICE else 1.0

    return find_cheapest_strategies(problem, bytes_of, lambda flops: (0.0, flops, 0.0), alternatives=alternatives)


def describe_actions(strategy: ProductStrategy) -> list[str]:
    return [
        f"{a.collective.kind} {a.tensor}"
        if isinstance(a, ProductCollective)
        else " * ".join(f"{name}{spec}" for name, spec in zip(a.operands, a.specs, strict=True))
        for a in strategy.actions
    ]


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", ["A[I_X, J] * B[J, K_Y]"]),
        ("A[I, J_X] * B[J_X, K_Y] -> C[I, K_Y]", ["A[I, J_X] * B[J_X, K_Y]", "all_reduce A*B"]),
        ("A[I, J_X] * B[J_X, K_Y] -> C[I_X, K_Y]", ["A[I, J_X] * B[J_X, K_Y]", "reduce_scatter A*B"]),
    ],
)
def test_simple_products_have_the_expected_strategy(text: str, actions: list[str]) -> None:
    assert describe_actions(solve(text, {"X": 4, "Y": 2}, {"I": 64, "J": 64, "K": 64})[0]) == actions


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        # S2, question 4: gather the weights when the batch is large, reduce the result when it is small
        ({"B": 4096, "D": 64, "F": 64}, ["all_gather Y", "X[B, D] * Y[D, F]"]),
        ({"B": 8, "D": 1024, "F": 64}, ["slice X", "X[B, D_X] * Y[D_X, F]", "all_reduce X*Y"]),
    ],
)
def test_gather_or_reduce_depends_on_the_sizes(sizes: dict[str, int], kinds: list[str]) -> None:
    assert describe_actions(solve("X[B, D] * Y[D_X, F] -> Z[B, F]", {"X": 4}, sizes)[0]) == kinds


def test_two_reduce_scatters_beat_an_all_reduce_and_a_slice() -> None:
    """XLA's partitioner moves more here: an AllReduce over both axes, then a slice."""
    best = solve("A[I, J_XY] * B[J_XY, K] -> C[I_X, K_Y]", {"X": 4, "Y": 2}, {"I": 64, "J": 64, "K": 64})[0]
    all_reduce = 2 * 64 * 64 * (1 - 1 / 8)
    assert best.cost[0] < all_reduce / 2
    assert not any("all_reduce" in action for action in describe_actions(best))


def test_free_operands_start_in_the_cheapest_sharding() -> None:
    best = solve(
        "A[I, J_X] * B[J, K_X] -> C[I_X, K]", {"X": 4}, {"I": 64, "J": 64, "K": 64}, free=("A", "B")
    )[0]  # fmt: skip
    assert best.cost[0] == 0
    assert best.starts["A"] == Spec.of("IJ", {"I": ("X",)})


def test_chains_are_tried_in_every_order() -> None:
    """A vector times two matrices from the left costs far less than the matrices first, and the other way round."""
    sizes = {"I": 4, "J": 64, "K": 64, "L": 64}
    best = solve("A[I, J] * B[J, K] * C[K, L] -> D[I, L]", {"X": 2}, sizes)[0]
    products = [a for a in best.actions if isinstance(a, ProductStep)]
    assert [p.operands for p in products] == [("A", "B"), ("A*B", "C")]
    back = solve("A[I, J] * B[J, K] * C[K, L] -> D[I, L]", {"X": 2}, {**sizes, "I": 64, "L": 4})[0]
    assert [p.operands for p in back.actions if isinstance(p, ProductStep)] == [("B", "C"), ("A", "B*C")]


def test_no_program_up_to_a_length_is_cheaper() -> None:
    """Brute force over all sequences of up to three collectives around one product finds nothing cheaper."""
    mesh, sizes = {"X": 2, "Y": 4}, {"I": 16, "J": 8, "K": 32}
    text = "A[I_X, J_Y] * B[J, K_X] -> C[I_Y, K_X]"
    best = solve(text, mesh, sizes)[0].cost
    assert best <= brute_force(text, mesh, sizes, length=2)


def brute_force(text: str, mesh: dict[str, int], sizes: dict[str, int], *, length: int) -> CostVector:
    """The least (bytes, FLOPs) over up to `length` collectives on each operand and on the result."""
    expression = parse_expression(text)
    assert expression.result is not None
    values = SymbolValues({**mesh, **sizes})

    def reach(start: Spec) -> dict[Spec, float]:
        costs = {start: 0.0}
        for _ in range(length):
            for spec, cost in list(costs.items()):
                for collective in collectives_from(spec, mesh):
                    total = cost + collective.received_elements.evaluate(values)
                    if total < costs.get(collective.after, float("inf")):
                        costs[collective.after] = total
        return costs

    left, right = (reach(operand.spec) for operand in expression.operands)
    cheapest = (float("inf"), float("inf"), 0.0)
    for (a, cost_a), (b, cost_b) in itertools.product(left.items(), right.items()):
        shared = a.axes_of("J") == b.axes_of("J")
        clash = (set(a.axes_of("I")) & set(b.axes_of("K"))) | (set(a.axes_of("I")) & set(b.axes_of("J")))
        clash |= set(b.axes_of("K")) & set(a.axes_of("J"))
        if shared and not clash:
            natural = Spec.of("IK", {"I": a.axes_of("I"), "K": b.axes_of("K")}, a.axes_of("J"))
            end = reach(natural).get(expression.result.spec)
            if end is not None:
                flops = 2.0
                for dim, spec in (("I", a), ("J", a), ("K", b)):
                    flops *= Spec.of((dim,), {dim: spec.axes_of(dim)}).local_elements().evaluate(values)
                cheapest = min(cheapest, (cost_a + cost_b + end, flops, 0.0))
    return cheapest


def test_alternatives_differ_beyond_the_names_of_equal_axes() -> None:
    strategies = solve("A[I, J] * B[J, K] -> C[I, K]", {"X": 2, "Y": 2}, {"I": 64, "J": 64, "K": 64}, free=("A", "B"))
    signatures = [
        tuple(sorted(action.translate(str.maketrans("XY", "XX")) for action in describe_actions(s))) for s in strategies
    ]
    assert len(set(signatures)) == len(signatures)
    assert [s.cost for s in strategies] == sorted(s.cost for s in strategies)


def test_operands_that_share_no_dim_make_an_outer_product() -> None:
    best = solve("A[I] * B[J] * C[K_X] -> D[I, J, K]", {"X": 4}, {"I": 8, "J": 4, "K": 8})[0]
    assert best.result == Spec.of("IJK")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        # a partial sum is not requested: scattered it is 32 of 64 elements; gathered operands are more
        ("A[I, J_X] * B[J_X, K]", 32),
        ("A[I, J_X] * B[J_X, K]{U_Y}", 32),  # Y has one device: nothing moves over it
        ("A[I]{U_X} * B[J]", 4),
        ("A[I]{U_X} * B[J]{U_Y}", 4),
        ("A[I, J]{U_XY}", 32),
        ("A[J_X] * B[J_X]", 1),  # no dim to scatter: an AllReduce of one number
    ],
)
def test_without_a_result_spec_no_partial_sum_remains(text: str, num_bytes: float) -> None:
    strategies = solve(text, {"X": 2, "Y": 1}, {"I": 8, "J": 8, "K": 8})
    assert strategies[0].cost[0] == num_bytes
    assert all(strategy.result.partial == () for strategy in strategies)
    assert all(last_sharding(strategy).partial == () for strategy in strategies)


def last_sharding(strategy: ProductStrategy) -> Spec:
    last = strategy.actions[-1]
    return last.collective.after if isinstance(last, ProductCollective) else last.result_spec


def test_a_sum_over_a_single_operand_comes_before_its_product() -> None:
    best = solve("A[I, J_X] * B[K, L] -> C[I, L]", {"X": 2}, {"I": 8, "J": 8, "K": 4, "L": 2})[0]
    assert describe_actions(best) == ["A[I, J_X]", "all_reduce A.sum", "B[K, L]", "A.sum[I] * B.sum[L]"]
    assert best.cost == (2 * 8 / 2, 8 * 8 / 2 + 4 * 2 + 8 * 2, 1.0)


def test_a_dim_is_summed_when_its_last_operand_is_joined() -> None:
    """J of A, B and C: one multiplication for each of I J K, then one and one addition."""
    best = solve("A[I, J] * B[J, K] * C[J] -> D[I, K]", {"X": 1}, {"I": 8, "J": 8, "K": 8})[0]
    assert best.cost[1] == 8 * 8 + 2 * 8 * 8 * 8
    assert solve("A[I] * B[I] * C[I] -> D[I]", {"X": 1}, {"I": 8})[0].cost[1] == 2 * 8


def test_a_sharding_that_no_size_allows_is_refused() -> None:
    with pytest.raises(ShardingError, match="no way found"):
        solve("A[I, J] * B[J, K] -> C[I_X, K]", {"X": 4}, {"I": 6, "J": 4, "K": 4})
