"""The noise scale that a run measured as plain data: what `shardwise batch noise --json` prints."""

from __future__ import annotations

import math
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.batch.samples import MeasuredNoise
from shardwise.planning.run_noise import RunNoise

SCHEMA = "shardwise.batch_noise/1"


class MeasuredPayload(TypedDict):
    """A noise scale in tokens with its 90% interval, null where it has no end, tr(Sigma) and |G|² that it is the ratio of, and
    how many steps measured it."""

    tokens: float | None
    interval90: tuple[float, float | None]
    covariance_trace: float
    squared_gradient: float
    num_measured: int


class PartPayload(TypedDict):
    """That of some steps in a row, with the mean of the tokens seen before them and their mean loss."""

    first_step: int
    last_step: int
    seen_tokens: float
    loss: float
    noise: MeasuredPayload


class RunNoisePayload(TypedDict):
    """The noise scale that a run measured. `progress` is the share of the true gradient's progress that a step makes."""

    schema: Literal["shardwise.batch_noise/1"]
    run: str
    noise: MeasuredPayload
    parts: list[PartPayload]
    num_measured: int
    batch_tokens: float
    small_tokens: float
    progress: float


def run_noise_payload(found: RunNoise) -> dict[str, Any]:
    """What `shardwise batch noise --json` prints."""
    return {
        "schema": SCHEMA, "run": str(found.path), "noise": _measured_payload(found.late),
        "parts": [
            {
                "first_step": one.first_step, "last_step": one.last_step, "seen_tokens": one.seen_tokens, "loss": one.loss,
                "noise": _measured_payload(one.measured),
            }
            for one in found.parts
        ],
        "num_measured": found.num_measured, "batch_tokens": found.batch_tokens, "small_tokens": found.small_tokens,
        "progress": found.progress,
    }  # fmt: skip


def _measured_payload(found: MeasuredNoise) -> dict[str, Any]:
    tokens, high = (None if one == math.inf else one for one in (found.tokens, found.high))
    return {
        "tokens": tokens, "interval90": [found.low, high], "covariance_trace": found.noise.covariance_trace,
        "squared_gradient": found.noise.squared_gradient, "num_measured": found.num_samples,
    }  # fmt: skip
