"""When a run reaches a loss: against the exact step of a curve, with and without noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardwise.records.step_log import StepsToLoss, steps_to_loss


def curve(step: np.ndarray | float) -> np.ndarray:
    """A power law of the loss, which is no straight line in log steps."""
    return np.asarray(2.0 + 6.0 * np.asarray(step, float) ** -0.25)


@pytest.mark.parametrize("target", [4.0, 3.5, 3.2])
def test_crossing_of_a_smooth_curve_is_exact_within_2_percent(target: float) -> None:
    exact = (6.0 / (target - 2.0)) ** 4
    num_steps = steps_to_loss(curve(np.arange(1, 5000)), target)
    assert num_steps == pytest.approx(exact, rel=0.02)


def test_noise_of_single_losses_moves_the_crossing_little() -> None:
    """The mean of 50 runs is within 2% of the exact step, and each within 20%."""
    drawn = np.random.default_rng(0)
    steps = np.arange(1, 4000)
    exact = (6.0 / 1.2) ** 4
    crossings = [steps_to_loss(curve(steps) + drawn.normal(0.0, 0.05, len(steps)), 3.2) for _ in range(50)]
    ratios = np.array([crossing for crossing in crossings if crossing is not None]) / exact
    assert len(ratios) == 50
    assert abs(ratios.mean() - 1.0) < 0.02
    assert np.abs(ratios - 1.0).max() < 0.2


def test_the_line_is_that_of_least_squares() -> None:
    losses = np.random.default_rng(1).normal(5.0, 1.0, 90)
    target = StepsToLoss(-math.inf)
    for loss in losses:
        target.add_loss(float(loss))
    x = np.log(np.arange(61, 91))
    slope, middle = np.polyfit(x, losses[60:], 1)
    assert target.smoothed == pytest.approx(slope * x[-1] + middle, rel=1e-9)


def test_one_step_below_the_loss_does_not_reach_it() -> None:
    assert steps_to_loss([5.0] * 40 + [1.0] + [5.0] * 40, 3.0) is None


def test_losses_that_are_not_finite_are_left_out() -> None:
    whole, holes = curve(np.arange(1, 600)), curve(np.arange(1, 600))
    holes[250] = math.nan
    of_whole, with_holes = steps_to_loss(whole, 3.3), steps_to_loss(holes, 3.3)
    assert of_whole is not None
    assert with_holes == pytest.approx(of_whole, rel=0.01)


def test_steps_count_from_the_first_and_lie_before_the_one_that_reaches_it() -> None:
    target = StepsToLoss(3.5)
    losses = curve(np.arange(1, 1000))
    reached = 1 + next(number for number, loss in enumerate(losses) if target.add_loss(float(loss)))
    assert target.steps is not None
    assert reached - 1 < target.steps <= reached
    assert target.add_loss(9.0)
    assert target.steps <= reached
