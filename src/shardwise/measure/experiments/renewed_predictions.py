"""Predictions renewed by what has been measured: factors on the terms of a step, with their uncertainty.

The logarithm of a step is linear in the factors of its terms near 1: log t = log t0 + c + sum of share · theta + noise, over the
terms. c and theta are normal around 0, wide enough together for the interval of the first prediction, wider for communication. So
the posterior is that of Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning, 2006, 3.3), and the
interval of what has not run follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.measure.experiments.ledger_lines import RunPrediction

Array = NDArray[np.float64]
QUANTILE_90 = 1.6449  # of the normal distribution: 5% lie beyond it
# Parts of a first prediction's variance, a choice: what all configurations share, what each has alone; terms have the rest.
COMMON_PART, NOISE_PART = 0.5, 0.1
# Terms whose constants come from micro-benchmarks of single collectives. Between processes of one machine they depend on its
# load: a hop takes 0.15 ms where nothing else runs on the cores and 1.6 ms beside other programs (decision 105), so one run with
# such a term is worth more than many without it.
COMMUNICATION = frozenset({"tp", "cp", "ep", "pp", "fsdp", "dp", "control", "host"})
COMMUNICATION_DEVIATION = 1.5
LEAST_DEVIATION = 0.03 / QUANTILE_90  # two runs of the same job differ by 2 to 5% (docs/accuracy.md)
FEWEST_FOR_NOISE = 5  # runs from which their own scatter says how wide intervals are
DEFAULT_DEVIATION = 0.25  # of the logarithm of a step whose prediction is a bound without an interval: a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """The first prediction of a configuration, and the seconds of its step by term."""

    prediction: RunPrediction
    time: Mapping[str, float]

    @property
    def middle(self) -> float:
        """Logarithm of the middle of the interval."""
        low, high = self.prediction.ends
        return 0.5 * (math.log(low) + math.log(high))

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm of the step."""
        low, high = self.prediction.ends
        deviation = math.log(high / low) / (2 * QUANTILE_90)
        return max(deviation, LEAST_DEVIATION) if self.prediction.interval90 else DEFAULT_DEVIATION


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStep:
    """The distribution of the logarithm of a step that has not been measured: normal with this mean and deviation."""

    mean: float
    deviation: float

    @property
    def interval90(self) -> tuple[float, float]:
        """The 90% interval of the step in seconds."""
        width = QUANTILE_90 * self.deviation
        return math.exp(self.mean - width), math.exp(self.mean + width)

    def expected_improvement(self, best_s: float) -> float:
        """Return by how much the step is expected to be below another one, as a share of it.

        Source: Jones, Schonlau, Welch, Efficient Global Optimization of Expensive Black-Box Functions, 1998, equation 15, on the
        logarithm.
        """
        gap = math.log(best_s) - self.mean
        z = gap / self.deviation
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return gap * 0.5 * math.erfc(-z / math.sqrt(2)) + self.deviation * density


def renew_predictions(terms: Sequence[StepTerms], measured: Sequence[tuple[int, float]]) -> list[LogStep]:
    """Return the distribution of each configuration's step, given the seconds that some of them, by index, have measured."""
    names = sorted({name for term in terms for name in term.time})
    shares = np.array([[term.time.get(name, 0.0) / sum(term.time.values()) for name in names] for term in terms])
    middles, deviations = (np.array([getattr(term, field) for term in terms]) for field in ("middle", "deviation"))
    typical = float(np.median(deviations))
    # What of the variance is left for terms is spread over them as their shares are squared on average.
    term_variance = (1 - COMMON_PART - NOISE_PART) * typical**2 / float(np.mean(np.sum(shares**2, axis=1)))
    features = np.hstack([np.ones((len(terms), 1)), shares])
    term_variances = [COMMUNICATION_DEVIATION**2 if name in COMMUNICATION else term_variance for name in names]
    prior = np.array([COMMON_PART * typical**2, *term_variances])
    scale = deviations / typical
    first_noise = max(math.sqrt(NOISE_PART) * typical, LEAST_DEVIATION)
    if not measured:
        variances = np.maximum(np.sum(features**2 * prior, axis=1) + first_noise**2, deviations**2)
        return [LogStep(mean=float(m), deviation=float(v)) for m, v in zip(middles, np.sqrt(variances), strict=True)]
    indices = [index for index, _ in measured]
    residuals = np.log([s for _, s in measured]) - middles[indices]
    prior[0] = max(prior[0], float(np.mean(residuals)) ** 2)  # runs that are all far off say how far off all may be
    rows = _LinearModel(features[indices], residuals, prior)
    noise = rows.noise_deviation(first_noise, largest=max(typical, first_noise))
    means, variances = rows.predict(features, noise)
    noise_variances = (noise * np.maximum(scale, 1.0)) ** 2
    return [
        LogStep(mean=float(mean), deviation=math.sqrt(float(variance)))
        for mean, variance in zip(middles + means, variances + noise_variances, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _LinearModel:
    """Measured logarithms less predicted ones by features, whose weights have a normal prior of these variances around 0."""

    features: Array
    residuals: Array
    prior: Array

    def predict(self, features: Array, noise: float) -> tuple[Array, Array]:
        """Return means and variances of what has other features, without noise."""
        covariance = np.linalg.inv(np.diag(1.0 / self.prior) + self.features.T @ self.features / noise**2)
        weights = covariance @ self.features.T @ self.residuals / noise**2
        return features @ weights, np.einsum("ij,jk,ik->i", features, covariance, features)

    def noise_deviation(self, first: float, largest: float) -> float:
        """Return the noise for which the runs, each predicted from the others, scatter as they should.

        With few runs the first guess; its (n + 5) / n as wide covers 89% for normal errors (`cluster_calibration`).
        """
        count = len(self.residuals)
        if count < FEWEST_FOR_NOISE:
            return first
        grid = np.geomspace(LEAST_DEVIATION, max(largest, LEAST_DEVIATION * 1.001), 24)
        scatter = [self._standardised_scatter(noise) for noise in grid]
        fitting = next((noise for noise, value in zip(grid, scatter, strict=True) if value <= 1.0), grid[-1])
        return float(fitting) * math.sqrt((count + 5) / count)

    def _standardised_scatter(self, noise: float) -> float:
        """Return the mean square of residuals of runs predicted from the others, over their predicted variance."""
        covariance = self.features @ np.diag(self.prior) @ self.features.T + noise**2 * np.eye(len(self.residuals))
        inverse = np.linalg.inv(covariance)
        # Rasmussen, Williams, Gaussian Processes for Machine Learning, 2006, equations 5.12: one left out in closed form.
        errors = (inverse @ self.residuals) / np.diag(inverse)
        return float(np.mean(errors**2 * np.diag(inverse)))


def renewed(prediction: RunPrediction, step: LogStep) -> RunPrediction:
    """Return a prediction with the step of a distribution; rates follow it, memory stays."""
    seconds = math.exp(step.mean)
    ratio = prediction.step_time_s / seconds
    return replace(
        prediction, step_time_s=seconds, interval90=step.interval90, mfu=prediction.mfu and prediction.mfu * ratio,
        tokens_per_s_per_device=prediction.tokens_per_s_per_device and prediction.tokens_per_s_per_device * ratio,
    )  # fmt: skip
