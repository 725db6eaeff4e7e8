"""Fronts and knees of serving curves, by hand; degrees and ladders of a search."""

from __future__ import annotations

import itertools

import pytest

from shardwise.search.serving.candidates import concurrency_ladder
from shardwise.search.serving.serving_plan import ServingPoint, find_knee, pareto_front
from shardwise.serve import ServingLayout


def point(tpot_s: float, tokens: float) -> ServingPoint:
    return ServingPoint(
        layout=ServingLayout(),
        concurrency=1.0,
        ttft_s=1.0,
        tpot_s=tpot_s,
        tokens_per_s_per_device=tokens,
        requests_per_s=1.0,
    )


def test_the_front_has_the_points_not_beaten_in_both_values() -> None:
    points = [point(0.01, 100), point(0.02, 90), point(0.02, 300), point(0.05, 300), point(0.04, 500), point(0.04, 100)]
    assert [(p.tpot_s, p.tokens_per_s_per_device) for p in pareto_front(points)] == [
        (0.01, 100),
        (0.02, 300),
        (0.04, 500),
    ]


def test_the_knee_is_farthest_above_the_line_between_the_ends() -> None:
    """The values 0, 80, 95, 100 over equal steps have scaled heights of 0, 0.8 - 1/3, 0.95 - 2/3 and 0 above the diagonal."""
    curve = [point(0.01 + 0.01 * step, tokens) for step, tokens in enumerate((0.0, 80.0, 95.0, 100.0))]
    assert find_knee(curve).tokens_per_s_per_device == 80.0
    assert find_knee(curve[:1]) == curve[0]


@pytest.mark.parametrize("largest", [1, 2, 7, 256, 1000])
def test_a_ladder_starts_at_a_single_request_and_ends_at_the_maximum(largest: int) -> None:
    ladder = concurrency_ladder(largest)
    assert (ladder[0], ladder[-1]) == (1.0, float(largest))
    assert all(high <= max(low * 1.25, low + 1) for low, high in itertools.pairwise(ladder))
