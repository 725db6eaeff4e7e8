"""Expressions as they are sharded: the names that results are given."""

from __future__ import annotations

import pytest

from shardwise.derive.sharded_einsum import shard_expression
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Mesh
from shardwise.values.errors import InputError


def test_a_result_without_a_name_has_one_that_no_operand_has() -> None:
    mesh, sizes = Mesh.of({"X": 2}), {"I": 2, "J": 2, "K": 2, "L": 2, "M": 2}
    for text, name in {
        "A[I, J] * B[J, K]": "C", "C[I, J] * B[J, K]": "Z", "C[I, J] * Z[J, K]": "Out", "C[I, J] * Z[J, K] * Out[K, L]": "Result",
    }.items():  # fmt: skip
        assert shard_expression(parse_expression(text), mesh, sizes).result_name == name


def test_a_dim_has_one_size_wherever_it_is_given() -> None:
    mesh = Mesh.of({"X": 2})
    made = shard_expression(parse_expression("A[I_X = 4, J = 6] * B[J = 6, K = 2]"), mesh, {})
    assert {dim: made.sizes[dim] for dim in "IJK"} == {"I": 4, "J": 6, "K": 2}
    assert shard_expression(parse_expression("A[I_X, J] * B[J, K = 2]"), mesh, {"I": 4, "J": 6, "K": 2}).sizes["K"] == 2
    with pytest.raises(InputError, match="sizes: J is 6 and 8; one size for each dim is required"):
        shard_expression(parse_expression("A[I_X = 4, J = 6] * B[J = 8, K = 2]"), mesh, {})
    with pytest.raises(InputError, match="sizes: K is 3 and 2"):
        shard_expression(parse_expression("A[I_X = 4, J = 6] * B[J = 6, K = 2]"), mesh, {"K": 3})
