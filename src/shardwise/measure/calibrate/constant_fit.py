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
Key = tuple[str, str]  # whose constant, and which

# Deviation of the logarithm of a time around what is right: two runs of a dense model differ by 2-5%, and shapes by as much.
SIGMA = 0.08
# The same where a few runs are all there is: less is known of what is special about each than where hundreds agree. Of the
# folds with three runs given, the least error from 0.08 to 0.24.
SIGMA_FEW = 0.16
HUBER = 2.0
STEP = 1e-3  # of the finite differences, on the line without bounds
HELD = 1e-6  # width of a constant that stays where it is expected
LONGEST = 1.0  # step of an iteration in any constant
CLOSE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Constants by owner and name on their lines without bounds: where expected, how far off at most times, where found.

    `rows` are the times' logarithms and `slopes` their derivatives at `found`, for the observations that were fitted.
    """

    keys: tuple[Key, ...]
    expected: Array
    widths: Array
    found: Array
    rows: Array
    slopes: Array

    def value(self, key: Key) -> float:
        """A constant's value."""
        return float(CONSTANTS[key[1]].from_unbounded(self.found[self.keys.index(key)]))

    def holding(self, names: Collection[str]) -> Fit:
        """The same with some constants held where they are expected."""
        held = np.array([name in names for _, name in self.keys])
        return replace(self, widths=np.where(held, HELD, self.widths))

    def starting_at(self, expected: Array) -> Fit:
        """The same with other expectations, from which it starts."""
        return replace(self, expected=expected, found=expected)

    def constants_at(self, observation: Observation, free: Array) -> dict[str, float]:
        """The constants of an observation at a point; those that are no part of the fit are as expected."""
        index = {key: position for position, key in enumerate(self.keys)}
        found = {}
        for key in observation.names:
            own = free[index[key]] if key in index else CONSTANTS[key[1]].free(observation.prior(key[1]))
            found[key[1]] = float(CONSTANTS[key[1]].from_unbounded(own))
        return found

    def deviations(self, weights: Array, *, sigma: float = SIGMA) -> Array:
        """Standard deviations of the constants that were found, on their lines."""
        precision = self.slopes.T @ (self.slopes * weights[:, None]) / sigma**2 + np.diag(self.widths**-2)
        return np.asarray(np.sqrt(np.diag(np.linalg.inv(precision))))


def start(observations: Sequence[Observation], at: Mapping[Key, float] | None = None) -> Fit:
    """All constants that observations depend on, where they are expected (or `at`, values by key)."""
    priors = {key: one.prior(key[1]) for one in observations for key in one.names}
    keys = tuple(sorted(priors))
    expected = np.array([CONSTANTS[name].free((at or {}).get((who, name), priors[who, name])) for who, name in keys])
    widths = np.array([CONSTANTS[name].width for _, name in keys])
    nothing = np.zeros((0, len(keys)))
    return Fit(keys=keys, expected=expected, widths=widths, found=expected, rows=nothing[:, 0:0], slopes=nothing)


def fit(observations: Sequence[Observation], begin: Fit, *, iterations: int = 12, sigma: float = SIGMA) -> Fit:
    """Move the constants until they move no more; `sigma`: deviation of the logarithm of a time around what is right."""
    fitted = begin
    for _ in range(iterations):
        fitted = evaluated(observations, fitted)
        moved = np.clip(step(observations, fitted, fitted.found, sigma=sigma), -LONGEST, LONGEST)
        fitted = replace(fitted, found=fitted.found + moved)
        if np.max(np.abs(moved), initial=0.0) < CLOSE:
            break
    return evaluated(observations, fitted)


def evaluated(observations: Sequence[Observation], at: Fit) -> Fit:
    """The times' logarithms and their derivatives where the constants are."""
    index = {key: position for position, key in enumerate(at.keys)}
    rows, slopes = np.zeros(len(observations)), np.zeros((len(observations), len(at.keys)))
    for number, one in enumerate(observations):
        columns = [index[key] for key in one.names]
        points = at.found[columns][:, None] + STEP * np.eye(len(columns), len(columns) + 1, 1)
        constants = {key[1]: CONSTANTS[key[1]].from_unbounded(p) for key, p in zip(one.names, points, strict=True)}
        logs = np.broadcast_to(np.log(one.seconds(constants)), (len(columns) + 1,))
        rows[number], slopes[number, columns] = logs[0], (logs[1:] - logs[0]) / STEP
    return replace(at, rows=rows, slopes=slopes)


def step(
    observations: Sequence[Observation],
    at: Fit,
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
    residuals = measured - at.rows[list(chosen)] - slopes @ (free - at.found)
    weights = _weights([observations[i] for i in chosen], residuals, sigma)
    precision = slopes.T @ (slopes * weights[:, None]) + np.diag(at.widths**-2)
    pull = slopes.T @ (weights * residuals) - (free - at.expected) / at.widths**2
    return np.asarray(np.linalg.solve(precision, pull))


def left_out_residuals(observations: Sequence[Observation], fitted: Fit, *, sigma: float = SIGMA) -> Array:
    """Logarithms of measured over predicted times, each predicted from all others.

    r / (1 - h), where h says how far the fit follows a time that changes; exact as far as times are straight lines.
    Source: Allen 1974 (PRESS); with a prior it holds as for ridge regression (Golub, Heath and Wahba 1979).
    """
    residuals = np.log([one.measured_s for one in observations]) - fitted.rows
    weights = _weights(observations, residuals, sigma)
    precision = fitted.slopes.T @ (fitted.slopes * weights[:, None]) + np.diag(fitted.widths**-2)
    follows = weights * np.einsum("ij,ji->i", fitted.slopes, np.linalg.solve(precision, fitted.slopes.T))
    return np.asarray(residuals / (1.0 - follows))


def _weights(observations: Sequence[Observation], residuals: Array, sigma: float) -> Array:
    """Of each squared residual, less for those that are far off (Huber).

    A weight above 1 stands for a smaller deviation, and what is far off is so by that; one below 1, for one of several copies.
    """
    counted = np.array([one.weight for one in observations])
    far = HUBER * sigma / np.sqrt(np.maximum(counted, 1.0))
    return np.asarray(counted / sigma**2 * np.minimum(1.0, far / np.maximum(np.abs(residuals), 1e-12)))
