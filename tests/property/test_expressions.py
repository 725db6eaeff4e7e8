"""A product's text means what `numpy.einsum` computes from it, however its operands lie, by every way to compute it.

The einsum is built here from the text alone: the dims between the brackets, without subscripts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardwise.derive.sharded_einsum import (
    ShardedExpression,
    derive_by_cases,
    shard_expression,
    solve_expression,
    strategy_program,
)
from shardwise.derive.sharded_program import ShardedProgram
from shardwise.price.product import price_product
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.sharding.collectives import CollectiveKind, received_elements
from shardwise.sharding.matmul_search.cheapest_paths import CostVector, PriceCollective
from shardwise.sharding.matmul_search.cheapest_strategies import PriceProduct
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Axes, Mesh
from shardwise.values.symbolic import SymbolValues, constant
from shardwise.verify.product_runs import run_product

MESHES: tuple[dict[str, int], ...] = ({"X": 2}, {"X": 3, "Y": 2}, {"X": 1, "Y": 2})
TENSOR = re.compile(r"[A-Za-z][A-Za-z0-9']*\[([^\]]*)\]")

# A chain as people write it, with X and Y as subscripts; what is left out is whole.
CHAINS = (
    # attention and what is around it: batch dims of all operands and the result
    "Q[B_X, T, H] * K[B_X, S, H] * V[B_X, S, H] -> O[B_X, T, H]",
    "Q[B_X, T, H] * K[B_X, S, H] * V[B_X, S, E] -> O[B_X, T, E]",
    "Q[B, T_X, H] * K[B, S_X, H] * V[B, S_X, E] -> O[B, T_X, E]",
    "Q[B_X, T, N_Y, H] * K[B_X, S, N_Y, H] * V[B_X, S, N_Y, H] -> O[B_X, T, N_Y, H]",
    "Q[B_X, T, N_Y, H] * K[B_X, S, N_Y, H] * V[B_X, S, N_Y, E] -> O[B_X, T, N_Y, E]",
    "Q[B, T, N_X, H] * K[B, S, N_X, H] -> P[B, T, S, N_X]",
    "P[B_X, N, T, S_Y] * V[B_X, S_Y, N, H] -> O[B_X, T, N, H]",
    "Q[B_X, T, H_Y] * K[B_X, S, H_Y] * V[B, S_X, E_Y] * W[E_Y, D] -> O[B_X, T, D]",
    "X[B_X, T, D] * Wq[D, H_Y] * Wk[D', H_Y] * Z[B_X, S, D'] -> P[B_X, T, S]",
    # the MLP with one name for D, which is then one index, and with two
    "In[B_X, D] * W1[D, F] * W2[F, D] -> Out[B_X, D]",
    "In[B_X, D_Y] * W1[D_X, F_Y] * W2[F_Y, D_X] -> Out[B_X, D_Y]",
    "In[B_X, D_Y] * W1[D_X, F_Y] * W2[F_Y, D'_X] -> Out[B_X, D'_Y]",
    # experts, adapters, gates
    "X[E_X, C, D] * W1[E_X, D, F_Y] * W2[E_X, F_Y, D'] -> Y[E_X, C, D']",
    "G[T_X, E] * X[T_X, D] * W[E_X, D, F] -> Y[T_X, F]",
    "X[T_X, D] * A[D, R_Y] * B[R_Y, F] -> Y[T_X, F]",
    "G[T, F_X] * U[T, F_X] * W[F_X, D] -> Y[T, D]",
    "G[T_X, F] * U[T, F_X] * S[F] -> Y[T_X, F]",
    # dims that three operands have, and the result has or has not
    "A[I, J_X] * B[J_X, K] * C[J_X, L] -> D[I, K, L]",
    "A[I_X, J] * B[J_X, K] * C[K, J] -> D[I]",
    "A[I_X, J] * B[I, K] * C[I, L_X] -> D[J, K, L]",
    "A[I_X, J] * B[I, K] * C[I, L_X] -> D[I, L]",
    "A[I] * B[I_X] * C[I] -> D[]",
    "A[I_X] * B[I_Y] * C[I] -> D[I]",
    "A[I, J] * B[J, K] * C[K, L] * D[L, J] -> E[I, J_X]",
    "A[I_X, J] * B[J_X, K] * C[K_X, I] -> D[I_X]",
    # sums over one operand alone, outer products, scalars
    "A[I, J] * B[K, L] -> C[I, L]",
    "A[I_X, J_Y] * B[K_X, L_Y] -> C[I, L]",
    "A[I, J_X] * B[J_X, K] * C[L_X] -> D[I, K]",
    "A[I, J_X] * B[L_X] -> D[]",
    "A[I_X] * B[J_X] -> C[J_X, I]",
    "A[] * B[I_X] * C[] -> D[I]",
    # one operand
    "A[I_X, J] -> B[J_X]",
    "A[I_X, J_Y] -> B[]",
    "A[I_X, J] -> A[J, I]",
    # partial sums
    "A[I]{U_X} * B[I, J_X] -> C[J]",
    "A[I, J]{U_X} * B[K, L_X]{U_Y} -> C[I, L_X]",
    "A[I, J]{U_X} -> B[I_X]",
    # no result: the dims that occur once
    "A[I_X, J] * B[J_X, K]",
    "Q[B_X, T, H] * K[B_X, S, H] * V[B_X, S, E]",
    "A[I, J] * B[J, K] * C[K_X, J]",
    "A[I, J_X]{U_Y} * B[J_X, K]",
    "A[I] * B[I]{U_X}",
)


def einsum_of_text(text: str) -> tuple[str, list[str]]:
    """The subscripts and the dims of the result: without `->` the dims that occur once."""
    before, _, after = text.partition("->")
    operands = [dims_of(match) for match in TENSOR.findall(before)]
    every = [dim for dims in operands for dim in dims]
    result = dims_of(TENSOR.findall(after)[0]) if after else [dim for dim in every if every.count(dim) == 1]
    letters = dict(zip(dict.fromkeys(every), "abcdefghijklmnopqrstuvwxyz", strict=False))
    written = ["".join(letters[dim] for dim in dims) for dims in (*operands, result)]
    return f"{','.join(written[:-1])}->{written[-1]}", result


def dims_of(inside: str) -> list[str]:
    return [re.sub(r"_.*", "", part.strip()) for part in inside.split(",") if part.strip()]


def sizes_of(text: str) -> dict[str, int]:
    """Sizes that every mesh here divides, not all of them alike."""
    dims = dict.fromkeys(dim for match in TENSOR.findall(text) for dim in dims_of(match))
    return {dim: 6 * (1 + index % 2) for index, dim in enumerate(dims)}


def by_bytes(sharded: ShardedExpression) -> tuple[PriceCollective, PriceProduct]:
    values = SymbolValues(dict(sharded.mesh.axes))

    @lru_cache
    def collective(kind: CollectiveKind, axes: Axes, payload: float) -> CostVector:
        return float(received_elements(kind, axes, constant(payload)).evaluate(values)), 0.0

    return collective, lambda flops: (0.0, flops)


def execute(
    sharded: ShardedExpression, program: ShardedProgram, wholes: list[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """The result that the devices hold together, every device's copy checked against the first one's."""
    devices = VirtualDevices(sharded.mesh, sharded.sizes)
    for name, whole in zip(sharded.names, wholes, strict=True):
        devices.scatter_array(name, sharded.operands[sharded.names.index(name)], whole)
    devices.run(program.program, program.steps)
    end = program.specs[sharded.result_name]
    assert not end.partial
    whole = devices.gather_array(sharded.result_name, end)
    for coordinate, shard in zip(devices.coordinates, devices.live_shards[sharded.result_name, end], strict=True):
        np.testing.assert_allclose(shard, devices.local_part(whole, end, coordinate), rtol=1e-9, atol=1e-9)
    return whole


def check(text: str, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Both programs give the einsum of the text, and the result's sharding is the one asked for."""
    sharded = shard_expression(parse_expression(text), Mesh.of(mesh), sizes)
    solution = solve_expression(sharded, by_bytes)
    subscripts, dims = einsum_of_text(text)
    rng = np.random.default_rng(0)
    wholes = [rng.standard_normal([sizes[dim] for dim in spec.dims]) for spec in sharded.operands]
    expected = np.einsum(subscripts, *wholes, optimize=True)
    programs = [(sharded, derive_by_cases(sharded))]
    programs += [
        (solution.expression, strategy_program(solution.expression, strategy)) for strategy in solution.strategies
    ]
    for on, program in programs:
        assert list(program.specs[on.result_name].dims) == dims
        assert on.goal is None or program.specs[on.result_name] == on.goal
        np.testing.assert_allclose(execute(on, program, wholes), expected, rtol=1e-9, atol=1e-9)
        assert run_product(on, program, "numpy").max_relative_error < 1e-12


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("text", CHAINS)
def test_a_chain_gives_the_einsum_of_its_text(text: str, mesh: dict[str, int]) -> None:
    check(text if len(mesh) > 1 else re.sub(r"_Y|\{U_Y\}", "", text), mesh, sizes_of(text))


