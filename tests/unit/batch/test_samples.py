"""Noise scales of steps: unbiased on a quadratic with a known noise scale, with intervals of the nominal coverage."""

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
    """A step on the quadratic: the gradients of single examples, summed in parts of the numbers of examples in `parts`."""
    gradients = GRADIENT + random.standard_normal((sum(parts), SIZE)) @ ROOT.T
    means = [part.sum(axis=0) / sum(parts) for part in np.split(gradients, np.cumsum(parts)[:-1])]
    squares = sum(float(mean @ mean) for mean in means)
    total = np.sum(means, axis=0)
    return noise_sample_of_parts(squares, float(total @ total), parts)


def of_run(seed: int, parts: list[int], steps: int = 200) -> list[NoiseSample]:
    random = np.random.default_rng(seed)
    return [of_step(random, parts) for _ in range(steps)]


@pytest.mark.parametrize(
    "parts", [[1] * 8, [4] * 4, [1, 7, 3, 5], [0, 6, 2]], ids=["1 of 8", "4 of 16", "uneven", "none in one"]
)
def test_covariance_trace_and_squared_gradient_are_unbiased(parts: list[int]) -> None:
    """Also with batches of a few examples, far below the noise scale of this quadratic."""
    assert EXACT.simple_noise_scale > 4 * sum(parts)
    noises = [sample.noise for seed in range(SEEDS) for sample in of_run(seed, parts, steps=20)]
    for values, exact in (
        ([noise.covariance_trace for noise in noises], float(np.trace(COVARIANCE))),
        ([noise.squared_gradient for noise in noises], float(GRADIENT @ GRADIENT)),
    ):
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - exact) < 3.5 * error


def test_the_mean_over_seeds_equals_the_closed_form() -> None:
    estimates = [estimate_noise(of_run(seed, [4] * 16)).tokens for seed in range(SEEDS)]
    assert np.mean(estimates) == pytest.approx(EXACT.simple_noise_scale, rel=0.02)


def test_running_averages_converge_to_the_closed_form() -> None:
    averages = []
    for seed in range(SEEDS):
        average = RunningNoise(decay=0.98)
        for sample in of_run(seed, [4] * 16, steps=300):
            average.add(sample)
        assert average.tokens is not None
        averages.append(average.tokens)
    assert np.mean(averages) == pytest.approx(EXACT.simple_noise_scale, rel=0.02)


def test_intervals_cover_the_true_scale_in_nine_of_ten_seeds() -> None:
    measured = [estimate_noise(of_run(seed, [1] * 16)) for seed in range(SEEDS)]
    num_covered = sum(noise.low <= EXACT.simple_noise_scale <= noise.high for noise in measured)
    assert 0.84 <= num_covered / SEEDS <= 0.96


def test_a_scale_whose_gradient_is_lost_in_noise_has_no_upper_bound() -> None:
    random = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        gradients = random.standard_normal((8, SIZE)) / 8
        total = gradients.sum(axis=0)
        samples.append(noise_sample_of_parts(float((gradients**2).sum()), float(total @ total), [1] * 8))
    noise = estimate_noise(samples)
    assert noise.high == math.inf
    assert noise.low > 0


@pytest.mark.parametrize("steps", range(1, 9))
def test_fewer_than_five_measurements_have_no_interval(steps: int) -> None:
    noise = estimate_noise(of_run(0, [64] * 16, steps=steps))
    assert (noise.num_samples, noise.num_blocks) == (steps, steps)
    if steps < 5:
        assert (noise.low, noise.high) == (0.0, math.inf)
    else:
        assert 0.0 < noise.low < noise.tokens < noise.high < math.inf


def test_blocks_are_at_most_twenty() -> None:
    noise: MeasuredNoise = estimate_noise(of_run(0, [4] * 4, steps=107))
    assert (noise.num_samples, noise.num_blocks) == (107, 17)


def test_quantiles_of_students_t_equal_tables() -> None:
    """From tables, such as NIST/SEMATECH's e-Handbook of Statistical Methods, 1.3.6.7.2."""
    printed = {4: 2.132, 5: 2.015, 9: 1.833, 14: 1.761, 19: 1.729}
    assert {freedom: student_quantile_95(freedom) for freedom in printed} == pytest.approx(printed, rel=2e-3)


@pytest.mark.parametrize("parts", [[8], [0, 8, 0]])
def test_a_single_part_is_refused(parts: list[int]) -> None:
    with pytest.raises(InputError, match="one part"):
        noise_sample_of_parts(1.0, 1.0, parts)


def test_an_empty_list_of_samples_is_refused() -> None:
    with pytest.raises(InputError, match="found no measurement"):
        estimate_noise([])
    assert RunningNoise().tokens is None
    with pytest.raises(InputError, match="decay"):
        RunningNoise(decay=1.0)
