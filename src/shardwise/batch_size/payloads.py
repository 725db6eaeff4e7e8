"""Fits, runs of sweeps, branches and measured noise scales as plain data: what `shardwise batch ... --json` prints."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.batch_size.batch_sweep_fit import SweepFit, SweptRuns
from shardwise.batch_size.branch_losses import BranchOutcome
from shardwise.batch_size.noise_estimators import MeasuredNoise
from shardwise.batch_size.run_noise import RunNoise

FIT_SCHEMA = "shardwise.batch_fit/1"


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


def fit_payload(sweep: SweepFit) -> dict[str, Any]:
    """Return the versioned payload of a fit."""
    fit, law = sweep.fit, sweep.fit.tradeoff
    return {
        "schema": FIT_SCHEMA,
        "min_steps": law.min_steps, "min_steps_interval90": list(fit.min_steps_interval90),
        "min_tokens": law.min_tokens, "min_tokens_interval90": list(fit.min_tokens_interval90),
        "critical_batch_tokens": law.critical_batch_tokens,
        "critical_batch_interval90": list(fit.critical_batch_interval90),
        "critical_batch_within_runs": fit.within, "rms_residual": fit.rms_residual, "target_loss": fit.target_loss,
        "runs": [
            {
                "batch_tokens": fitted.run.batch_tokens, "seed": fitted.run.seed, "learning_rate": fitted.run.learning_rate,
                "steps": fitted.run.steps, "tokens": fitted.run.tokens, "fitted_steps": fitted.fitted_steps,
                "residual": fitted.residual,
            }
            for fitted in fit.runs
        ],
        "not_reached": [
            {"batch_tokens": run.batch_tokens, "seed": run.seed, "learning_rate": run.learning_rate, "failed": run.failed}
            for run in fit.not_reached
        ],
    }  # fmt: skip


RUNS_SCHEMA = "shardwise.batch_runs/1"


class BatchRunPayload(TypedDict):
    """A run: its steps and tokens to the loss, None where it did not reach it, which `failed` says."""

    batch_tokens: float
    learning_rate: float | None
    seed: int
    steps: float | None
    tokens: float | None
    target_loss: float | None
    failed: str | None


class BatchRunsPayload(TypedDict):
    """All runs of a sweep over batches, those with a learning rate that is not the best of their batch too."""

    schema: Literal["shardwise.batch_runs/1"]
    runs: list[BatchRunPayload]


def batch_runs_payload(swept: SweptRuns) -> dict[str, Any]:
    """Return the versioned payload of a sweep's runs."""
    names = tuple(BatchRunPayload.__annotations__)
    return {"schema": RUNS_SCHEMA, "runs": [{name: getattr(run, name) for name in names} for run in swept.runs]}


BRANCHES_SCHEMA = "shardwise.batch_branches/1"


class BranchPayload(TypedDict):
    """A branch: its smoothed loss at the window's end, how far it is above the lowest of all smaller batches, and whether that is
    within the tolerance; None and why where it failed."""

    batch_tokens: float
    learning_rate: float
    steps: float
    loss: float | None
    held_out_loss: float | None
    excess: float | None
    is_within: bool | None
    failed: str | None


class BatchBranchesPayload(TypedDict):
    """Branches of a checkpoint, and the critical batch: the largest within the tolerance, in nats, of all smaller ones.
    `next_tokens` is the next larger batch that was tried."""

    schema: Literal["shardwise.batch_branches/1"]
    run: str
    step: int
    batch_tokens: float
    learning_rate: float
    window_tokens: float
    tolerance: float
    critical_batch_tokens: float
    next_tokens: float | None
    branches: list[BranchPayload]


def branches_payload(outcome: BranchOutcome) -> dict[str, Any]:
    """Return the versioned payload of compared branches."""
    point, compared = outcome.point, outcome.compared
    branches = [
        asdict(comparison.branch) | {"excess": comparison.excess, "is_within": comparison.is_within}
        for comparison in compared.compared
    ]
    branches += [asdict(branch) | {"excess": None, "is_within": None} for branch in compared.failed]
    return {
        "schema": BRANCHES_SCHEMA, **asdict(point), "tolerance": compared.tolerance,
        "critical_batch_tokens": compared.critical_batch_tokens, "next_tokens": compared.next_tokens, "branches": branches,
    }  # fmt: skip


RUN_NOISE_SCHEMA = "shardwise.batch_noise/1"


class MeasuredNoisePayload(TypedDict):
    """A noise scale in tokens with its 90% interval, null where it has no end, tr(Sigma) and |G|² that it is the ratio of, and
    how many steps measured it."""

    tokens: float | None
    interval90: tuple[float, float | None]
    covariance_trace: float
    squared_gradient: float
    num_measured: int


class NoiseWindowPayload(TypedDict):
    """That of some steps in a row, with the mean of the tokens seen before them and their mean loss."""

    first_step: int
    last_step: int
    seen_tokens: float
    loss: float
    noise: MeasuredNoisePayload


class RunNoisePayload(TypedDict):
    """The noise scale that a run measured. `progress` is the share of the true gradient's progress that a step makes."""

    schema: Literal["shardwise.batch_noise/1"]
    run: str
    noise: MeasuredNoisePayload
    parts: list[NoiseWindowPayload]
    num_measured: int
    batch_tokens: float
    small_tokens: float
    progress: float


def run_noise_payload(noise: RunNoise) -> dict[str, Any]:
    """Return the versioned payload of a run's noise scale: `shardwise batch noise --json` prints it."""
    return {
        "schema": RUN_NOISE_SCHEMA, "run": str(noise.path), "noise": _measured_noise_payload(noise.late),
        "parts": [
            {
                "first_step": part.first_step, "last_step": part.last_step, "seen_tokens": part.seen_tokens, "loss": part.loss,
                "noise": _measured_noise_payload(part.measured),
            }
            for part in noise.parts
        ],
        "num_measured": noise.num_measured, "batch_tokens": noise.batch_tokens, "small_tokens": noise.small_tokens,
        "progress": noise.progress,
    }  # fmt: skip


def _measured_noise_payload(measured: MeasuredNoise) -> dict[str, Any]:
    tokens, high = (None if bound == math.inf else bound for bound in (measured.tokens, measured.high))
    return {
        "tokens": tokens, "interval90": [measured.low, high], "covariance_trace": measured.noise.covariance_trace,
        "squared_gradient": measured.noise.squared_gradient, "num_measured": measured.num_samples,
    }  # fmt: skip
