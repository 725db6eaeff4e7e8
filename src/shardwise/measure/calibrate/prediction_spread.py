"""90% prediction intervals from errors of runs that were left out: one for each generation of chips, and for each stack on it.

How far predictions are off differs by chip and by stack: a tenth on Blackwell, half of that under llm-foundry. Few runs say how
much, and runs of one group (a model, or a source) err together. So each class has a scale, the mean absolute error of a log time,
which is drawn towards that of the class around it the more, the fewer groups it has (partial pooling). An interval is the 5th and
95th percentile of the errors over their scales, times the scale of the class.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ErrorClass = tuple[str, ...]  # from the outside in, such as (generation, stack); () is all of them

TAILS = (0.05, 0.95)
# Variance of the logarithm of a mean absolute error of n independent groups, times n: pi/2 - 1 for normal errors and many groups.
# Of few it is larger; so n - 1 are counted.
SCALE_VARIANCE = math.pi / 2.0 - 1.0
# Standard deviation of the logarithm of a class's scale around that of the class around it: a factor of e. The likelihood of
# errors that were left out grows with it up to 1.5, but by less than 0.1% from 1 on.
SCALE_WIDTH = 1.0
SMALLEST_SCALE = 1e-3  # a class of a single run that is met exactly has a scale, too


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutErrors:
    """Errors of runs whose group was left out: logarithms of measured over predicted seconds, the runs' weights, the classes
    that they are in, all of the same depth, and their groups."""

    log_ratios: Array
    weights: Array
    classes: Sequence[ErrorClass]
    groups: Sequence[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Limits of errors over their scale, and the scale of each class, the outermost of which is ()."""

    limits: tuple[float, float]
    scales: Mapping[ErrorClass, float]

    def interval(self, error_class: ErrorClass = ()) -> tuple[float, float]:
        """Return the interval as factors on a prediction: of a class without errors that of the class around it."""
        while error_class not in self.scales:
            error_class = error_class[:-1]
        low, high = (math.exp(limit * self.scales[error_class]) for limit in self.limits)
        return low, high


def fit_spread(errors: LeftOutErrors, num_groups: int) -> Spread:
    """Return the spread of errors, for a group that is none of the `num_groups` that were left out in turn.

    Runs of one group err together, so few groups show too little: the limits are wider by 1 + 3/n. The 3 was chosen so that
    intervals from the other labs and sources cover 90% of the runs of one that is left out.
    """
    scales: dict[ErrorClass, float] = {(): _mean_scale(errors, np.ones(len(errors.classes), dtype=bool))}
    for depth in range(1, max(map(len, errors.classes), default=0) + 1):
        prefixes = [error_class[:depth] for error_class in errors.classes]
        for prefix in sorted(set(prefixes)):
            scales[prefix] = _pooled_scale(errors, np.array([name == prefix for name in prefixes]), scales[prefix[:-1]])
    standardised = errors.log_ratios / np.array([scales[error_class] for error_class in errors.classes])
    low, high = weighted_percentiles(standardised, errors.weights)
    widening = 1.0 + 3.0 / num_groups
    return Spread(limits=(min(low, 0.0) * widening, max(high, 0.0) * widening), scales=scales)


def _pooled_scale(errors: LeftOutErrors, is_member: NDArray[np.bool_], outer_scale: float) -> float:
    """Return the scale of a class, drawn towards that of the class around it; one group alone says nothing of another."""
    share = group_share({group for group, inside in zip(errors.groups, is_member, strict=True) if inside})
    return float(outer_scale * (_mean_scale(errors, is_member) / outer_scale) ** share)


def group_share(groups: Collection[Hashable]) -> float:
    """Return how much the errors of some groups count for their class beside those of the class around it: 0 for one group, which
    says nothing of another.

    >>> [round(group_share(range(number)), 2) for number in (1, 2, 5)]
    [0.0, 0.64, 0.88]
    """
    num_others = len(groups) - 1
    return num_others / (num_others + SCALE_VARIANCE / SCALE_WIDTH**2)


def _mean_scale(errors: LeftOutErrors, is_member: NDArray[np.bool_]) -> float:
    mean = np.average(np.abs(errors.log_ratios[is_member]), weights=errors.weights[is_member])
    return max(float(mean), SMALLEST_SCALE)


def weighted_percentiles(values: Array, weights: Array) -> tuple[float, float]:
    """Return the weighted 5th and 95th percentiles of values."""
    low, high = (weighted_quantile(values, weights, tail) for tail in TAILS)
    return low, high


def weighted_quantile(values: Array, weights: Array, quantile: float) -> float:
    """Return the least value that a share of the weights is at or below."""
    order = np.argsort(values)
    shares = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(shares, quantile * shares[-1])])
