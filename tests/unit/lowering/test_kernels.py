"""Closed forms of kernels and stages where the books print numbers."""

from __future__ import annotations

import math

import pytest

from shardwise.book_formulas.rules import (
    KernelCost,
    Staging,
    TransferStage,
    attended_pairs,
    batched_matmul_cost,
    critical_size,
    matmul_cost,
    matmul_critical_batch,
    transfer_s,
)
from shardwise.values.errors import InputError


def test_an_offloaded_matrix_product_equals_the_books() -> None:
    """S0, part 2, question 6: int8 [128Ki, 128Ki] on the hosts of 16 v5e, gathered to one chip and multiplied by 8 rows.

    66 ms over PCIe, 167 ms over two links into the corner, 19 ms from HBM, 1.3 ms of FLOPs; the printed 16 GB are 17.2.
    """
    staging = Staging(
        stages=(
            TransferStage(name="pcie", amount=8e9, rate=15e9, num_links=8),
            TransferStage(name="ici", amount=15e9, rate=45e9, num_links=2),
            TransferStage(name="memory", amount=16e9, rate=810e9),
            TransferStage(name="compute", amount=2 * 8 * 2**34, rate=197e12),
        )
    )
    assert [stage.seconds for stage in staging.stages] == pytest.approx(
        [66.7e-3, 166.7e-3, 19.75e-3, 1.395e-3], rel=1e-3
    )
    assert staging.binding.name == "ici"
    assert staging.overlapped_s == pytest.approx(166.7e-3, rel=1e-3)
    assert staging.sequential_s == pytest.approx(254.5e-3, rel=1e-3)
    assert staging.stages[0].seconds == transfer_s(8e9, 15e9, 8)


def test_reading_the_parameters_of_a_large_model_equals_the_books() -> None:
    """S0, part 2, question 1: 200B parameters in bf16 on 32 v4 take about 10 ms to read."""
    assert TransferStage(name="memory", amount=2 * 200e9, rate=1.23e12, num_links=32).seconds == pytest.approx(
        10.2e-3, rel=5e-3
    )


@pytest.mark.parametrize("widths", [(math.inf, math.inf), (8192, 28672), (1024, 512), (300, 300)])
def test_the_critical_size_equals_the_closed_form(widths: tuple[float, float]) -> None:
    d_in, d_out = (min(width, 1e12) for width in widths)
    size = critical_size(lambda batch: matmul_cost(batch, d_in, d_out), 197e12, 810e9)
    assert size == pytest.approx(matmul_critical_batch(197e12, 810e9, *widths), rel=1e-6)


@pytest.mark.parametrize("side", ["all", "two"])
def test_critical_sizes_of_a_cube_and_of_a_square_weight(side: str) -> None:
    """An A100 of 312 TFLOP/s and 1.6 TB/s: 2·n³ FLOPs for 6·n² bytes, 585; a square weight of a batch of 512 needs 819."""
    if side == "all":
        assert critical_size(lambda n: matmul_cost(n, n, n), 312e12, 1.6e12) == pytest.approx(585, rel=1e-12)
        assert critical_size(lambda n: matmul_cost(n, n, n), 989e12, 3.35e12) == pytest.approx(
            3 * 989 / 3.35, rel=1e-12
        )
        return
    # B·D² of FLOPs, 2·B·D + D² elements: B·D·W = C·(2·B + D)
    size = critical_size(lambda n: matmul_cost(512, n, n), 312e12, 1.6e12)
    assert size == pytest.approx(2 * 512 * 195 / (512 - 195), rel=1e-9)
    cost = matmul_cost(512, size, size)
    assert cost.flops / 312e12 == pytest.approx(cost.moved_bytes / 1.6e12, rel=1e-9)


def test_the_critical_size_of_a_batch_of_cubes() -> None:
    """n products of [n, n] · [n, n]: FLOPs of the fourth power, bytes of the third."""
    cost = lambda n: batched_matmul_cost(n, n, n, n)  # noqa: E731
    assert critical_size(cost, 312e12, 1.6e12) == pytest.approx(585, rel=1e-9)


def test_a_cost_that_is_not_a_polynomial_is_refused() -> None:
    def cost(size: float) -> KernelCost:
        return KernelCost(flops=2.0**size, read_bytes=size, written_bytes=0.0)

    with pytest.raises(
        InputError, match="size: FLOPs and bytes are required to be polynomials of it, of degree 6 at most"
    ):
        critical_size(cost, 1.0, 1.0)


def test_a_batch_of_products_has_the_intensity_of_a_single_product() -> None:
    """S3, A.1.3: FLOPs and bytes both grow with the number of products."""
    single, batched = (batched_matmul_cost(count, 64, 512, 1024) for count in (1, 100))
    assert batched.flops == 100 * single.flops
    assert batched.intensity == pytest.approx(single.intensity)
    assert single == matmul_cost(64, 512, 1024)


def test_pairs_under_a_causal_mask_equal_a_count() -> None:
    """S3, A.3: T(T + 1)/2."""
    for queries, keys in ((1, 7), (7, 7), (3, 7)):
        num_pairs = sum(keys - queries + i + 1 for i in range(queries))
        assert attended_pairs(queries, keys, causal=True) == num_pairs
        assert attended_pairs(queries, keys) == queries * keys


@pytest.mark.parametrize(
    ("flops", "moved", "root"),
    [
        (lambda x: x, lambda x: 5.0, 5.0),
        (lambda x: x, lambda x: x + 1, math.inf),
        (lambda x: x * x, lambda x: 3 * x, 3.0),
        (lambda x: 5 * x, lambda x: x, 0.0),  # at every size
        (lambda x: x**3, lambda x: 8.0, 2.0),
        (lambda x: x**3 + 11 * x, lambda x: 6 * x * x + 6, 1.0),  # above at 1, below at 2, above at 3
        (lambda x: x**6, lambda x: 3 * x**5, 3.0),
        (lambda x: 0.1 * x**6, lambda x: 0.3 * x**5 + 1e-9 * x, 3.0),
        (lambda x: x * x, lambda x: 2 * x + 3, 3.0),
        (lambda x: 10 * x - x * x, lambda x: 16.0, 2.0),
        (lambda x: 2 * x - x * x, lambda x: 16.0, math.inf),
        (lambda x: 1.1 * x / 3.0, lambda x: 1.2 * x / 3.0 + 0.1, math.inf),
    ],
)
def test_critical_sizes_are_roots_of_polynomials(flops: object, moved: object, root: float) -> None:
    assert callable(flops)
    assert callable(moved)

    def cost(x: float) -> KernelCost:
        return KernelCost(flops=flops(x), read_bytes=moved(x), written_bytes=0.0)

    assert critical_size(cost, 1.0, 1.0) == pytest.approx(root)
