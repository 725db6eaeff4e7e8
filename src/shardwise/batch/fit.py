"""The fewest steps and tokens of the Pareto law, fitted to the runs of a sweep over batches.

In logarithms of steps, ln S = ln S_min + ln(1 + B_noise / B): runs of all batches have about the same relative scatter, where
steps themselves differ by orders of magnitude. Residuals beyond `HUBER` deviations of most pull no more than linearly (Huber
1964). For a given B_noise the best S_min is a weighted mean, so that one number is searched for: on a grid of logarithms, which
finds the global minimum, and then between its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.batch.runs import BatchRun, best_runs
from shardwise.batch.tradeoff import BatchTradeoff
from shardwise.errors import InputError
from shardwise.units import format_quantity

Array = NDArray[np.float64]
HUBER = 2.0  # deviations: 95% efficient for normal errors is 1.345, which would weigh down a seventh of good runs
LEAST_SIGMA = 1e-6  # of logarithms: exact points have no scatter
MARGIN = 1e3  # how far beyond the batches B_noise is searched for, as a factor
NUM_GRID = 241
NUM_REFINED = 60  # halvings between the neighbours of the grid's best
NUM_REWEIGHTED = 8
NUM_BOOTSTRAP = 1000
LEAST_BATCHES = 3
NUM_PARAMETERS = 2  # which take up part of the scatter
QUANTILES = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRun:
    """A run that was fitted, with the steps of the law; `residual` is the logarithm of measured over fitted steps."""

    run: BatchRun
    fitted_steps: float
    residual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffFit:
    """S_min and B_noise of a sweep's runs, with 90% bootstrap intervals of S_min, E_min and B_crit = E_min / S_min.

    `rms_residual` is of logarithms: 0.05 is a scatter of 5%. `not_reached` are the runs that say nothing of steps. `within` is
    False where the batches lie on one side of the critical batch, which then is extrapolated.

    >>> law = BatchTradeoff(min_steps=100, noise_tokens=8)
    >>> found = fit_tradeoff([BatchRun(batch_tokens=batch, steps=law.steps(batch)) for batch in (4, 8, 16)])
    >>> found.within, round(found.tradeoff.critical_batch_tokens, 6)
    (True, 8.0)
    """

    tradeoff: BatchTradeoff
    runs: tuple[FittedRun, ...]
    not_reached: tuple[BatchRun, ...]
    min_steps_interval90: tuple[float, float]
    min_tokens_interval90: tuple[float, float]
    critical_batch_interval90: tuple[float, float]
    rms_residual: float

    @property
    def batches(self) -> tuple[float, ...]:
        """The batches that were fitted, the smallest first."""
        return tuple(sorted({one.run.batch_tokens for one in self.runs}))

    @property
    def target_loss(self) -> float | None:
        """The loss that the runs reached; None where they do not say one."""
        return self.runs[0].run.target_loss

    @property
    def within(self) -> bool:
        """Whether the critical batch lies between the smallest and the largest batch."""
        return self.batches[0] <= self.tradeoff.critical_batch_tokens <= self.batches[-1]


def fit_tradeoff(runs: Sequence[BatchRun], *, num_bootstrap: int = NUM_BOOTSTRAP, seed: int = 0) -> TradeoffFit:
    """Fit S(B) = S_min · (1 + B_noise / B) to the runs that reached the loss, the best of each batch and seed.

    Least squares of the logarithms of steps, robust to single runs that are off. Intervals: the fit to `num_bootstrap` samples
    of the residuals (with `seed`). Raises `InputError` for
    fewer than three batches and for runs whose steps do not fall with the batch. Source: McCandlish et al. 2018, equation 2.11;
    the note, E.2 (24).

    >>> exact = BatchTradeoff(min_steps=50_000, noise_tokens=2e6)
    >>> runs = [BatchRun(batch_tokens=2e6 * r, steps=exact.steps(2e6 * r)) for r in (0.25, 1, 4)]
    >>> found = fit_tradeoff(runs)
    >>> round(found.tradeoff.min_steps), round(found.tradeoff.min_tokens)
    (50000, 100000000000)
    """
    best = best_runs(tuple(runs))
    reached = [run for run in best if run.steps is not None]
    _require_enough(reached)
    batches = np.array([run.batch_tokens for run in reached])
    logs = np.log(np.array([run.steps for run in reached], dtype=np.float64))
    found = _fitted(batches, logs)
    fitted = _log_steps(found, batches)
    samples = _bootstrap(batches, logs, fitted, num_bootstrap, seed)
    return TradeoffFit(
        tradeoff=found, not_reached=tuple(run for run in best if run.steps is None),
        runs=tuple(
            FittedRun(run=run, fitted_steps=math.exp(of_law), residual=float(measured - of_law))
            for run, measured, of_law in zip(reached, logs, fitted, strict=True)
        ),
        min_steps_interval90=_interval([one.min_steps for one in samples]),
        min_tokens_interval90=_interval([one.min_tokens for one in samples]),
        critical_batch_interval90=_interval([one.critical_batch_tokens for one in samples]),
        rms_residual=float(np.sqrt(np.mean((logs - fitted) ** 2))),
    )  # fmt: skip


def _require_enough(reached: Sequence[BatchRun]) -> None:
    losses = sorted({run.target_loss for run in reached if run.target_loss is not None})
    if len(losses) > 1:
        raise InputError(
            f"fit: found runs to losses of {', '.join(f'{loss:g}' for loss in losses)}; one loss is required"
        )
    batches = sorted({run.batch_tokens for run in reached})
    if len(batches) < LEAST_BATCHES:
        shown = ", ".join(format_quantity(batch) for batch in batches) or "none"
        raise InputError(
            f"fit: found runs that reached the loss with batches of {shown} tokens; at least {LEAST_BATCHES} batches are required"
        )
    steps = {batch: np.median([run.steps for run in reached if run.batch_tokens == batch]) for batch in batches}
    if steps[batches[0]] <= steps[batches[-1]]:
        raise InputError(
            f"fit: found {steps[batches[0]]:,.0f} steps with the smallest batch and {steps[batches[-1]]:,.0f} with the largest; "
            "steps that fall with the batch are required: is the learning rate of each batch tuned?"
        )


def _log_steps(found: BatchTradeoff, batches: Array) -> Array:
    return np.asarray(math.log(found.min_steps) + np.log1p(found.noise_tokens / batches))


def _fitted(batches: Array, logs: Array) -> BatchTradeoff:
    """Huber's weights from the residuals of the fit before; the first fit has equal weights."""
    weights = np.ones_like(logs)
    found = _least_squares(batches, logs, weights)
    for _ in range(NUM_REWEIGHTED):
        residuals = np.abs(logs - _log_steps(found, batches))
        sigma = max(1.4826 * float(np.median(residuals)), LEAST_SIGMA)  # of normal errors, from their median
        weights = np.minimum(1.0, HUBER * sigma / np.maximum(residuals, LEAST_SIGMA))
        found = _least_squares(batches, logs, weights)
    return found


