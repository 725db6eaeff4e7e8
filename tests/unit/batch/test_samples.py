"""Noise scales of steps: unbiased on a quadratic whose noise is known, with intervals that hold it as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from shardwise.batch_size.hessian_noise import quadratic_step
from shardwise.batch_size.noise_estimators import (
    MeasuredNoise,
    NoiseSample,
    RunningNoise,
    estimate_noise,
    noise_sample_of_parts,
    student_quantile_95,
)
from shardwise.values.errors import InputError

Array = NDArray[np.float64]
SIZE, SEEDS = 40, 100
RANDOM = np.random.default_rng(7)
EIGENVALUES = np.geomspace(0.05, 20.0, SIZE)
ROTATION = np.linalg.qr(RANDOM.standard_normal((SIZE, SIZE)))[0]
HESSIAN = ROTATION @ np.diag(EIGENVALUES) @ ROTATION.T
AWAY = RANDOM.standard_normal(SIZE) * 0.3  # from the minimum, where the gradient is taken
GRADIENT = HESSIAN @ AWAY
ROOT = RANDOM.standard_normal((SIZE, SIZE)) * 2.0
COVARIANCE = ROOT @ ROOT.T
EXACT = quadratic_step(GRADIENT, HESSIAN, COVARIANCE)


def of_step(random: np.random.Generator, parts: list[int]) -> NoiseSample:
    """A step on the quadratic: the gradients of single examples, added up in parts of so many."""
    gradients = GRADIENT + random.standard_normal((sum(parts), SIZE)) @ ROOT.T
    own = [part.sum(axis=0) / sum(parts) for part in np.split(gradients, np.cumsum(parts)[:-1])]
    squares = sum(float(one @ one) for one in own)
    whole = np.sum(own, axis=0)
    return noise_sample_of_parts(squares, float(whole @ whole), parts)


def of_run(seed: int, parts: list[int], steps: int = 200) -> list[NoiseSample]:
    random = np.random.default_rng(seed)
    return [of_step(random, parts) for _ in range(steps)]


@pytest.mark.parametrize(
    "parts", [[1] * 8, [4] * 4, [1, 7, 3, 5], [0, 6, 2]], ids=["1 of 8", "4 of 16", "uneven", "none in one"]
)
def test_both_parts_are_unbiased(parts: list[int]) -> None:
    """With batches of a few examples too, which are far smaller than the noise scale of this quadratic."""
    assert EXACT.simple_noise_scale > 4 * sum(parts)
    noises = [sample.noise for seed in range(SEEDS) for sample in of_run(seed, parts, steps=20)]
    for values, exact in (
        ([one.covariance_trace for one in noises], float(np.trace(COVARIANCE))),
        ([one.squared_gradient for one in noises], float(GRADIENT @ GRADIENT)),
    ):
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - exact) < 3.5 * error


def test_the_mean_of_many_seeds_is_the_closed_form() -> None:
    found = [estimate_noise(of_run(seed, [4] * 16)).tokens for seed in range(SEEDS)]
    assert np.mean(found) == pytest.approx(EXACT.simple_noise_scale, rel=0.02)


def test_running_averages_come_to_the_closed_form() -> None:
    found = []
    for seed in range(SEEDS):
        average = RunningNoise(decay=0.98)
        for sample in of_run(seed, [4] * 16, steps=300):
            average.add(sample)
        assert average.tokens is not None
        found.append(average.tokens)
    assert np.mean(found) == pytest.approx(EXACT.simple_noise_scale, rel=0.02)


def test_intervals_hold_the_truth_nine_times_in_ten() -> None:
    measured = [estimate_noise(of_run(seed, [1] * 16)) for seed in range(SEEDS)]
    held = sum(one.low <= EXACT.simple_noise_scale <= one.high for one in measured)
    assert 0.84 <= held / SEEDS <= 0.96


def test_a_gradient_that_is_lost_in_noise_has_no_upper_end() -> None:
    random = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        own = random.standard_normal((8, SIZE)) / 8
        whole = own.sum(axis=0)
        samples.append(noise_sample_of_parts(float((own**2).sum()), float(whole @ whole), [1] * 8))
    found = estimate_noise(samples)
    assert found.high == math.inf
    assert found.low > 0


@pytest.mark.parametrize("steps", range(1, 9))
def test_fewer_than_five_measurements_have_no_interval(steps: int) -> None:
    found = estimate_noise(of_run(0, [64] * 16, steps=steps))
    assert (found.num_samples, found.num_blocks) == (steps, steps)
    if steps < 5:
        assert (found.low, found.high) == (0.0, math.inf)
    else:
        assert 0.0 < found.low < found.tokens < found.high < math.inf


def test_blocks_are_at_most_twenty() -> None:
    found: MeasuredNoise = estimate_noise(of_run(0, [4] * 4, steps=107))
    assert (found.num_samples, found.num_blocks) == (107, 17)


def test_quantiles_of_student() -> None:
    """From tables, such as NIST/SEMATECH's e-Handbook of Statistical Methods, 1.3.6.7.2."""
    printed = {4: 2.132, 5: 2.015, 9: 1.833, 14: 1.761, 19: 1.729}
    assert {freedom: student_quantile_95(freedom) for freedom in printed} == pytest.approx(printed, rel=2e-3)


@pytest.mark.parametrize("parts", [[8], [0, 8, 0]])
def test_one_part_is_refused(parts: list[int]) -> None:
    with pytest.raises(InputError, match="one part"):
        noise_sample_of_parts(1.0, 1.0, parts)


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(InputError, match="found no measurement"):
        estimate_noise([])
    assert RunningNoise().tokens is None
    with pytest.raises(InputError, match="decay"):
        RunningNoise(decay=1.0)
