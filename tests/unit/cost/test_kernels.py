"""Closed forms of kernels and stages where the books print numbers."""

from __future__ import annotations

import math

import pytest

from shardwise.cost.rules import (
    KernelCost,
    Stage,
    Staging,
    attended_pairs,
    batched_matmul_cost,
    critical_size,
    matmul_cost,
    matmul_critical_batch,
    transfer_s,
)


def test_an_offloaded_matrix_times_a_vector() -> None:
    """S0, part 2, question 6: int8 [128Ki, 128Ki] on the hosts of 16 v5e, gathered to one chip and multiplied by 8 rows.

    66 ms over PCIe, 167 ms over two links into the corner, 19 ms from HBM, 1.3 ms of FLOPs; the printed 16 GB are 17.2.
    """
    staging = Staging(
        stages=(
            Stage(name="pcie", amount=8e9, rate=15e9, num_links=8),
            Stage(name="ici", amount=15e9, rate=45e9, num_links=2),
            Stage(name="memory", amount=16e9, rate=810e9),
            Stage(name="compute", amount=2 * 8 * 2**34, rate=197e12),
        )
    )
    assert [stage.seconds for stage in staging.stages] == pytest.approx(
        [66.7e-3, 166.7e-3, 19.75e-3, 1.395e-3], rel=1e-3
    )
    assert staging.binding.name == "ici"
    assert staging.overlapped_s == pytest.approx(166.7e-3, rel=1e-3)
    assert staging.sequential_s == pytest.approx(254.5e-3, rel=1e-3)
    assert staging.stages[0].seconds == transfer_s(8e9, 15e9, 8)


def test_parameters_of_a_large_model_from_memory() -> None:
    """S0, part 2, question 1: 200B parameters in bf16 on 32 v4 take about 10 ms to read."""
    assert Stage(name="memory", amount=2 * 200e9, rate=1.23e12, num_links=32).seconds == pytest.approx(
        10.2e-3, rel=5e-3
    )


@pytest.mark.parametrize("widths", [(math.inf, math.inf), (8192, 28672), (1024, 512), (300, 300)])
def test_the_critical_size_is_the_closed_form(widths: tuple[float, float]) -> None:
    d_in, d_out = (min(width, 1e12) for width in widths)
    found = critical_size(lambda batch: matmul_cost(batch, d_in, d_out), 197e12, 810e9)
    assert found == pytest.approx(matmul_critical_batch(197e12, 810e9, *widths), rel=1e-6)


def test_a_batch_of_products_has_the_intensity_of_one() -> None:
    """S3, A.1.3: FLOPs and bytes both grow with the number of products."""
    one, many = (batched_matmul_cost(count, 64, 512, 1024) for count in (1, 100))
    assert many.flops == 100 * one.flops
    assert many.intensity == pytest.approx(one.intensity)
    assert one == matmul_cost(64, 512, 1024)


def test_pairs_under_a_causal_mask() -> None:
    """S3, A.3: T(T + 1)/2."""
    for queries, keys in ((1, 7), (7, 7), (3, 7)):
        seen = sum(keys - queries + i + 1 for i in range(queries))
        assert attended_pairs(queries, keys, causal=True) == seen
        assert attended_pairs(queries, keys) == queries * keys


@pytest.mark.parametrize(
    ("flops", "moved", "root"),
    [
        (lambda x: x, lambda x: 5.0, 5.0),
        (lambda x: x, lambda x: x + 1, math.inf),
        (lambda x: x * x, lambda x: 3 * x, 3.0),
        (lambda x: x * x, lambda x: 2 * x + 3, 3.0),
        (lambda x: 10 * x - x * x, lambda x: 16.0, 2.0),
        (lambda x: 2 * x - x * x, lambda x: 16.0, math.inf),
        (lambda x: 1.1 * x / 3.0, lambda x: 1.2 * x / 3.0 + 0.1, math.inf),
    ],
)
def test_roots(flops: object, moved: object, root: float) -> None:
    assert callable(flops)
    assert callable(moved)

    def cost(x: float) -> KernelCost:
        return KernelCost(flops=flops(x), read_bytes=moved(x), written_bytes=0.0)

    assert critical_size(cost, 1.0, 1.0) == pytest.approx(root)
