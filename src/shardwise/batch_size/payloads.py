"""Fits, runs of sweeps, branches and measured noise scales as plain data: what `shardwise batch ... --json` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from shardwise.batch_size.batch_sweep_fit import SweepFit, SweptRuns
from shardwise.batch_size.branch_losses import Branch, BranchOutcome, BranchPoint
from shardwise.batch_size.noise_estimators import MeasuredNoise
from shardwise.batch_size.run_noise import RunNoise
from shardwise.values import Flat, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRunRecord(Payload):
    """A run that reached the loss: measured and fitted steps, and the logarithm of their ratio."""

    batch_tokens: float
    seed: int
    learning_rate: float | None
    steps: float
    tokens: float
    fitted_steps: float
    residual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRunRecord(Payload):
    """A run that did not reach the loss, and why."""

    batch_tokens: float
    seed: int
    learning_rate: float | None
    failed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFitRecord(Payload):
    """S_min, E_min and the critical batch of a sweep's runs, with 90% bootstrap intervals, and what each run is off."""

    SCHEMA = "shardwise.batch_fit/1"
    min_steps: float
    min_steps_interval90: tuple[float, float]
    min_tokens: float
    min_tokens_interval90: tuple[float, float]
    critical_batch_tokens: float
    critical_batch_interval90: tuple[float, float]
    critical_batch_within_runs: bool
    rms_residual: float
    target_loss: float | None
    runs: Sequence[FittedRunRecord]
    not_reached: Sequence[FailedRunRecord]

    @classmethod
    def of(cls, sweep: SweepFit) -> SweepFitRecord:
        """Return the record of a fit."""
        fit = sweep.fit
        return cls.from_attributes(
            fit, fit.tradeoff, critical_batch_within_runs=fit.within,
            runs=[FittedRunRecord.from_attributes(fitted, fitted.run) for fitted in fit.runs],
            not_reached=[FailedRunRecord.from_attributes(run) for run in fit.not_reached],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRunRecord(Payload):
    """A run: its steps and tokens to the loss, None where it did not reach it, which `failed` says."""

    batch_tokens: float
    learning_rate: float | None
    seed: int
    steps: float | None
    tokens: float | None
    target_loss: float | None
    failed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRunsRecord(Payload):
    """Runs of a sweep over batches, including those whose learning rate is not the best of their batch."""

    SCHEMA = "shardwise.batch_runs/1"
    runs: Sequence[BatchRunRecord]

    @classmethod
    def of(cls, swept: SweptRuns) -> SweptRunsRecord:
        """Return the record of a sweep's runs."""
        return cls(runs=[BatchRunRecord.from_attributes(run) for run in swept.runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRecord(Payload):
    """A branch: its smoothed loss at the window's end, how far it is above the lowest of all smaller batches, and whether that is
    within the tolerance; None and why where it failed."""

    branch: Annotated[Branch, Flat]
    excess: float | None = None
    is_within: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchesRecord(Payload):
    """Branches of a checkpoint, and the critical batch: the largest within the tolerance, in nats, of all smaller ones.
    `next_tokens` is the next larger batch that was tried."""

    SCHEMA = "shardwise.batch_branches/1"
    point: Annotated[BranchPoint, Flat]
    tolerance: float
    critical_batch_tokens: float
    next_tokens: float | None
    branches: Sequence[BranchRecord]

    @classmethod
    def of(cls, outcome: BranchOutcome) -> BranchesRecord:
        """Return the record of compared branches."""
        compared = outcome.compared
        branches = [BranchRecord.from_attributes(comparison) for comparison in compared.compared]
        branches += [BranchRecord(branch=branch) for branch in compared.failed]
        return cls.from_attributes(outcome, compared, branches=branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNoiseRecord(Payload):
    """A noise scale in tokens with its 90% interval, null where it has no end, tr(Sigma) and |G|² that it is the ratio of, and
    how many steps measured it."""

    tokens: float | None
    interval90: tuple[float, float | None]
    covariance_trace: float
    squared_gradient: float
    num_measured: int

    @classmethod
    def of(cls, measured: MeasuredNoise) -> MeasuredNoiseRecord:
        """Return the record of a measured noise scale."""
        tokens, high = (None if bound == math.inf else bound for bound in (measured.tokens, measured.high))
        return cls.from_attributes(
            measured.noise, tokens=tokens, interval90=(measured.low, high), num_measured=measured.num_samples
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseWindowRecord(Payload):
    """Noise scale over consecutive steps, with the mean of the tokens seen before them and their mean loss."""

    first_step: int
    last_step: int
    seen_tokens: float
    loss: float
    noise: MeasuredNoiseRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNoiseRecord(Payload):
    """The noise scale that a run measured. `progress` is the share of the true gradient's progress that a step makes."""

    SCHEMA = "shardwise.batch_noise/1"
    run: str
    noise: MeasuredNoiseRecord
    parts: Sequence[NoiseWindowRecord]
    num_measured: int
    batch_tokens: float
    small_tokens: float
    progress: float

    @classmethod
    def of(cls, noise: RunNoise) -> RunNoiseRecord:
        """Return the record of a run's noise scale."""
        parts = [
            NoiseWindowRecord.from_attributes(part, noise=MeasuredNoiseRecord.of(part.measured)) for part in noise.parts
        ]
        return cls.from_attributes(noise, run=str(noise.path), noise=MeasuredNoiseRecord.of(noise.late), parts=parts)
