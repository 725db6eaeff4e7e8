"""Relative errors of predicted latencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.values import Payload

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingErrors(Payload):
    """Relative errors of one latency: `median`, `mean` and 90th percentile."""

    num_rows: int
    median: float
    mean: float
    percentile_90: float

    @classmethod
    def of(cls, residuals: Array) -> ServingErrors:
        """Return the errors of logarithms of predictions over measurements."""
        errors = np.abs(np.expm1(residuals))
        return cls(
            num_rows=len(errors), median=float(np.median(errors)), mean=float(errors.mean()),
            percentile_90=float(np.percentile(errors, 90)),
        )  # fmt: skip
