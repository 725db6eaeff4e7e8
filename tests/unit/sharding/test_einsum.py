"""S2's four cases of a sharded product, with their reasons."""

from __future__ import annotations

import pytest

from shardwise.sharding import contract, parse_expression, parse_tensor
from shardwise.values.errors import ShardingError


def products(text: str, fixed: str | None = None) -> tuple[str, str, str, tuple[str, ...]]:
    expression = parse_expression(text)
    left, right = expression.operands
    assert expression.result is not None
    contraction = contract(left.spec, right.spec, expression.result.spec.dims, fixed=fixed)
    return f"A{contraction.left}", f"B{contraction.right}", f"C{contraction.result}", contraction.reasons


@pytest.mark.parametrize(
    ("text", "left", "right", "result", "reasons"),
    [
        # 1: neither contracting dim is split
        ("A[I_X, J] * B[J, K_Y] -> C[I, K]", "A[I_X, J]", "B[J, K_Y]", "C[I_X, K_Y]", ()),
        # 2: one is
        (
            "A[I, J_X] * B[J, K] -> C[I, K]",
            "A[I, J]",
            "B[J, K]",
            "C[I, K]",
            ("case 2: X splits the contracted dim J of left only: gather left over X",),
        ),
        (
            "A[I, J] * B[J_Y, K] -> C[I, K]",
            "A[I, J]",
            "B[J, K]",
            "C[I, K]",
            ("case 2: Y splits the contracted dim J of right only: gather right over Y",),
        ),
        # 3: both are, over the same axis
        ("A[I, J_X] * B[J_X, K] -> C[I, K]", "A[I, J_X]", "B[J_X, K]", "C[I, K]{U_X}", ()),
        ("A[I_Y, J_X] * B[J_X, K_Z] -> C[I, K]", "A[I_Y, J_X]", "B[J_X, K_Z]", "C[I_Y, K_Z]{U_X}", ()),
        # 4: the same axis splits a dim of either
        (
            "A[B_X, D] * W[D_X, F] -> C[B, F]",
            "A[B_X, D]",
            "B[D, F]",
            "C[B_X, F]",
            ("case 4: X splits B of left and D of right: gather right over X",),
        ),
        (
            "A[I_X, J] * B[J, K_X] -> C[I, K]",
            "A[I_X, J]",
            "B[J, K]",
            "C[I_X, K]",
            ("case 4: X splits I of left and K of right: gather right over X",),
        ),
        # a dim of both that stays (a batch): the whole side takes its part without moving anything
        ("A[E_X, I] * B[E, J] -> C[E, I, J]", "A[E_X, I]", "B[E_X, J]", "C[E_X, I, J]", ()),
        # a partial sum passes through, the product is linear
        ("A[I, J]{U_Y} * B[J, K_X] -> C[I, K]", "A[I, J]{U_Y}", "B[J, K_X]", "C[I, K_X]{U_Y}", ()),
    ],
)
def test_products_follow_the_four_cases(
    text: str, left: str, right: str, result: str, reasons: tuple[str, ...]
) -> None:
    assert products(text) == (left, right, result, reasons)


def test_a_fixed_operand_stays() -> None:
    """ZeRO gathers the weight (S2, case 4); a weight that may not move makes the activation move."""
    text = "A[B_X, D] * W[D, F_X] -> C[B, F]"
    assert products(text, "right")[:3] == ("A[B, D]", "B[D, F_X]", "C[B, F_X]")
    assert products(text, "left")[:3] == ("A[B_X, D]", "B[D, F]", "C[B_X, F]")
    with pytest.raises(ShardingError, match="right is fixed but its contracted dim D is split over X"):
        products("A[B, D] * W[D_X, F] -> C[B, F]", "right")


def test_a_partial_operand_is_reduced_where_the_other_is_split() -> None:
    left, right, result, reasons = products("A[I, J]{U_X} * B[J, K_X] -> C[I, K]")
    assert (left, right, result) == ("A[I, J]", "B[J, K_X]", "C[I, K_X]")
    assert reasons == ("left is a partial sum over X, which splits K of the other operand: reduce it",)


def test_a_result_has_only_dims_of_the_operands() -> None:
    with pytest.raises(ShardingError, match="the result's dim L is in neither operand"):
        contract(parse_tensor("A[I, J]").spec, parse_tensor("B[J, K]").spec, ("I", "L"))


def test_of_two_partial_sums_over_an_axis_the_right_one_is_reduced() -> None:
    left, right, result, reasons = products("A[I, J]{U_X} * B[J, K]{U_X} -> C[I, K]")
    assert (left, right, result) == ("A[I, J]{U_X}", "B[J, K]", "C[I, K]{U_X}")
    assert reasons == ("both operands are partial sums over X: reduce right",)