@st.composite
def products(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A product of one to four operands over five dims: any dims shared by any of them, kept or summed, split anyhow."""
    mesh = dict(
        zip("XY", draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (2, 3), (3, 2), (1, 2), (3, 1)])), strict=False)
    )
    count = draw(st.integers(1, 4))
    operands = [draw(st.lists(st.sampled_from("BIJKL"), max_size=3, unique=True)) for _ in range(count)]
    operand_dims = list(dict.fromkeys(dim for dims in operands for dim in dims))
    texts = [tensor(draw, name, dims, mesh, partial=True) for name, dims in zip("PQRS", operands, strict=False)]
    text = " * ".join(texts)
    if draw(st.booleans()):
        kept = draw(st.lists(st.sampled_from(operand_dims), unique=True, max_size=4)) if operand_dims else []
        text += f" -> Out{tensor(draw, '', kept, mesh, partial=False)}"
    return text, mesh


def tensor(draw: st.DrawFn, name: str, dims: list[str], mesh: Mapping[str, int], *, partial: bool) -> str:
    places: dict[str, str] = {}
    for axis in draw(st.permutations(list(mesh))):
        place = draw(st.sampled_from([*dims, "", *(["{U}"] if partial else [])]))
        places[place] = places.get(place, "_") + axis
    summed = "{U" + places["{U}"] + "}" if "{U}" in places else ""
    return f"{name}[{', '.join(dim + places.get(dim, '') for dim in dims)}]{summed}"


@given(products())
def test_any_product_gives_the_einsum_of_its_text(case: tuple[str, dict[str, int]]) -> None:
    text, mesh = case
    check(text, mesh, dict.fromkeys("BIJKL", 4 if mesh == {"X": 2, "Y": 2} else 6))


def test_running_a_program_finds_a_misreading() -> None:
    """A program that sums the batch dim, as a chain multiplied pair by pair would, is held against the text."""
    text = "Q[B_X, T, H] * K[B_X, S, H] * V[B_X, S, E] -> O[B_X, T, E]"
    sharded = shard_expression(parse_expression(text), Mesh.of({"X": 2}), sizes_of(text))
    q, k, v = sharded.operands
    misread = replace(
        sharded, operands=(q.rename_dims({"B": "B'"}), k.rename_dims({"B": "B'"}), v), sizes={**sharded.sizes, "B'": 6}
    )
    assert run_product(misread, derive_by_cases(misread), "numpy").max_relative_error > 0.1
    assert run_product(sharded, derive_by_cases(sharded), "numpy").max_relative_error < 1e-12


@pytest.mark.parametrize(
    ("text", "sizes", "flops"),
    [
        # scores, then their product with the values
        ("Q[B, T, H] * K[B, S, H] * V[B, S, E] -> O[B, T, E]", {"B": 2, "T": 3, "S": 5, "H": 7, "E": 11},
         2 * 2 * 3 * 5 * (7 + 11)),
        # H is kept until V is joined: B T S H multiplications, then as many and as many additions
        ("Q[B, T, H] * K[B, S, H] * V[B, S, H] -> O[B, T, H]", {"B": 2, "T": 3, "S": 5, "H": 7}, (1 + 2) * 2 * 3 * 5 * 7),
        # J of A and K of B are added up alone, then I L multiplications
        ("A[I, J] * B[K, L] -> C[I, L]", {"I": 2, "J": 3, "K": 5, "L": 7}, 2 * 3 + 5 * 7 + 2 * 7),
        ("A[I] * B[I] * C[I] -> D[I]", {"I": 7}, 2 * 7),
        ("A[I] * B[I] * C[I] -> D[]", {"I": 7}, (1 + 2) * 7),
        ("A[I, J] -> B[J, I]", {"I": 7, "J": 3}, 0),
        ("A[I, J] -> B[J]", {"I": 7, "J": 3}, 21),
    ],
)  # fmt: skip
def test_flops_of_chains_by_hand(text: str, sizes: dict[str, int], flops: float) -> None:
    report = price_product(shard_expression(parse_expression(text), Mesh(()), sizes), None)
    assert report.by_cases.flops_per_device == flops
    assert report.best.flops_per_device <= flops


def test_the_cheapest_strategy_counts_the_flops_of_its_program() -> None:
    for text in CHAINS:
        sharded = shard_expression(parse_expression(text), Mesh.of({"X": 3, "Y": 2}), sizes_of(text))
        solution = solve_expression(sharded, by_bytes)
        report = price_product(sharded, None)
        assert solution.strategies[0].cost[1] == report.best.flops_per_device, text
