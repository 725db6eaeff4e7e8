"""Fit of constants to observations and priors, and errors of its predictions for runs outside the fit.

Each constant is searched on its unbounded scale (`Constant.to_unbounded`) around its prior, in units of the prior's
width: a constant that no observation determines stays at its prior (partial pooling). Residuals are of the logarithm of
the time; beyond one standard deviation they pull only linearly (Huber 1964). The method is Gauss-Newton with finite
differences, all constants of an observation in one call, damped where a step does not lessen the loss (Marquardt 1963):
times have kinks where another term becomes the longest. Constants that would leave their bounds end at them.

Cross-validation leaves groups of runs out in turn and predicts them from the others:

- *model*: stack known, model new; a tenth of all pairs of stack and model at a time, several draws
- *source*: a source and its stack are new: its runs are left out, and the stack is at the priors of its kind
- *lab*: the same with all sources of a lab, such as NVIDIA's and Google's
- *three*: a source is new, and then three of its runs are given

Constants from the other runs follow from the derivatives at the fit to all, exact as long as log times are linear
there; runs that are left out are priced exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.hardware import CONSTANTS
from shardwise.measure.calibrate.observations import Observation
from shardwise.values import Progress, ignore_progress, lookup

Array = NDArray[np.float64]
ConstantKey = tuple[str, str]  # whose constant, and which

# Deviation of the logarithm of a time around what is right: two runs of a dense model differ by 2-5%, and shapes by as much.
SIGMA = 0.05
# The same where a few runs are all there is: less is known of what is special about each than where hundreds agree. Of the
# folds with three runs given, the least error from 0.08 to 0.24.
SIGMA_FEW = 0.16
# In deviations, as in the fit to serving's runs: releases and configurations that no row states make large errors frequent. Of 1
# and 2 the smaller error with the source left out, mean 9.7 and 10.0%.
HUBER_THRESHOLD = 1.0
DIFFERENCE_STEP = (
    1e-3  # on the unbounded scale: small beside every prior's width, large beside the rounding of log times
)
FIXED_WIDTH = 1e-6  # of the prior of a constant that is held
LONGEST_STEP = 1.0  # of an iteration in any constant
CONVERGED = 1e-3  # decrease of the loss; half a unit is one standard deviation of a constant
# Damping is the share of the precision's diagonal that is added to it (Marquardt 1963): a step that does not lessen the loss
# multiplies it by the factor, to at least the first; one that does divides it by the decay.
FIRST_DAMPING, DAMPING_FACTOR, DAMPING_DECAY = 0.1, 4.0, 2.0
MAX_DAMPINGS = 8  # of one step


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

    @property
    def bounds(self) -> tuple[Array, Array]:
        """Least and largest points: the bounds of sizes; a fraction is between its own at every point."""
        constants = [CONSTANTS[name] for _, name in self.keys]
        ends = [(constant.low, constant.high) if constant.is_size else (0.0, math.inf) for constant in constants]
        with np.errstate(divide="ignore"):
            low, high = np.log(ends).T
        return low, high

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
    observations: Sequence[Observation], initial: ConstantFit, *, iterations: int = 40, sigma: float = SIGMA
) -> ConstantFit:
    """Take damped Gauss-Newton steps until the loss decreases by less than `CONVERGED`. `sigma` is the deviation of the
    logarithm of a time around the truth."""
    fit, damping = linearise(observations, initial), 0.0
    loss = fit_loss(observations, fit, sigma=sigma)
    for _ in range(iterations):
        for _ in range(MAX_DAMPINGS):
            step = gauss_newton_step(observations, fit, fit.point, sigma=sigma, damping=damping)
            stepped = linearise(
                observations, replace(fit, point=fit.point + np.clip(step, -LONGEST_STEP, LONGEST_STEP))
            )
            stepped_loss = fit_loss(observations, stepped, sigma=sigma)
            if stepped_loss < loss:
                break
            damping = max(FIRST_DAMPING, damping * DAMPING_FACTOR)
        else:
            return fit
        decrease, fit, loss = loss - stepped_loss, stepped, stepped_loss
        if decrease < CONVERGED:
            break
        damping /= DAMPING_DECAY
    return fit


def fit_loss(observations: Sequence[Observation], fit: ConstantFit, *, sigma: float = SIGMA) -> float:
    """Return what a fit minimises: half the squared deviations of log times and priors, linear beyond the threshold."""
    residuals = np.abs(np.log([observation.measured_s for observation in observations]) - fit.log_times)
    weights, thresholds = _weights_and_thresholds(observations, sigma)
    squared = np.where(residuals <= thresholds, residuals**2, thresholds * (2 * residuals - thresholds))
    from_prior = (fit.point - fit.prior) / fit.prior_widths
    return float(weights @ squared / sigma**2 + from_prior @ from_prior) / 2


def linearise(observations: Sequence[Observation], fit: ConstantFit) -> ConstantFit:
    """Return the fit with the logarithms of the times at its point, and their derivatives."""
    index = {key: position for position, key in enumerate(fit.keys)}
    log_times, slopes = np.zeros(len(observations)), np.zeros((len(observations), len(fit.keys)))
    _, high = fit.bounds
    for number, observation in enumerate(observations):
        columns = [index[key] for key in observation.names]
        # Column 0 is the point itself, column k + 1 moves the k-th constant: one vectorised call prices all of them.
        steps = np.where(fit.point[columns] + DIFFERENCE_STEP > high[columns], -DIFFERENCE_STEP, DIFFERENCE_STEP)
        points = fit.point[columns][:, None] + steps[:, None] * np.eye(len(columns), len(columns) + 1, 1)
        constants = {
            key[1]: CONSTANTS[key[1]].from_unbounded(coordinates)
            for key, coordinates in zip(observation.names, points, strict=True)
        }
        logs = np.broadcast_to(np.log(observation.seconds(constants)), (len(columns) + 1,))
        log_times[number], slopes[number, columns] = logs[0], (logs[1:] - logs[0]) / steps
    return replace(fit, log_times=log_times, slopes=slopes)


def gauss_newton_step(
    observations: Sequence[Observation],
    fit: ConstantFit,
    point: Array,
    chosen: Sequence[int] | None = None,
    *,
    sigma: float = SIGMA,
    damping: float = 0.0,
) -> Array:
    """Return the Gauss-Newton step from `point`, with log times linear around the point of `fit`. `chosen` are the
    indices of the observations that count; all if None. `damping` is the share of the precision's diagonal that is
    added to it, which shortens the step."""
    chosen = range(len(observations)) if chosen is None else chosen
    slopes, measured = fit.slopes[list(chosen)], np.log([observations[i].measured_s for i in chosen])
    residuals = measured - fit.log_times[list(chosen)] - slopes @ (point - fit.point)
    weights = _weights([observations[i] for i in chosen], residuals, sigma)
    precision = slopes.T @ (slopes * weights[:, None]) + np.diag(fit.prior_widths**-2)
    pull = slopes.T @ (weights * residuals) - (point - fit.prior) / fit.prior_widths**2
    return _bounded_step(precision + damping * np.diag(np.diag(precision)), pull, point, fit.bounds)


def _bounded_step(precision: Array, pull: Array, point: Array, bounds: tuple[Array, Array]) -> Array:
    """Return the step that solves `precision @ step = pull`; a constant that it would carry over a bound ends there, and
    the others are solved again."""
    (low, high), step, is_free = bounds, np.zeros(len(point)), np.ones(len(point), dtype=bool)
    while is_free.any():
        fixed_pull = precision[np.ix_(is_free, ~is_free)] @ step[~is_free]
        step[is_free] = np.linalg.solve(precision[np.ix_(is_free, is_free)], pull[is_free] - fixed_pull)
        end = point + step
        leaves = is_free & ((end < low) | (end > high))
        if not leaves.any():
            break
        step[leaves] = (np.clip(end, low, high) - point)[leaves]
        is_free &= ~leaves
    return step


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
    """Return the weights of squared residuals, less for those beyond the threshold (Huber)."""
    weights, thresholds = _weights_and_thresholds(observations, sigma)
    return np.asarray(weights / sigma**2 * np.minimum(1.0, thresholds / np.maximum(np.abs(residuals), 1e-12)))


def _weights_and_thresholds(observations: Sequence[Observation], sigma: float) -> tuple[Array, Array]:
    """Return weights and Huber thresholds.

    A weight above 1 stands for a smaller deviation, so it shrinks the threshold by its root; one below 1 stands for one
    of several copies and leaves it.
    """
    weights = np.array([observation.weight for observation in observations])
    return weights, HUBER_THRESHOLD * sigma / np.sqrt(np.maximum(weights, 1.0))


TENTHS, NUM_CALIBRATION_RUNS, DRAWS = 10, 3, 3
FOLDS = ("model", "source", "lab", "three")
REPEATED_FOLDS = ("model", "three")  # drawn at random, several times
SEED = 0
# Sources of several releases.
SOURCES = (("mbridge", r"nvidia-mbridge|mbridge"), ("dgxc", "dgxc"))
# Labs of several sources: what the name of a source starts with.
LABS = (
    ("NVIDIA", r"nvidia-|mbridge|dgxc|nemo|megatron-lm|megatron-core|megatron-ptdp|jax-toolbox|korthikanti"),
    ("Google", r"maxtext|tpu-"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldMember:
    """An observation with its source's family and the text of its model's sizes, without the model's name."""

    observation: Observation
    family: str
    model: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.observation.stack.name, self.model

    @property
    def source(self) -> str:
        """Family without its release: releases of one product are one source."""
        return next((source for source, names in SOURCES if re.match(names, self.family)), self.family)

    @property
    def lab(self) -> str:
        return next((lab for lab, names in LABS if re.match(names, self.family)), self.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitEvidence:
    """A fit to members and then to observations that are never left out."""

    members: Sequence[FoldMember]
    always_fitted: Sequence[Observation] = ()
    fitted: ConstantFit

    @property
    def observations(self) -> list[Observation]:
        """Observations of the fit, in its order."""
        return [*(member.observation for member in self.members), *self.always_fitted]


class HeldOutPrediction(NamedTuple):
    """A prediction to make for a member, by kind of fold and draw, at these constants."""

    fold: str
    draw: int
    member: int
    constants: Mapping[str, float]


def cross_validate(evidence: FitEvidence, progress: Progress = ignore_progress) -> Mapping[str, Array]:
    """Return the predicted seconds by kind of fold, [draw, member]; nan if a fold does not predict a member."""
    return _predict(evidence.members, list(_held_out_predictions(evidence, progress)), progress)


def _held_out_predictions(evidence: FitEvidence, progress: Progress) -> Iterator[HeldOutPrediction]:
    members = evidence.members
    for draw in range(DRAWS):
        progress("left out by model", draw, DRAWS)
        yield from _leave_out_groups(evidence, "model", model_folds(members, draw), draw)
    for fold in ("source", "lab"):
        progress(f"left out by {fold}")
        yield from _leave_out_groups(evidence, fold, fold_groups(members, fold), new_stacks=True)
    progress("left out by lab, with three runs given")
    yield from _give_three_runs(evidence)


def _predict(
    members: Sequence[FoldMember], requests: Sequence[HeldOutPrediction], progress: Progress
) -> Mapping[str, Array]:
    """Return the seconds by kind of fold; all predictions of a member are priced in one call."""
    by_member: dict[int, list[HeldOutPrediction]] = {}
    for request in requests:
        by_member.setdefault(request.member, []).append(request)
    seconds = {fold: np.full((DRAWS if fold in REPEATED_FOLDS else 1, len(members)), np.nan) for fold in FOLDS}
    for number, (member, group) in enumerate(by_member.items()):
        progress("held-out runs predicted", number, len(by_member))
        constants = {name: np.array([request.constants[name] for request in group]) for name in group[0].constants}
        predicted_s = np.broadcast_to(members[member].observation.seconds(constants), len(group))
        for request, value in zip(group, predicted_s, strict=True):
            seconds[request.fold][request.draw, member] = value
    return seconds


def group_key(fold: str) -> Callable[[FoldMember], Any]:
    """Return the function that maps a member to its group in a kind of fold. Raises `InputError` for another kind."""
    groups: Mapping[str, Callable[[FoldMember], Any]] = {
        "model": lambda member: member.pair, "source": lambda member: member.source, "lab": lambda member: member.lab,
        "three": lambda member: member.source,
    }  # fmt: skip
    return lookup(groups, fold, "fold")


def model_folds(members: Sequence[FoldMember], draw: int = 0) -> list[list[int]]:
    """Return the members of ten folds; all runs of a pair of stack and model fall into the same, at random."""
    pairs = sorted({member.pair for member in members})
    tenth = dict(zip(pairs, np.random.default_rng(SEED + draw).permutation(len(pairs)) % TENTHS, strict=True))
    return [[i for i, member in enumerate(members) if tenth[member.pair] == fold] for fold in range(TENTHS)]


def fold_groups(members: Sequence[FoldMember], fold: str, draw: int = 0) -> list[list[int]]:
    """Return the groups of member indices that are left out together, for a kind of fold. Raises `InputError` for
    another kind."""
    if fold == "model":
        return model_folds(members, draw)
    names = list(map(group_key(fold), members))
    return [[i for i, name in enumerate(names) if name == group] for group in sorted(set(names))]


def _leave_out_groups(
    evidence: FitEvidence, fold: str, groups: Sequence[Sequence[int]], draw: int = 0, *, new_stacks: bool = False
) -> Iterator[HeldOutPrediction]:
    for group in groups:
        point = refit_without(evidence, group, new_stacks=new_stacks)
        for i in group:
            yield HeldOutPrediction(fold, draw, i, evidence.fitted.constants_at(evidence.members[i].observation, point))


def refit_without(evidence: FitEvidence, left_out: Sequence[int], *, new_stacks: bool = False) -> Array:
    """Return the point fitted without some members; with `new_stacks` their stacks are at the priors of their kind."""
    observations, fitted = evidence.observations, evidence.fitted
    kept_indices = sorted(set(range(len(observations))) - set(left_out))
    point = fitted.point
    # Linear steps with the slopes of the fit to all, in place of a refit; the Huber weights change between them.
    for _ in range(6):
        point = point + gauss_newton_step(observations, fitted, point, kept_indices)
    if new_stacks:
        stacks = {f"stack {observations[i].stack.name}" for i in left_out}
        is_new_stack = np.array([owner in stacks for owner, _ in fitted.keys])
        point = np.where(is_new_stack, fitted.prior, point)
    return point


def _give_three_runs(evidence: FitEvidence) -> Iterator[HeldOutPrediction]:
    """Yield predictions of a source after three of its runs, drawn at random, moved the constants of the others."""
    members, fitted = evidence.members, evidence.fitted
    random = np.random.default_rng(SEED)
    for lab in (group for group in fold_groups(members, "three") if len(group) > 2 * NUM_CALIBRATION_RUNS):
        point = refit_without(evidence, lab, new_stacks=True)
        for draw in range(DRAWS):
            calibration_runs = random.choice(lab, NUM_CALIBRATION_RUNS, replace=False).tolist()
            lab_fit = fit_calibration_runs([members[i].observation for i in calibration_runs], fitted, point)
            for i in sorted(set(lab) - set(calibration_runs)):
                yield HeldOutPrediction("three", draw, i, lab_fit.constants_at(members[i].observation, lab_fit.point))


def fit_calibration_runs(observations: Sequence[Observation], fitted: ConstantFit, point: Array) -> ConstantFit:
    """Return a fit to a few runs whose priors are the constants at `point`."""
    index = {key: position for position, key in enumerate(fitted.keys)}
    initial = initial_fit(observations)
    prior = np.array([point[index[key]] for key in initial.keys])
    return fit_constants(observations, initial.with_prior(prior), iterations=6, sigma=SIGMA_FEW)
