"""Compare a sharded run in a plan's own precision with one process in it, by the distance of both from float64.

In a low precision no two orders of summation agree, so there is no limit on the difference of the two runs. But both have the
same sources of rounding, so that one of them is hardly farther from the exact values than the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.verify.training.compare_runs import CaseResult, Values

# How many times as far from float64 as one process the sharded run may be: twice in the gradients of the first step, which are
# of the same weights (docs/design.md). After that an adaptive optimizer has turned rounding of small gradients into full steps,
# other ones in each run: over models, layouts and recipes the distances were then 0.7 to 1.6 times as large.
ROUNDING_LIMITS: Mapping[str, float] = {"first_gradients": 2.0, "later_gradients": 3.0, "weights": 3.0}
# Of the size of the gradients: if one process is farther from float64 in the first step, that is no rounding, and a comparison
# with it says nothing. The coarsest recipes have a sixth.
MAX_SINGLE = 0.5
# Of the size of the tensors: one process may be nearer than this to float64 by luck alone.
SMALLEST_DISTANCE = 1e-6


class RoundingErrors(NamedTuple):
    """Distances from float64 over the size of the exact values, of all tensors together: ‖values - exact‖ / ‖exact‖."""

    sharded: float
    single: float

    @property
    def ratio(self) -> float:
        """How many times as far the sharded run is; infinite if only that one has values that are not finite."""
        if not math.isfinite(self.single) and not math.isfinite(self.sharded):
            return 1.0  # gradients of a scaled loss that overflow in both runs, which skip the step
        if not math.isfinite(self.sharded) or not math.isfinite(self.single):
            return math.inf
        return self.sharded / max(self.single, SMALLEST_DISTANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionComparison:
    """Rounding of a sharded run in a precision beside that of one process, by the names of `ROUNDING_LIMITS`."""

    precision: str
    errors: Mapping[str, RoundingErrors]

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as far from float64 as one process the sharded run is."""
        return {name: errors.ratio for name, errors in self.errors.items()}

    @property
    def ok(self) -> bool:
        single = self.errors["first_gradients"].single
        if math.isfinite(single) and single > MAX_SINGLE:
            return False
        return all(ratio <= ROUNDING_LIMITS[name] for name, ratio in self.ratios.items())


def compare_precision(
    precision: str, sharded: CaseResult, single: CaseResult, exact: CaseResult
) -> PrecisionComparison:
    """Return the rounding of a sharded run and of one process, against one process in float64 with the same tokens; of later
    steps those of the step with the largest ratio."""
    first, *later = _gradient_errors(sharded, single, exact)
    errors = {"first_gradients": first}
    if later:
        errors["later_gradients"] = max(later, key=lambda step: step.ratio)
    errors["weights"] = _rounding_errors(sharded.weights, single.weights, exact.weights)
    return PrecisionComparison(precision=precision, errors=errors)


def _gradient_errors(sharded: CaseResult, single: CaseResult, exact: CaseResult) -> Iterator[RoundingErrors]:
    for tensors in zip(sharded.gradients, single.gradients, exact.gradients, strict=True):
        yield _rounding_errors(*tensors)


def _rounding_errors(
    sharded: Mapping[str, Values], single: Mapping[str, Values], exact: Mapping[str, Values]
) -> RoundingErrors:
    return RoundingErrors(_distance(sharded, exact), _distance(single, exact))


def _distance(tensors: Mapping[str, Values], exact: Mapping[str, Values]) -> float:
    """Return ‖tensors - exact‖ / ‖exact‖; infinity if a tensor is missing."""
    if any(name not in tensors or tensors[name].shape != values.shape for name, values in exact.items()):
        return math.inf
    squares = math.fsum(float(np.square(tensors[name] - values).sum()) for name, values in exact.items())
    size = math.fsum(float(np.square(values).sum()) for values in exact.values())
    return math.sqrt(squares / size) if size else math.inf if squares else 0.0
