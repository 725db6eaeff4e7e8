"""A simulated systolic array multiplies, in the cycles that the closed form says."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.book_formulas.rules import MatrixProduct, SystolicArray, padding_efficiency
from shardwise.verify.systolic_simulation import run_systolic


@pytest.mark.parametrize(
    ("rows", "depth", "width", "side"),
    [
        (1, 1, 1, 1),
        (8, 4, 4, 4),
        (2, 3, 3, 3),
        (5, 8, 8, 4),
        (3, 10, 7, 4),
        (9, 12, 5, 4),
        (4, 4, 12, 4),
        (8, 128, 128, 128),
    ],
)
def test_the_product_and_its_cycles(rows: int, depth: int, width: int, side: int) -> None:
    random = np.random.default_rng(rows * depth + width)
    activations, weights = random.standard_normal((rows, depth)), random.standard_normal((depth, width))
    run = run_systolic(activations, weights, side)
    np.testing.assert_allclose(run.product, activations @ weights, rtol=1e-12, atol=1e-12)
    tiles = -(-depth // side) * -(-width // side)
    array = SystolicArray(side=side)
    assert run.cycles == array.cycles(rows, tiles)
    assert run.busy == pytest.approx(array.busy(rows, tiles))


def test_eight_rows_take_eight_cycles_in_a_full_array() -> None:
    """S0, part 2: [8, 128] · [128, 128] every 8 cycles once the array is full."""
    array = SystolicArray(side=128)
    assert array.steady_cycles(8) == 8
    weights = np.eye(128)
    once, twice = (run_systolic(np.ones((rows, 128)), weights, 128).cycles for rows in (8, 16))
    assert twice - once == 8
    assert once == array.fill + 8 + array.drain == 128 + 8 + 254


def test_the_bubble_is_paid_once() -> None:
    """New rows and new weights follow without another bubble where a tile's rows outlast the loading of the next."""
    array = SystolicArray(side=16)
    assert array.cycles(64, 5) - array.cycles(64, 4) == 64
    assert array.cycles(4, 5) - array.cycles(4, 4) == 16  # too few rows to hide it
    assert array.busy(4096, 100) == pytest.approx(1, rel=1e-3)


def test_padding_counts_whole_tiles() -> None:
    product = MatrixProduct(rows=5, d_in=100, d_out=129, count=3)
    assert product.flops == 2 * 3 * 5 * 100 * 129
    padded = product.padded(128)
    assert (padded.rows, padded.d_in, padded.d_out, padded.count) == (8, 128, 256, 3)
    assert padding_efficiency([product, padded], 128) == pytest.approx(
        (product.flops + padded.flops) / (2 * padded.flops)
    )
