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


def operands(left: str, right: str) -> tuple[Tensor, Tensor]:
    first, second = (random(*(SIZES[dim] for dim in dims), seed=seed) for seed, dims in enumerate((left, right)))
    return first, second


def made(left: str, right: str, result: str) -> Matmul | None:
    return as_matmul(tuple(left), tuple(right), tuple(result), {d: n for d, n in SIZES.items() if d not in "BT"})


@pytest.mark.parametrize("case", FITTING)
def test_a_product_is_that_of_einsum(case: str) -> None:
    """Made anew, written to where it rests, or added to what is there; also of views that lie otherwise in memory."""
    left, right, result = FITTING[case]
    product = made(left, right, result)
    assert product is not None
    for turned in (False, True):
        first, second = operands(left, right)
        if turned:
            first, second = (x.transpose(0, -1).contiguous().transpose(0, -1) for x in (first, second))
        wanted = torch.einsum(f"{left},{right}->{result}", first, second)
        torch.testing.assert_close(product(first, second), wanted)
        torch.testing.assert_close(Einsum((tuple(left), tuple(right)), tuple(result))(first, second), wanted)
        for add in (False, True):
            target = torch.ones_like(wanted) if add else torch.full_like(wanted, torch.nan)
            product.into(target, first, second, add=add)
            torch.testing.assert_close(target, wanted + add)


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_matrix_product_is_none(case: str) -> None:
    assert made(*OTHERS[case]) is None


def test_a_product_is_of_as_many_tokens_as_there_are() -> None:
    product = made(*FITTING["to heads"])
    assert product is not None
    for tokens in ((0, 5), (1, 1), (3, 9)):
        assert product(random(*tokens, SIZES["D"]), random(2, 3, 4, SIZES["D"])).shape == (*tokens, 2, 3, 4)
