"""Sharded expressions: names of results and sizes of dims."""

from __future__ import annotations

import pytest

from shardwise.derive.sharded_einsum import shard_expression
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Mesh
from shardwise.values.errors import InputError


def test_an_unnamed_result_gets_a_name_that_no_operand_has() -> None:
    mesh, sizes = Mesh.of({"X": 2}), {"I": 2, "J": 2, "K": 2, "L": 2, "M": 2}
    for text, name in {
        "A[I, J] * B[J, K]": "C", "C[I, J] * B[J, K]": "Z", "C[I, J] * Z[J, K]": "Out", "C[I, J] * Z[J, K] * Out[K, L]": "Result",
    }.items():  # fmt: skip
        assert shard_expression(parse_expression(text), mesh, sizes).result_name == name


def test_sizes_of_a_dim_must_agree() -> None:
    mesh = Mesh.of({"X": 2})
    sharded = shard_expression(parse_expression("A[I_X = 4, J = 6] * B[J = 6, K = 2]"), mesh, {})
    assert {dim: sharded.sizes[dim] for dim in "IJK"} == {"I": 4, "J": 6, "K": 2}
    assert shard_expression(parse_expression("A[I_X, J] * B[J, K = 2]"), mesh, {"I": 4, "J": 6, "K": 2}).sizes["K"] == 2
    with pytest.raises(InputError, match="sizes: J is 6 and 8; one size for each dim is required"):
        shard_expression(parse_expression("A[I_X = 4, J = 6] * B[J = 8, K = 2]"), mesh, {})
    with pytest.raises(InputError, match="sizes: K is 3 and 2"):
        shard_expression(parse_expression("A[I_X = 4, J = 6] * B[J = 6, K = 2]"), mesh, {"K": 3})
