"""Factors on the predictions of an engine, from measurements on one cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardwise.values import FileMessages, InputError, parse_dataclass, raise_problems, read_json, short_repr

CALIBRATION_SCHEMA = "shardwise.serving_calibration/1"
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


def load_serving_calibration(path: str | os.PathLike[str], *, engine: str, chip: str) -> ServingCalibration:
    """Return the calibration of a file that `shardwise calibrate` wrote, for an engine on a chip.

    Raises `InputError` for a file that is none, and for one of another engine or chip.
    """
    label = f"calibration {os.fspath(path)}"
    payload = read_json(Path(path), FileMessages("calibration: "), finite=True)
    schema = payload.get("schema") if isinstance(payload, dict) else type(payload).__name__
    if not isinstance(payload, dict) or schema != CALIBRATION_SCHEMA:
        raise InputError(
            f"{label}: found schema {short_repr(schema)}; {CALIBRATION_SCHEMA!r} is required: `shardwise calibrate RESULTS "
            "--cluster CLUSTER --launch LAUNCH --out FILE` writes one"
        )
    raise_problems(
        [
            f"{label}: it is of {name} {short_repr(payload.get(name))}; {value!r} is required, as what is estimated"
            for name, value in (("engine", engine), ("chip", chip))
            if payload.get(name) != value
        ]
    )
    return parse_dataclass(ServingCalibration, payload.get("calibration"), f"{label}: calibration")
