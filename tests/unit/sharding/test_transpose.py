"""Collectives as values, their traffic, and their transposes."""

from __future__ import annotations

import pytest

from shardwise.sharding import Collective, parse_tensor, reshard, transpose_collective, transpose_contraction
from shardwise.sharding.collectives import CollectiveKind
from shardwise.values.symbolic import SymbolValues

VALUES = SymbolValues({"I": 48, "J": 10, "X": 4, "Y": 3})


def single_collective(before: str, after: str) -> Collective:
    (collective,) = reshard(parse_tensor(before).spec, parse_tensor(after).spec)
    return collective


GATHER = single_collective("A[I_X, J]", "A[I, J]")
SCATTER = single_collective("A[I, J]{U_X}", "A[I_X, J]")
REDUCE = single_collective("A[I, J]{U_X}", "A[I, J]")
EXCHANGE = single_collective("A[I_X, J]", "A[I, J_X]")
SLICE = single_collective("A[I, J]", "A[I_X, J]")


@pytest.mark.parametrize(
    ("collective", "payload", "received"),
    [
        (GATHER, 480, 360),  # (n-1)/n of the gathered array
        (SCATTER, 480, 360),
        (REDUCE, 480, 720),  # twice that
        (single_collective("A[I_X, J]", "A[I, J_X]"), 120, 90),  # of the local shard
        (SLICE, 480, 0),
        (single_collective("A[I_XY, J]", "A[I_X, J]"), 120, 80),  # over Y only
    ],
)
def test_received_elements_of_each_kind(collective: Collective, payload: float, received: float) -> None:
    assert collective.payload_elements.evaluate(VALUES) == payload
    assert collective.received_elements.evaluate(VALUES) == pytest.approx(received, rel=1e-15)


def test_a_single_device_receives_nothing() -> None:
    values = SymbolValues({"I": 48, "J": 10, "X": 1})
    assert [c.received_elements.evaluate(values) for c in (GATHER, SCATTER, REDUCE, EXCHANGE)] == [0, 0, 0, 0]


def test_all_gather_and_reduce_scatter_are_transposes() -> None:
    assert transpose_collective(GATHER) == SCATTER
    assert transpose_collective(SCATTER) == GATHER
    assert GATHER.received_elements.evaluate(VALUES) == SCATTER.received_elements.evaluate(VALUES)


def test_transposes_of_other_collectives() -> None:
    assert transpose_collective(REDUCE) is None  # the gradient is replicated already
    assert transpose_collective(EXCHANGE) == single_collective("A[I, J_X]", "A[I_X, J]")
    gathered = transpose_collective(SLICE)
    assert gathered is not None
    assert (gathered.kind, gathered.before, gathered.after) == (CollectiveKind.ALL_GATHER, GATHER.before, GATHER.after)


@pytest.mark.parametrize("collective", [GATHER, SCATTER, EXCHANGE])
def test_transposing_twice_is_the_identity(collective: Collective) -> None:
    back = transpose_collective(collective)
    assert back is not None
    assert transpose_collective(back) == collective


def test_the_transposes_of_a_product() -> None:
    """C = A B has dA = dC B and dB = A dC."""
    assert transpose_contraction(("I", "J"), ("J", "K"), ("I", "K")) == {
        "left": (("I", "K"), ("J", "K"), ("I", "J")),
        "right": (("I", "J"), ("I", "K"), ("J", "K")),
    }


def test_a_collective_prints_as_the_books_write_it() -> None:
    assert str(GATHER) == "all_gather_{X} [I_X, J] -> [I, J]"