def _least_squares(batches: Array, logs: Array, weights: Array) -> BatchTradeoff:
    def judged(log_noise: Array) -> tuple[Array, Array]:
        """The sum of squares for each B_noise, and ln S_min there."""
        rest = logs - np.log1p(np.exp(log_noise)[:, None] / batches)
        means = (rest * weights).sum(axis=1) / weights.sum()
        return (weights * (rest - means[:, None]) ** 2).sum(axis=1), means

    grid = np.linspace(math.log(batches.min() / MARGIN), math.log(batches.max() * MARGIN), NUM_GRID)
    at = int(np.argmin(judged(grid)[0]))
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, NUM_GRID - 1)]
    for _ in range(NUM_REFINED):
        thirds = np.array([low + (high - low) / 3.0, high - (high - low) / 3.0])
        left, right = judged(thirds)[0]
        low, high = (low, thirds[1]) if left < right else (thirds[0], high)
    log_noise = np.array([(low + high) / 2.0])
    return BatchTradeoff(min_steps=math.exp(judged(log_noise)[1][0]), noise_tokens=math.exp(log_noise[0]))


def _bootstrap(batches: Array, logs: Array, fitted: Array, count: int, seed: int) -> list[BatchTradeoff]:
    """Fits to the law's steps with residuals drawn with replacement: they scatter alike at all batches, in logarithms."""
    random = np.random.default_rng(seed)
    residuals = (logs - fitted) * math.sqrt(len(logs) / (len(logs) - NUM_PARAMETERS))
    drawn = (fitted + random.choice(residuals, len(logs)) for _ in range(count))
    return [_least_squares(batches, sample, np.ones(len(logs))) for sample in drawn]


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(values, QUANTILES)
    return float(low), float(high)
