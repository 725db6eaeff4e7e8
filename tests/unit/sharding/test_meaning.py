"""The meaning of a product's text: its einsum, and remarks about it."""

from __future__ import annotations

import doctest

import pytest

from shardwise.sharding import contraction, notation
from shardwise.sharding.notation import assign_letters, einsum_equation, explain_sums, parse_expression, result_dims
from shardwise.values.errors import InputError


@pytest.mark.parametrize(
    ("text", "subscripts"),
    [
        ("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", "ij,jk->ik"),
        ("A[I, J]{U_X} * B[J, K]", "ij,jk->ik"),
        ("Q[B, T, H] * K[B, S, H] * V[B, S, H] -> O[B, T, H]", "bth,bsh,bsh->bth"),
        ("In[B, D] * W1[D, F] * W2[F, D] -> Out[B, D]", "bd,df,fd->bd"),
        ("In[B, D] * W1[D, F] * W2[F, D'] -> Out[B, D']", "bd,df,fD->bD"),
        ("A[I, J] * B[K, L] -> C[I, L]", "ij,kl->il"),
        ("A[I, J] * B[J, K] * C[K, J]", "ij,jk,kj->i"),
        ("A[I, J] -> B[J]", "ij->j"),
    ],
)
def test_an_expression_equals_the_einsum_of_its_text(text: str, subscripts: str) -> None:
    assert einsum_equation(parse_expression(text)) == subscripts


def test_a_dim_of_the_result_that_no_operand_has_is_refused() -> None:
    with pytest.raises(InputError, match="the result's dim L is in no operand"):
        result_dims(parse_expression("A[I] * B[I] -> C[L]"))


def test_an_einsum_has_no_more_dims_than_letters() -> None:
    assert len(assign_letters(f"D{i}" for i in range(52))) == 52
    with pytest.raises(InputError, match="more than 52 dims"):
        assign_letters(f"D{i}" for i in range(53))


def test_a_sum_over_a_single_operand_is_remarked() -> None:
    assert explain_sums(parse_expression("A[I, J] * B[K, L, M] -> C[I, L]")) == (
        "A is summed over J by itself, before any product: neither another operand nor C has J",
        "B is summed over K and M by itself, before any product: neither another operand nor C has K and M",
    )


def test_a_dim_of_three_operands_is_a_single_index_and_is_remarked() -> None:
    assert explain_sums(parse_expression("In[B, D] * W1[D, F] * W2[F, D] -> Out[B, D]")) == (
        "D: one index of In, W1, W2 and Out, not summed (as in einsum); a dim that a chain sums and has again behind the sum "
        "needs two names, such as D and D'",
    )
    assert explain_sums(parse_expression("A[I, J] * B[J, K] * C[J, K, L]")) == (
        "J: one index of A, B and C, summed once, over the product of all of these (as in einsum)",
    )


@pytest.mark.parametrize(
    "text",
    [
        "A[I, J] * B[J, K] -> C[I, K]",
        "A[B, I, J] * D[B, J, K] -> C[B, I, K]",
        "A[I, J] -> A[I]",
        "In[B, D] * W1[D, F] * W2[F, D'] -> Out[B, D']",
    ],
)
def test_ordinary_products_have_no_remarks(text: str) -> None:
    assert explain_sums(parse_expression(text)) == ()


@pytest.mark.parametrize("module", [notation, contraction])
def test_the_examples_in_the_docstrings_run(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
