"""A fitted trade-off as plain data: what `shardwise batch fit --json` prints."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.batch.fit import TradeoffFit

SCHEMA = "shardwise.batch_fit/1"


class FittedRunPayload(TypedDict):
    """A run that reached the loss: measured and fitted steps, and the logarithm of their ratio."""

    batch_tokens: float
    seed: int
    learning_rate: float | None
    steps: float
    tokens: float
    fitted_steps: float
    residual: float


class FailedRunPayload(TypedDict):
    """A run that did not reach the loss, and why."""

    batch_tokens: float
    seed: int
    learning_rate: float | None
    failed: str


class BatchFitPayload(TypedDict):
    """S_min, E_min and the critical batch of a sweep's runs, with 90% bootstrap intervals, and what each run is off."""

    schema: Literal["shardwise.batch_fit/1"]
    min_steps: float
    min_steps_interval90: tuple[float, float]
    min_tokens: float
    min_tokens_interval90: tuple[float, float]
    critical_batch_tokens: float
    critical_batch_interval90: tuple[float, float]
    critical_batch_within_runs: bool
    rms_residual: float
    target_loss: float | None
    runs: list[FittedRunPayload]
    not_reached: list[FailedRunPayload]


def fit_payload(found: TradeoffFit) -> dict[str, Any]:
    """The versioned payload."""
    law = found.tradeoff
    return {
        "schema": SCHEMA,
        "min_steps": law.min_steps, "min_steps_interval90": list(found.min_steps_interval90),
        "min_tokens": law.min_tokens, "min_tokens_interval90": list(found.min_tokens_interval90),
        "critical_batch_tokens": law.critical_batch_tokens,
        "critical_batch_interval90": list(found.critical_batch_interval90),
        "critical_batch_within_runs": found.within, "rms_residual": found.rms_residual, "target_loss": found.target_loss,
        "runs": [
            {
                "batch_tokens": one.run.batch_tokens, "seed": one.run.seed, "learning_rate": one.run.learning_rate,
                "steps": one.run.steps, "tokens": one.run.tokens, "fitted_steps": one.fitted_steps, "residual": one.residual,
            }
            for one in found.runs
        ],
        "not_reached": [
            {"batch_tokens": run.batch_tokens, "seed": run.seed, "learning_rate": run.learning_rate, "failed": run.failed}
            for run in found.not_reached
        ],
    }  # fmt: skip
