"""Products of tensors with named dims as matrix products, against einsum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from train.formulas import random

from shardwise.run.kernels.matmul import Einsum, Matmul, as_matmul

SIZES = {"B": 2, "T": 5, "D": 6, "F": 7, "K": 2, "G": 3, "H": 4, "E": 8}
FITTING = {
    "a projection": ("BTD", "FD", "BTF"),
    "to heads": ("BTD", "KGHD", "BTKGH"),
    "from heads": ("BTKGH", "KGHD", "BTD"),
    "its gradient by its input": ("BTF", "FD", "BTD"),
    "from the other side": ("FD", "BTF", "BTD"),
    "the gradient of a weight": ("BTF", "BTD", "FD"),
    "of a weight of heads": ("BTKGH", "BTD", "KGHD"),
    "of a weight that is turned": ("BTD", "BTF", "FD"),
    "to one number for each token": ("BTD", "D", "BT"),
    "of the vector": ("BT", "BTD", "D"),
    "scores of a router": ("BTD", "DE", "BTE"),
}
OTHERS = {
    "a dim of all three": ("BTKH", "BKH", "BTK"),
    "nothing is summed": ("BT", "D", "BTD"),
    "dims between others": ("BTKH", "KDH", "BTHD"),
    "tokens that are not first": ("FD", "BTD", "FBT"),
    "tokens apart": ("BDT", "FD", "BFT"),
}


def operands(left_dims: str, right_dims: str) -> tuple[Tensor, Tensor]:
    first, second = (
        random(*(SIZES[dim] for dim in dims), seed=seed) for seed, dims in enumerate((left_dims, right_dims))
    )
    return first, second


def matmul_of(left_dims: str, right_dims: str, result_dims: str) -> Matmul | None:
    return as_matmul(
        tuple(left_dims), tuple(right_dims), tuple(result_dims), {d: n for d, n in SIZES.items() if d not in "BT"}
    )


@pytest.mark.parametrize("case", FITTING)
def test_products_equal_einsum(case: str) -> None:
    """Made anew, written to where it rests, or added to what is there; also of views that lie otherwise in memory."""
    left_dims, right_dims, result_dims = FITTING[case]
    product = matmul_of(left_dims, right_dims, result_dims)
    assert product is not None
    for turned in (False, True):
        first, second = operands(left_dims, right_dims)
        if turned:
            first, second = (x.transpose(0, -1).contiguous().transpose(0, -1) for x in (first, second))
        expected = torch.einsum(f"{left_dims},{right_dims}->{result_dims}", first, second)
        torch.testing.assert_close(product(first, second), expected)
        torch.testing.assert_close(
            Einsum((tuple(left_dims), tuple(right_dims)), tuple(result_dims))(first, second), expected
        )
        for add in (False, True):
            target = torch.ones_like(expected) if add else torch.full_like(expected, torch.nan)
            product.into(target, first, second, add=add)
            torch.testing.assert_close(target, expected + add)


@pytest.mark.parametrize("case", OTHERS)
def test_other_contractions_are_no_matrix_products(case: str) -> None:
    assert matmul_of(*OTHERS[case]) is None


def test_a_product_is_of_as_many_tokens_as_there_are() -> None:
    product = matmul_of(*FITTING["to heads"])
    assert product is not None
    for tokens in ((0, 5), (1, 1), (3, 9)):
        assert product(random(*tokens, SIZES["D"]), random(2, 3, 4, SIZES["D"])).shape == (*tokens, 2, 3, 4)
