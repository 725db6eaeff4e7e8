"""Factors on the predictions of an engine, from measurements on one cluster."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.values import raise_problems

LEAST_FACTOR, LARGEST_FACTOR = 0.05, 20.0  # beyond these another configuration was measured than the one that is priced


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCalibration:
    """Factors on the seconds of passes, and on those of first tokens beside, from `num_results` measurements."""

    pass_factor: float
    first_token_factor: float = 1.0
    num_results: int = 0

    def __post_init__(self) -> None:
        raise_problems(
            [
                f"calibration: {name} is {value:g}; {LEAST_FACTOR:g} to {LARGEST_FACTOR:g} is required"
                for name in ("pass_factor", "first_token_factor")
                if not LEAST_FACTOR <= (value := getattr(self, name)) <= LARGEST_FACTOR
            ]
        )
