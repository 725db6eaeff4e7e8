"""Costs of operations: FLOPs of products by hand."""

from __future__ import annotations

import pytest

from shardwise.model.operations import Contract
from shardwise.sharding.notation import parse_tensor
from shardwise.values.symbolic import SymbolValues


@pytest.mark.parametrize(
    ("operands", "result", "flops"),
    [
        # a multiplication and an addition for each of I·J·K
        (("A[I, J]", "B[J, K]"), "C[I, K]", 2 * 4 * 6 * 10),
        (("A[I, J]", "B[I, J]"), "C[I]", 2 * 4 * 6),
        # nothing is summed: a multiplication for each element of the result
        (("A[I, J]", "B[I, J]"), "C[I, J]", 4 * 6),
        (("A[I]", "B[J]"), "C[I, J]", 4 * 6),
        (("A[I, J]", "B[J]"), "C[I, J]", 4 * 6),
        # an addition for each element that is summed; nothing for another order of dims
        (("A[I, J]",), "C[I]", 4 * 6),
        (("A[I, J]",), "C[J, I]", 0),
        # of a device its part: X = 2 and Y = 3
        (("A[I_X, J_Y]", "B[J_Y, K]"), "C[I_X, K]", 2 * 2 * 2 * 10),
        (("A[I_X, J_Y]", "B[I_X, J_Y]"), "C[I_X, J_Y]", 2 * 2),
    ],
)
def test_flops_of_products_by_hand(operands: tuple[str, ...], result: str, flops: int) -> None:
    tensors = [parse_tensor(text) for text in (*operands, result)]
    *inputs, output = (tensor.name for tensor in tensors)
    dims = {tensor.name: tensor.spec.dims for tensor in tensors}
    operation = Contract(tuple(inputs), (output,))
    placed = operation.propagate_sharding([tensor.spec for tensor in tensors[:-1]], dims, lambda name: False)
    assert operation.flops(placed).evaluate(SymbolValues({"I": 4, "J": 6, "K": 10, "X": 2, "Y": 3})) == flops
