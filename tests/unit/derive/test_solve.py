"""Products on cut axes: a strategy may use a part of an axis, as XLA does."""

from __future__ import annotations

import pytest

from shardwise.derive.sharded_einsum import (
    MAX_REFINEMENTS,
    ShardedExpression,
    factor_names,
    refine_mesh,
    shard_expression,
    solve_expression,
)
from shardwise.sharding.collectives import CollectiveKind, received_elements
from shardwise.sharding.matmul_search.cheapest_paths import CostVector, PriceCollective
from shardwise.sharding.matmul_search.cheapest_strategies import PriceProduct
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Axes, Mesh
from shardwise.values.symbolic import SymbolValues, constant


def shard(text: str, mesh: dict[str, int], sizes: dict[str, int]) -> ShardedExpression:
    return shard_expression(parse_expression(text), Mesh.of(mesh), sizes)


def by_bytes(product: ShardedExpression) -> tuple[PriceCollective, PriceProduct]:
    values = SymbolValues(dict(product.mesh.axes))

    def collective(kind: CollectiveKind, axes: Axes, payload: float) -> CostVector:
        return float(received_elements(kind, axes, constant(payload)).evaluate(values)), 0.0

    return collective, lambda flops: (0.0, flops)


def test_an_axis_is_cut_into_prime_factors() -> None:
    (cut,) = refine_mesh(
        shard("A[I_X, J_Y]{U_Z} * B[J_Y, K] -> C[I_X, K]", {"X": 4, "Y": 2, "Z": 1}, {"I": 8, "J": 8, "K": 8})
    )
    assert cut.mesh.axes == (("X1", 2), ("X2", 2), ("Y", 2), ("Z", 1))
    assert str(cut.operands[0]) == "[I_{X1,X2}, J_Y]{U_Z}"
    assert factor_names("X", 1) == ("X",)


@pytest.mark.parametrize("mesh", [{"X": 2, "Y": 3}, {"X": 2, "Y": 2, "Z": 2, "W": 8}])
def test_axes_that_are_not_cut(mesh: dict[str, int]) -> None:
    sizes = dict.fromkeys("IJK", 192)
    assert list(refine_mesh(shard("A[I_X, J] * B[J, K] -> C[I_X, K]", mesh, sizes))) == []


@pytest.mark.parametrize(
    ("mesh", "splits"),
    [
        ({"X": 6}, [(2, 3), (3, 2)]),
        ({"X": 2, "Y": 8, "Z": 2}, [(2, 2, 4, 2), (2, 4, 2, 2)]),
        ({"X": 8, "Y": 4}, [(2, 2, 2, 4), (2, 4, 2, 2), (4, 2, 2, 2)]),
        ({"X": 2**10}, [(2**power, 2 ** (10 - power)) for power in range(1, 10)]),  # 84 ways into four
    ],
)
def test_an_axis_of_many_primes_is_cut_into_fewer_factors(mesh: dict[str, int], splits: list[tuple[int, ...]]) -> None:
    sizes = dict.fromkeys("IJK", 2**10 * 3)
    cuts = refine_mesh(shard("A[I_X, J] * B[J, K] -> C[I_X, K]", mesh, sizes))
    assert [tuple(size for _, size in cut.mesh.axes) for cut in cuts] == splits
    assert len(splits) <= MAX_REFINEMENTS


def flops_then_bytes(product: ShardedExpression) -> tuple[PriceCollective, PriceProduct]:
    collective, _ = by_bytes(product)
    return lambda *called: (0.0, collective(*called)[0], 1.0), lambda flops: (flops, 0.0, 0.0)


def test_a_part_of_an_axis_saves_bytes_at_no_more_flops() -> None:
    """A permute onto half of Z, where the mesh has five prime factors and both programs do the same products: in fp32 1,408
    bytes and not 1,416."""
    product = shard(
        "A[I_ZX, J_Y] * B[K_Z, J_YX] -> R[I_Z, K_Y]", {"X": 2, "Y": 2, "Z": 8}, {"I": 256, "J": 4, "K": 32}
    )  # fmt: skip
    solution = solve_expression(product, flops_then_bytes)
    flops, elements, _ = solution.strategies[0].cost
    assert (flops, 4 * elements) == (2048, 1408)
    assert len(solution.expression.mesh.axes) == 4


def test_a_part_of_an_axis_saves_bytes() -> None:
    """XLA's way through this product moves 96 elements, by an AllToAll over half of X."""
    product = shard(
        "A[I, J, K] * B[I_Y, J_X] -> C[I_X, J_Y, K]", {"X": 4, "Y": 2}, {"I": 32, "J": 16, "K": 24}
    )  # fmt: skip
    solution = solve_expression(product, by_bytes)
    assert solution.expression.mesh.axes == (("X1", 2), ("X2", 2), ("Y", 2))
    assert solution.strategies[0].cost[0] <= 96


@pytest.mark.parametrize("text", ["A[I_X, J] * B[J, K] -> C[I_X, K]", "A[I_X, J] -> A[I, J]"])
def test_the_mesh_stays_whole_where_parts_save_nothing(text: str) -> None:
    product = shard(text, {"X": 4}, {"I": 8, "J": 8, "K": 8})
    assert solve_expression(product, by_bytes).expression is product


def test_two_levels_beat_one_reduction() -> None:
    """Half of X splits the sum and half the rows: 88 elements instead of the 96 of an AllReduce over X."""
    product = shard("A[I, J_X] * B[J_X, K] -> C[I, K]", {"X": 4}, {"I": 8, "J": 8, "K": 8})
    assert solve_expression(product, by_bytes).strategies[0].cost[0] == 88
