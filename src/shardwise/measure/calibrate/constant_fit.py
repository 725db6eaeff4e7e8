"""The constants that agree best with observations and with what was expected of them.

Each constant is searched for on its line without bounds (`Constant.free`) around its prior, in units of the prior's width, so
that one that no observation says much about stays where it is expected: partial pooling. Residuals are of the logarithm of the
time, and those beyond two standard deviations pull no more than linearly (Huber 1964). Gauss-Newton; derivatives are finite
differences, all of an observation's constants in one call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.measure.calibrate.observations import Observation

Array = NDArray[np.float64]
ConstantKey = tuple[str, str]  # whose constant, and which

# Deviation of the logarithm of a time around what is right: two runs of a dense model differ by 2-5%, and shapes by as much.
SIGMA = 0.08
# The same where a few runs are all there is: less is known of what is special about each than where hundreds agree. Of the
# folds with three runs given, the least error from 0.08 to 0.24.
SIGMA_FEW = 0.16
HUBER_THRESHOLD = 2.0
DIFFERENCE_STEP = 1e-3  # of the finite differences, on the line without bounds
FIXED_WIDTH = 1e-6  # width of a constant that stays where it is expected
LONGEST_STEP = 1.0  # step of an iteration in any constant
CONVERGED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantFit:
    """Constants by owner and name on their lines without bounds: where expected, how far off at most times, where found.

    `log_times` are the times' logarithms and `slopes` their derivatives at `point`, for the observations that were fitted.
    """

    keys: tuple[ConstantKey, ...]
    prior: Array
    prior_widths: Array
    point: Array
    log_times: Array
    slopes: Array

    def value(self, key: ConstantKey) -> float:
        """A constant's value."""
        return float(CONSTANTS[key[1]].from_unbounded(self.point[self.keys.index(key)]))

    def with_fixed(self, names: Collection[str]) -> ConstantFit:
        """The same with some constants held where they are expected."""
        held = np.array([name in names for _, name in self.keys])
        return replace(self, prior_widths=np.where(held, FIXED_WIDTH, self.prior_widths))

    def with_prior(self, expected: Array) -> ConstantFit:
        """The same with other expectations, from which it starts."""
        return replace(self, prior=expected, point=expected)

    def constants_at(self, observation: Observation, free: Array) -> dict[str, float]:
        """The constants of an observation at a point; those that are no part of the fit are as expected."""
        index = {key: position for position, key in enumerate(self.keys)}
        found = {}
        for key in observation.names:
            own = free[index[key]] if key in index else CONSTANTS[key[1]].to_unbounded(observation.prior(key[1]))
            found[key[1]] = float(CONSTANTS[key[1]].from_unbounded(own))
        return found

    def deviations(self, weights: Array, *, sigma: float = SIGMA) -> Array:
        """Standard deviations of the constants that were found, on their lines."""
        precision = self.slopes.T @ (self.slopes * weights[:, None]) / sigma**2 + np.diag(self.prior_widths**-2)
        return np.asarray(np.sqrt(np.diag(np.linalg.inv(precision))))


def initial_fit(observations: Sequence[Observation], at: Mapping[ConstantKey, float] | None = None) -> ConstantFit:
    """All constants that observations depend on, where they are expected (or `at`, values by key)."""
    priors = {key: one.prior(key[1]) for one in observations for key in one.names}
    keys = tuple(sorted(priors))
    expected = np.array(
        [CONSTANTS[name].to_unbounded((at or {}).get((who, name), priors[who, name])) for who, name in keys]
    )
    widths = np.array([CONSTANTS[name].width for _, name in keys])
    nothing = np.zeros((0, len(keys)))
    return ConstantFit(
        keys=keys, prior=expected, prior_widths=widths, point=expected, log_times=nothing[:, 0:0], slopes=nothing
    )


