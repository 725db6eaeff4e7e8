"""Expressions as they are sharded: the names that results are given."""

from __future__ import annotations

from shardwise.derive.expression import shard_expression
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.notation import parse_expression


def test_a_result_without_a_name_has_one_that_no_operand_has() -> None:
    mesh, sizes = Mesh.of({"X": 2}), {"I": 2, "J": 2, "K": 2, "L": 2, "M": 2}
    for text, name in {
        "A[I, J] * B[J, K]": "C", "C[I, J] * B[J, K]": "Z", "C[I, J] * Z[J, K]": "Out", "C[I, J] * Z[J, K] * Out[K, L]": "Result",
    }.items():  # fmt: skip
        assert shard_expression(parse_expression(text), mesh, sizes).result_name == name
