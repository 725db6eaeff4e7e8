"""What kind of number an estimate is: a bound, or a prediction."""

from __future__ import annotations

from shardwise.present.explore.asked import Asked

BYTES = "a prediction: the bytes of what the instruction list holds"
BOUND = "a bound: kernels and links at the best that micro-benchmarks reach"


def kind_of(asked: Asked, *, memory: bool = False) -> str:
    """The kind of a layout's seconds (`memory`: of its bytes) in words."""
    calibration = asked.cluster.calibration
    if memory:
        return BYTES
    if calibration is None:
        return BOUND
    return f"a prediction for {calibration.stack}, with a 90% interval of the step: {calibration.source}"
