"""Batches that follow the noise scale: the two schedules of the note's appendix E.3, and that none is better."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.batch_size.growing_batch import NoiseProfile, dynamic_batch_tokens
from shardwise.batch_size.learning_rate import linear_learning_rate, optimal_learning_rate, square_root_learning_rate
from shardwise.batch_size.tradeoff import BatchTradeoff
from shardwise.values.errors import InputError

SIZES = st.floats(1e2, 1e7)
PARTS = st.lists(st.tuples(st.floats(1.0, 1e4), SIZES), min_size=2, max_size=6)


def profile(parts: list[tuple[float, float]]) -> NoiseProfile:
    return NoiseProfile(min_steps=tuple(s for s, _ in parts), noise_tokens=tuple(n for _, n in parts))


def test_lambda_equal_to_the_noise_scale_gives_the_critical_batch() -> None:
    """The note, E.3, last sentence before its estimation: B = sqrt(lambda·B_noise) = B_noise."""
    assert dynamic_batch_tokens(2e6, exchange_tokens=2e6) == 2e6
    schedule = NoiseProfile(min_steps=(50_000.0,), noise_tokens=(2e6,)).follow_noise(2e6)
    knee = BatchTradeoff(min_steps=50_000, noise_tokens=2e6)
    assert (schedule.steps, schedule.tokens) == pytest.approx((2 * knee.min_steps, 2 * knee.min_tokens))


def test_schedules_of_a_growing_noise_scale_by_hand() -> None:
    """By hand, S_min = 20,000 steps: half at B_noise = 1M tokens, half at 4M, and a budget of 40,000 steps (25 and 26).

    E_min = 10,000·(1M + 4M) = 50G; sum of s·sqrt(B_noise) = 10,000·(1,000 + 2,000) = 30M.
    Constant: B = 50G / 20,000 = 2.5M, S = 10,000·(1.4 + 2.6) = 40,000, E = 10,000·(3.5M + 6.5M) = 100G.
    Following: lambda = (30M / 20,000)² = 2.25M, B = 1.5M and 3M, S = 10,000·(5/3 + 7/3) = 40,000, E = 10,000·(2.5M + 7M) = 95G.
    """
    run = NoiseProfile(min_steps=(10_000.0, 10_000.0), noise_tokens=(1e6, 4e6))
    constant, following = run.constant_for_steps(40_000), run.schedule_for_steps(40_000)
    assert constant.batch_tokens == pytest.approx((2.5e6, 2.5e6))
    assert (constant.steps, constant.tokens) == pytest.approx((40_000, 100e9))
    assert run.exchange_tokens(40_000) == pytest.approx(2.25e6)
    assert following.batch_tokens == pytest.approx((1.5e6, 3e6))
    assert (following.steps, following.tokens) == pytest.approx((40_000, 95e9))
    assert run.saved_fraction == pytest.approx(5 / 50)


@given(PARTS, st.floats(1.05, 20.0), st.lists(st.floats(0.2, 5.0), min_size=6, max_size=6))
def test_no_other_batches_reach_the_loss_in_as_many_steps_with_fewer_tokens(
    parts: list[tuple[float, float]], times: float, changes: list[float]
) -> None:
    """Other batches, scaled to the same number of steps, take at least as many tokens."""
    run = profile(parts)
    budget = times * run.total_min_steps
    best = run.schedule_for_steps(budget)
    changed_batches = [batch * change for batch, change in zip(best.batch_tokens, changes, strict=False)]
    scale = (run.schedule(changed_batches).steps - run.total_min_steps) / (budget - run.total_min_steps)
    changed = run.schedule([batch * scale for batch in changed_batches])
    assert best.steps == pytest.approx(budget)
    assert changed.steps == pytest.approx(budget)
    assert changed.tokens >= best.tokens * (1 - 1e-9)


@given(PARTS, st.floats(1.05, 20.0))
def test_savings_are_a_share_of_the_tokens_beyond_the_minimum(parts: list[tuple[float, float]], times: float) -> None:
    run = profile(parts)
    budget = times * run.total_min_steps
    constant, best = run.constant_for_steps(budget), run.schedule_for_steps(budget)
    assert constant.steps == pytest.approx(budget)
    beyond = constant.tokens - run.total_min_tokens
    assert constant.tokens - best.tokens == pytest.approx(run.saved_fraction * beyond, rel=1e-6, abs=1e-6 * beyond)


def test_a_continuous_noise_scale_is_the_limit_of_its_parts() -> None:
    """B_noise(s) = 1M·(1 + 8s) over S_min = 1,000: the integral of its square root is 1,000·1,000·(27 - 1)/12."""
    count = 2000
    middles = [(i + 0.5) / count for i in range(count)]
    run = NoiseProfile(min_steps=(1000 / count,) * count, noise_tokens=tuple(1e6 * (1 + 8 * s) for s in middles))
    assert run.total_min_tokens == pytest.approx(1000 * 5e6)
    assert math.sqrt(run.exchange_tokens(2000)) == pytest.approx(1000 * 1000 * (27 - 1) / 12 / 1000, rel=1e-6)


def test_learning_rates_of_a_sixteenfold_batch_equal_the_notes() -> None:
    """The note, E.1.1: from 3e-4 at 256 sequences to 4,096, by the square root and in proportion."""
    assert square_root_learning_rate(3e-4, 256, 4096) == pytest.approx(1.2e-3)
    assert linear_learning_rate(3e-4, 256, 4096) == pytest.approx(4.8e-3)


def test_the_optimal_learning_rate_is_linear_below_and_flat_above() -> None:
    """The note, E.1.1 (19)."""
    assert optimal_learning_rate(2.0, 1e6, 1.0) / optimal_learning_rate(1.0, 1e6, 1.0) == pytest.approx(2.0, rel=1e-5)
    assert optimal_learning_rate(1e12, 1e6, 1.0) == pytest.approx(1.0, rel=1e-5)


def test_wrong_runs_are_refused() -> None:
    run = NoiseProfile(min_steps=(10.0,), noise_tokens=(1e6,))
    for budget in (run.constant_for_steps, run.schedule_for_steps):
        with pytest.raises(InputError, match="more than the 10 steps"):
            budget(10.0)
    with pytest.raises(InputError, match="found 1 parts and 2 noise scales"):
        NoiseProfile(min_steps=(1.0,), noise_tokens=(1.0, 2.0))
    with pytest.raises(InputError, match="found -1; numbers above 0"):
        NoiseProfile(min_steps=(1.0,), noise_tokens=(-1.0,))