def fit_constants(
    observations: Sequence[Observation], begin: ConstantFit, *, iterations: int = 12, sigma: float = SIGMA
) -> ConstantFit:
    """Move the constants until they move no more; `sigma`: deviation of the logarithm of a time around what is right."""
    fitted = begin
    for _ in range(iterations):
        fitted = linearise(observations, fitted)
        moved = np.clip(gauss_newton_step(observations, fitted, fitted.point, sigma=sigma), -LONGEST_STEP, LONGEST_STEP)
        fitted = replace(fitted, point=fitted.point + moved)
        if np.max(np.abs(moved), initial=0.0) < CONVERGED:
            break
    return linearise(observations, fitted)


def linearise(observations: Sequence[Observation], at: ConstantFit) -> ConstantFit:
    """The times' logarithms and their derivatives where the constants are."""
    index = {key: position for position, key in enumerate(at.keys)}
    rows, slopes = np.zeros(len(observations)), np.zeros((len(observations), len(at.keys)))
    for number, one in enumerate(observations):
        columns = [index[key] for key in one.names]
        points = at.point[columns][:, None] + DIFFERENCE_STEP * np.eye(len(columns), len(columns) + 1, 1)
        constants = {key[1]: CONSTANTS[key[1]].from_unbounded(p) for key, p in zip(one.names, points, strict=True)}
        logs = np.broadcast_to(np.log(one.seconds(constants)), (len(columns) + 1,))
        rows[number], slopes[number, columns] = logs[0], (logs[1:] - logs[0]) / DIFFERENCE_STEP
    return replace(at, log_times=rows, slopes=slopes)


def gauss_newton_step(
    observations: Sequence[Observation],
    at: ConstantFit,
    free: Array,
    chosen: Sequence[int] | None = None,
    *,
    sigma: float = SIGMA,
) -> Array:
    """The Gauss-Newton step from `free`, with the times as straight lines from where they were evaluated.

    `chosen`: the observations that count; all when it is left out.
    """
    chosen = range(len(observations)) if chosen is None else chosen
    slopes, measured = at.slopes[list(chosen)], np.log([observations[i].measured_s for i in chosen])
    residuals = measured - at.log_times[list(chosen)] - slopes @ (free - at.point)
    weights = _weights([observations[i] for i in chosen], residuals, sigma)
    precision = slopes.T @ (slopes * weights[:, None]) + np.diag(at.prior_widths**-2)
    pull = slopes.T @ (weights * residuals) - (free - at.prior) / at.prior_widths**2
    return np.asarray(np.linalg.solve(precision, pull))


def left_out_residuals(observations: Sequence[Observation], fitted: ConstantFit, *, sigma: float = SIGMA) -> Array:
    """Logarithms of measured over predicted times, each predicted from all others.

    r / (1 - h), where h says how far the fit follows a time that changes; exact as far as times are straight lines.
    Source: Allen 1974 (PRESS); with a prior it holds as for ridge regression (Golub, Heath and Wahba 1979).
    """
    residuals = np.log([one.measured_s for one in observations]) - fitted.log_times
    weights = _weights(observations, residuals, sigma)
    precision = fitted.slopes.T @ (fitted.slopes * weights[:, None]) + np.diag(fitted.prior_widths**-2)
    follows = weights * np.einsum("ij,ji->i", fitted.slopes, np.linalg.solve(precision, fitted.slopes.T))
    return np.asarray(residuals / (1.0 - follows))


def _weights(observations: Sequence[Observation], residuals: Array, sigma: float) -> Array:
    """Of each squared residual, less for those that are far off (Huber).

    A weight above 1 stands for a smaller deviation, and what is far off is so by that; one below 1, for one of several copies.
    """
    counted = np.array([one.weight for one in observations])
    far = HUBER_THRESHOLD * sigma / np.sqrt(np.maximum(counted, 1.0))
    return np.asarray(counted / sigma**2 * np.minimum(1.0, far / np.maximum(np.abs(residuals), 1e-12)))
