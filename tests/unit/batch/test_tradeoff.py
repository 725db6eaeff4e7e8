"""The trade-off of steps and tokens: the figures of its sources, and the law that both forms come from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.batch_size.noise_scale import NoiseScale, critical_batch_of_loss
from shardwise.batch_size.tradeoff import (
    BatchTradeoff,
    LossTarget,
    doubling_speedup_ratio,
    improvement_fraction,
    steps_and_tokens,
    tradeoff_of_two_runs,
)
from shardwise.book_formulas.rules import tokens_per_param_optimal
from shardwise.values.errors import InputError

SIZES = st.floats(1.0, 1e12)


@given(SIZES, SIZES, SIZES)
def test_steps_and_tokens_lie_on_the_hyperbola_of_the_paper(steps: float, noise: float, batch: float) -> None:
    """(S / S_min - 1) · (E / E_min - 1) = 1: McCandlish et al. 2018, equation 2.11."""
    tradeoff = BatchTradeoff(min_steps=steps, noise_tokens=noise)
    more_steps = (tradeoff.steps(batch) - steps) / steps
    more_tokens = (tradeoff.tokens(batch) - tradeoff.min_tokens) / tradeoff.min_tokens
    if min(more_steps, more_tokens) > 1e-6:  # below that, rounding decides the difference
        assert more_steps * more_tokens == pytest.approx(1.0, rel=1e-6)
    assert tradeoff.tokens(batch) == pytest.approx(batch * tradeoff.steps(batch))


def test_the_critical_batch_takes_twice_the_minimum_steps_and_tokens() -> None:
    tradeoff = BatchTradeoff(min_steps=3e4, noise_tokens=2e6)
    batch = tradeoff.critical_batch_tokens
    assert (tradeoff.steps(batch), tradeoff.tokens(batch)) == (6e4, 2 * tradeoff.min_tokens)


def test_critical_batches_of_a_loss_equal_the_papers() -> None:
    """Kaplan et al. 2020, section 5.1: it doubles for every 13% that the loss falls, and is 1 to 2 million tokens where the
    largest models converge."""
    assert critical_batch_of_loss(2.0 * 0.87) / critical_batch_of_loss(2.0) == pytest.approx(2.0, rel=0.05)
    assert 1e6 <= critical_batch_of_loss(3.0) <= 2e6


def test_tokens_of_an_optimal_run_equal_chinchillas() -> None:
    """Hoffmann et al. 2022: 70B parameters on 1.4 trillion tokens."""
    assert tokens_per_param_optimal() * 70e9 == 1.4e12


@pytest.mark.parametrize("batch", [0.5e6, 8e6])
def test_the_law_holds_on_both_sides_of_the_critical_batch(batch: float) -> None:
    """The note, E.2 (20 to 24), with B_noise of 2 million tokens and 50,000 steps."""
    cost = steps_and_tokens(batch, noise_tokens=2e6, min_steps=50_000)
    assert cost.pareto_ratio == pytest.approx(1.0, rel=1e-12)
    assert cost.tokens == pytest.approx(batch * cost.steps)


def test_the_law_is_recovered_from_two_runs() -> None:
    """The note, E.2 (21): S = S_min + E_min / B through (250,000 steps, 125e9 tokens) and (62,500, 500e9)."""
    tradeoff = tradeoff_of_two_runs(250_000, 1.25e11, 62_500, 5e11)
    assert (tradeoff.min_steps, tradeoff.min_tokens) == pytest.approx((50_000, 1e11))
    assert tradeoff.steps(0.5e6) == pytest.approx(250_000)


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ((100, 1e6, 50, 0.5e6), "found a batch of 10 k twice"),
        ((100, 1e6, 50, 0.9e6), "must take fewer steps and more tokens"),
        ((100, 1e6, 120, 2.4e6), "must take fewer steps and more tokens"),
    ],
)
def test_two_runs_that_fit_no_law_are_refused(runs: tuple[float, float, float, float], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        tradeoff_of_two_runs(*runs)


def test_progress_per_step_depends_on_batch_over_noise_scale() -> None:
    """The note, E.1 (18): B/(B + B_noise) is 1/11, 1/2 and 10/11."""
    assert [improvement_fraction(r) for r in (0.1, 1, 10)] == pytest.approx([1 / 11, 1 / 2, 10 / 11])


@given(st.floats(1e-3, 1e3))
def test_the_gain_of_a_doubled_batch_is_a_ratio_of_steps(ratio: float) -> None:
    """The note, 2.2.1: twice as fast far below the critical batch, 4/3 at it, and no faster far above."""
    law = BatchTradeoff(min_steps=7.0, noise_tokens=1e6)
    assert doubling_speedup_ratio(ratio) == pytest.approx(law.steps(ratio * 1e6) / law.steps(2 * ratio * 1e6))
    assert doubling_speedup_ratio(1.0) == pytest.approx(4 / 3)


@given(SIZES, SIZES, st.floats(1.001, 1e3))
def test_the_batch_for_a_number_of_steps_takes_that_number(steps: float, noise: float, times: float) -> None:
    law = BatchTradeoff(min_steps=steps, noise_tokens=noise)
    assert law.steps(law.batch_tokens(times * steps)) == pytest.approx(times * steps)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InputError, match=r"min_steps: found 0[\s\S]*noise_tokens: found -1"):
        BatchTradeoff(min_steps=0.0, noise_tokens=-1.0)
    with pytest.raises(InputError, match="more than the fewest steps, 10, are required"):
        BatchTradeoff(min_steps=10.0, noise_tokens=1.0).batch_tokens(10.0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_another_noise_scale_changes_no_other_field_of_a_target(factor: float) -> None:
    """The new noise scale has no interval, since it was not measured."""
    noise = NoiseScale(tokens=2.0e6, interval90=(1.0e6, 3.0e6), source="runs/a")
    target = LossTarget(noise=noise, tokens=3e9, batch_tokens=2e6, loss=2.5)
    scaled = target.with_noise(factor)
    assert scaled.noise == NoiseScale(tokens=factor * 2.0e6, source="runs/a")
    assert replace(scaled, noise=noise) == target
