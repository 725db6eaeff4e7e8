"""The kind of a layout's numbers in words: a bound, or a prediction."""

from __future__ import annotations

from shardwise.present.explorer.request import ViewRequest

BYTES = "a prediction: the bytes of what the instruction list holds"
BOUND = "a bound: kernels and links at the best that micro-benchmarks reach"


def kind_of(request: ViewRequest, *, memory: bool = False) -> str:
    """Return the kind of a layout's seconds (`memory`: of its bytes) in words."""
    calibration = request.cluster.calibration
    if memory:
        return BYTES
    if calibration is None:
        return BOUND
    return f"a prediction for {calibration.stack}, with a 90% interval of the step: {calibration.source}"
