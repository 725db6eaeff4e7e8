"""Fit of constants to observations and priors.

Each constant is searched on its unbounded scale (`Constant.to_unbounded`) around its prior, in units of the prior's
width: a constant that no observation determines stays at its prior (partial pooling). Residuals are of the logarithm of
the time; beyond two standard deviations they pull only linearly (Huber 1964). The method is Gauss-Newton with finite
differences, all constants of an observation in one call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.hardware import CONSTANTS
from shardwise.measure.calibrate.observations import Observation

Array = NDArray[np.float64]
ConstantKey = tuple[str, str]  # whose constant, and which

# Deviation of the logarithm of a time around what is right: two runs of a dense model differ by 2-5%, and shapes by as much.
SIGMA = 0.08
# The same where a few runs are all there is: less is known of what is special about each than where hundreds agree. Of the
# folds with three runs given, the least error from 0.08 to 0.24.
SIGMA_FEW = 0.16
HUBER_THRESHOLD = 2.0
DIFFERENCE_STEP = (
    1e-3  # on the unbounded scale: small beside every prior's width, large beside the rounding of log times
)
FIXED_WIDTH = 1e-6  # of the prior of a constant that is held
LONGEST_STEP = 1.0  # of an iteration in any constant
CONVERGED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantFit:
    """Constants by owner and name on their unbounded scales: priors, widths of the priors, and the fitted `point`.

    `log_times` are logarithms of the predicted seconds and `slopes` their derivatives at `point`, [observation] and
    [observation, constant].
    """

    keys: tuple[ConstantKey, ...]
    prior: Array
    prior_widths: Array
    point: Array
    log_times: Array
    slopes: Array

    def value(self, key: ConstantKey) -> float:
        """Return the value of a constant."""
        return float(CONSTANTS[key[1]].from_unbounded(self.point[self.keys.index(key)]))

    def with_fixed(self, names: Collection[str]) -> ConstantFit:
        """Return the fit with the named constants held at their priors."""
        is_fixed = np.array([name in names for _, name in self.keys])
        return replace(self, prior_widths=np.where(is_fixed, FIXED_WIDTH, self.prior_widths))

    def with_prior(self, prior: Array) -> ConstantFit:
        """Return the fit with other priors, which are also its point."""
        return replace(self, prior=prior, point=prior)

    def constants_at(self, observation: Observation, point: Array) -> dict[str, float]:
        """Return the constants of an observation at a point; those outside the fit are at their priors."""
        index = {key: position for position, key in enumerate(self.keys)}
        constants = {}
        for key in observation.names:
            coordinate = (
                point[index[key]] if key in index else CONSTANTS[key[1]].to_unbounded(observation.prior(key[1]))
            )
            constants[key[1]] = float(CONSTANTS[key[1]].from_unbounded(coordinate))
        return constants

    def deviations(self, weights: Array, *, sigma: float = SIGMA) -> Array:
        """Return the standard deviations of the fitted constants on their unbounded scales."""
        precision = self.slopes.T @ (self.slopes * weights[:, None]) / sigma**2 + np.diag(self.prior_widths**-2)
        return np.asarray(np.sqrt(np.diag(np.linalg.inv(precision))))


def initial_fit(observations: Sequence[Observation], start: Mapping[ConstantKey, float] | None = None) -> ConstantFit:
    """Return a fit with every constant of the observations at its prior, or at its value in `start`."""
    priors = {key: observation.prior(key[1]) for observation in observations for key in observation.names}
    keys = tuple(sorted(priors))
    prior = np.array(
        [CONSTANTS[name].to_unbounded((start or {}).get((owner, name), priors[owner, name])) for owner, name in keys]
    )
    widths = np.array([CONSTANTS[name].width for _, name in keys])
    no_slopes = np.zeros((0, len(keys)))
    return ConstantFit(
        keys=keys, prior=prior, prior_widths=widths, point=prior, log_times=no_slopes[:, 0:0], slopes=no_slopes
    )


def fit_constants(
    observations: Sequence[Observation], initial: ConstantFit, *, iterations: int = 12, sigma: float = SIGMA
) -> ConstantFit:
    """Take Gauss-Newton steps until no constant moves by more than `CONVERGED`. `sigma` is the deviation of the
    logarithm of a time around the truth."""
    fit = initial
    for _ in range(iterations):
        fit = linearise(observations, fit)
        step = np.clip(gauss_newton_step(observations, fit, fit.point, sigma=sigma), -LONGEST_STEP, LONGEST_STEP)
        fit = replace(fit, point=fit.point + step)
        if np.max(np.abs(step), initial=0.0) < CONVERGED:
            break
    return linearise(observations, fit)


def linearise(observations: Sequence[Observation], fit: ConstantFit) -> ConstantFit:
    """Return the fit with the logarithms of the times at its point, and their derivatives."""
    index = {key: position for position, key in enumerate(fit.keys)}
    log_times, slopes = np.zeros(len(observations)), np.zeros((len(observations), len(fit.keys)))
    for number, observation in enumerate(observations):
        columns = [index[key] for key in observation.names]
        # Column 0 is the point itself, column k + 1 moves the k-th constant: one vectorised call prices all of them.
        points = fit.point[columns][:, None] + DIFFERENCE_STEP * np.eye(len(columns), len(columns) + 1, 1)
        constants = {
            key[1]: CONSTANTS[key[1]].from_unbounded(coordinates)
            for key, coordinates in zip(observation.names, points, strict=True)
        }
        logs = np.broadcast_to(np.log(observation.seconds(constants)), (len(columns) + 1,))
        log_times[number], slopes[number, columns] = logs[0], (logs[1:] - logs[0]) / DIFFERENCE_STEP
    return replace(fit, log_times=log_times, slopes=slopes)


def gauss_newton_step(
    observations: Sequence[Observation],
    fit: ConstantFit,
    point: Array,
    chosen: Sequence[int] | None = None,
    *,
    sigma: float = SIGMA,
) -> Array:
    """Return the Gauss-Newton step from `point`, with log times linear around the point of `fit`. `chosen` are the
    indices of the observations that count; all if None."""
    chosen = range(len(observations)) if chosen is None else chosen
    slopes, measured = fit.slopes[list(chosen)], np.log([observations[i].measured_s for i in chosen])
    residuals = measured - fit.log_times[list(chosen)] - slopes @ (point - fit.point)
    weights = _weights([observations[i] for i in chosen], residuals, sigma)
    precision = slopes.T @ (slopes * weights[:, None]) + np.diag(fit.prior_widths**-2)
    pull = slopes.T @ (weights * residuals) - (point - fit.prior) / fit.prior_widths**2
    return np.asarray(np.linalg.solve(precision, pull))


def left_out_residuals(observations: Sequence[Observation], fit: ConstantFit, *, sigma: float = SIGMA) -> Array:
    """Return the logarithms of measured over predicted times, each predicted from all other observations.

    r / (1 - h), where the leverage h is how far the fit follows a change of the measured time; exact as long as log
    times are linear in the constants and the Huber weights stay. Source: Allen 1974 (PRESS); with a prior it holds as
    for ridge regression (Golub, Heath and Wahba 1979).
    """
    residuals = np.log([observation.measured_s for observation in observations]) - fit.log_times
    weights = _weights(observations, residuals, sigma)
    precision = fit.slopes.T @ (fit.slopes * weights[:, None]) + np.diag(fit.prior_widths**-2)
    leverages = weights * np.einsum("ij,ji->i", fit.slopes, np.linalg.solve(precision, fit.slopes.T))
    return np.asarray(residuals / (1.0 - leverages))


def _weights(observations: Sequence[Observation], residuals: Array, sigma: float) -> Array:
    """Return the weights of squared residuals, less for those beyond the threshold (Huber).

    A weight above 1 stands for a smaller deviation, so it shrinks the threshold by its root; one below 1 stands for one
    of several copies and leaves it.
    """
    weights = np.array([observation.weight for observation in observations])
    thresholds = HUBER_THRESHOLD * sigma / np.sqrt(np.maximum(weights, 1.0))
    return np.asarray(weights / sigma**2 * np.minimum(1.0, thresholds / np.maximum(np.abs(residuals), 1e-12)))
