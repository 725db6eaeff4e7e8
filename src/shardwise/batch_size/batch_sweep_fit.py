"""The runs of a sweep over batches, and the fewest steps and tokens of the Pareto law, fitted to them.

A folder of a sweep has `runs.jsonl`, a line for each run: {"batch_tokens", "learning_rate", "seed", "steps", "tokens", "loss",
"target_loss", "failed"}; `steps` is null where the loss was not reached, `failed` null or the reason. A CSV file has the
columns batch_tokens and steps, and may have seed.

The fit is of logarithms of steps, ln S = ln S_min + ln(1 + B_noise / B): runs of all batches have about the same relative
scatter, where steps themselves differ by orders of magnitude. Residuals above `HUBER` standard deviations pull only linearly
(Huber 1964). For a given B_noise the best S_min is a weighted mean, so only B_noise is searched for: on a grid of logarithms,
which finds the global minimum, and then between its neighbours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.batch_size.json_rows import not_an_object_text, parse_json_lines, read_positive, read_required_text
from shardwise.batch_size.tradeoff import BatchTradeoff
from shardwise.values import InputError, format_quantity, parse_csv_records, parse_digits, raise_problems, short_repr

RUNS_FILE = "runs.jsonl"  # of a sweep's folder
NOT_REACHED = "the loss was not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """One run of a sweep: its batch in tokens, its steps to the loss (None where it did not reach it, which `failed` says),
    its seed.

    >>> run = BatchRun(batch_tokens=4096, steps=1200, seed=1)
    >>> run.tokens, run.reached
    (4915200, True)
    """

    batch_tokens: float
    steps: float | None
    seed: int = 0
    learning_rate: float | None = None
    target_loss: float | None = None
    failed: str | None = None

    @property
    def reached(self) -> bool:
        """True if the run reached the loss."""
        return self.steps is not None

    @property
    def tokens(self) -> float | None:
        """Tokens to the loss: B · S; None where it was not reached."""
        return None if self.steps is None else self.batch_tokens * self.steps


def read_batch_runs(path: str | os.PathLike[str]) -> tuple[BatchRun, ...]:
    """Return the runs of a sweep's folder, of its `runs.jsonl`, or of a CSV file. Raises `InputError` with every line that is
    wrong.

    All learning rates of a batch and seed are included: `select_best_runs` returns the best of them.
    """
    runs_file = Path(path)
    runs_file = runs_file / RUNS_FILE if runs_file.is_dir() else runs_file
    text = read_required_text(
        runs_file, f"the folder of a sweep with a {RUNS_FILE}, or a CSV file with batch_tokens and steps,"
    )
    rows = _csv_rows(text, runs_file) if runs_file.suffix.lower() == ".csv" else parse_json_lines(text, runs_file)
    runs, problems = [], []
    for location, row in rows:
        run, row_problems = _parse_run(row, location)
        runs += [run] if run else []
        problems += row_problems
    raise_problems(problems)
    if not runs:
        raise InputError(f"{runs_file}: found no runs; a line for each run is required")
    return tuple(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRuns:
    """All runs of a sweep in a folder; `to_loss` is the loss in nats at which each ended, as it was written."""

    folder: str
    to_loss: str
    runs: tuple[BatchRun, ...]


def select_best_runs(runs: tuple[BatchRun, ...]) -> tuple[BatchRun, ...]:
    """Return the fastest run of each batch size and seed, by batch and seed.

    A batch and seed of which no run reached the loss keeps one that did not.

    >>> [run.steps for run in select_best_runs((BatchRun(batch_tokens=8, steps=30), BatchRun(batch_tokens=8, steps=20)))]
    [20]
    """
    best: dict[tuple[float, int], BatchRun] = {}
    for run in sorted(runs, key=lambda candidate: math.inf if candidate.steps is None else candidate.steps):
        best.setdefault((run.batch_tokens, run.seed), run)
    return tuple(best[key] for key in sorted(best))


def _csv_rows(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    columns, rows = parse_csv_records(text, str(path))
    if not {"batch_tokens", "steps"} <= set(columns):
        raise InputError(
            f"{path}: found the columns {', '.join(columns) or 'none'}; batch_tokens and steps are required"
        )
    for line_number, row in rows:
        yield f"{path}:{line_number}", {key: value or None for key, value in row.items() if key}


def _parse_run(row: Any, location: str) -> tuple[BatchRun | None, list[str]]:
    """Return the run of a row and the row's problems; the run is None if there are any."""
    if not isinstance(row, Mapping):
        return None, [not_an_object_text(row, location)]
    problems: list[str] = []
    batch = read_positive(row, "batch_tokens", location, problems, required=True)
    steps = read_positive(row, "steps", location, problems)
    optional_numbers = {name: read_positive(row, name, location, problems) for name in ("learning_rate", "target_loss")}
    seed = row.get("seed") or 0
    seed_number = parse_digits(str(seed).removeprefix("-")) if isinstance(seed, (int, str)) else None
    if seed_number is None:
        problems.append(f"{location}: seed is {short_repr(seed)}; a whole number is required")
    if problems or batch is None or seed_number is None:
        return None, problems
    failed = row.get("failed") or (None if steps is not None else NOT_REACHED)
    return BatchRun(
        batch_tokens=batch,
        steps=steps,
        seed=-seed_number if str(seed).startswith("-") else seed_number,
        failed=failed,
        **optional_numbers,
    ), []


Array = NDArray[np.float64]
HUBER = 2.0  # deviations: 95% efficient for normal errors is 1.345, which would weigh down a seventh of good runs
MIN_SIGMA = 1e-6  # of logarithms: exact points have no scatter
SEARCH_MARGIN = 1e3  # how far beyond the batches B_noise is searched for, as a factor
NUM_GRID = 241
NUM_REFINED = 60  # halvings between the neighbours of the grid's best
NUM_REWEIGHTED = 8
NUM_BOOTSTRAP = 1000
MIN_BATCHES = 3
NUM_PARAMETERS = 2  # which take up part of the scatter
QUANTILES = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRun:
    """A fitted run with the steps of the law; `residual` is the logarithm of measured over fitted steps."""

    run: BatchRun
    fitted_steps: float
    residual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffFit:
    """S_min and B_noise of a sweep's runs, with 90% bootstrap intervals of S_min, E_min and B_crit = E_min / S_min.

    `rms_residual` is of logarithms: 0.05 is a scatter of 5%. `not_reached` are the runs that the fit leaves out.

    >>> law = BatchTradeoff(min_steps=100, noise_tokens=8)
    >>> fit = fit_tradeoff([BatchRun(batch_tokens=batch, steps=law.steps(batch)) for batch in (4, 8, 16)])
    >>> fit.within, round(fit.tradeoff.critical_batch_tokens, 6)
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
        return tuple(sorted({fitted.run.batch_tokens for fitted in self.runs}))

    @property
    def target_loss(self) -> float | None:
        """The loss that the runs reached; None where they do not say one."""
        return self.runs[0].run.target_loss

    @property
    def within(self) -> bool:
        """True if the critical batch lies between the smallest and the largest batch; otherwise it is extrapolated."""
        return self.batches[0] <= self.tradeoff.critical_batch_tokens <= self.batches[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFit:
    """The fit to the runs of a sweep's folder, or of a CSV file."""

    source: str
    fit: TradeoffFit


def fit_sweep(source: str | os.PathLike[str]) -> SweepFit:
    """Fit the fewest steps and tokens to the runs of a sweep's folder, or of a CSV file. Raises `InputError`."""
    return SweepFit(source=os.fspath(source), fit=fit_tradeoff(read_batch_runs(source)))


def fit_tradeoff(runs: Sequence[BatchRun], *, num_bootstrap: int = NUM_BOOTSTRAP, seed: int = 0) -> TradeoffFit:
    """Fit S(B) = S_min · (1 + B_noise / B) to the runs that reached the loss, the best of each batch and seed.

    Least squares of the logarithms of steps, robust to outliers. Intervals: the fit to `num_bootstrap` samples of the
    residuals (with `seed`). Raises `InputError` for fewer than three batches and for runs whose steps do not fall with the
    batch. Source: McCandlish et al. 2018, equation 2.11; the note, E.2 (24).

    >>> exact = BatchTradeoff(min_steps=50_000, noise_tokens=2e6)
    >>> runs = [BatchRun(batch_tokens=2e6 * r, steps=exact.steps(2e6 * r)) for r in (0.25, 1, 4)]
    >>> fit = fit_tradeoff(runs)
    >>> round(fit.tradeoff.min_steps), round(fit.tradeoff.min_tokens)
    (50000, 100000000000)
    """
    best = select_best_runs(tuple(runs))
    reached = [run for run in best if run.steps is not None]
    _require_enough(reached)
    batches = np.array([run.batch_tokens for run in reached])
    log_steps = np.log(np.array([run.steps for run in reached], dtype=np.float64))
    tradeoff = _fit_robustly(batches, log_steps)
    fitted_logs = _log_steps(tradeoff, batches)
    samples = _bootstrap_fits(batches, log_steps, fitted_logs, num_bootstrap, seed)
    return TradeoffFit(
        tradeoff=tradeoff, not_reached=tuple(run for run in best if run.steps is None),
        runs=tuple(
            FittedRun(run=run, fitted_steps=math.exp(fitted_log), residual=float(measured_log - fitted_log))
            for run, measured_log, fitted_log in zip(reached, log_steps, fitted_logs, strict=True)
        ),
        min_steps_interval90=_interval90([sample.min_steps for sample in samples]),
        min_tokens_interval90=_interval90([sample.min_tokens for sample in samples]),
        critical_batch_interval90=_interval90([sample.critical_batch_tokens for sample in samples]),
        rms_residual=float(np.sqrt(np.mean((log_steps - fitted_logs) ** 2))),
    )  # fmt: skip


def _require_enough(reached: Sequence[BatchRun]) -> None:
    losses = sorted({run.target_loss for run in reached if run.target_loss is not None})
    if len(losses) > 1:
        raise InputError(
            f"fit: found runs to losses of {', '.join(f'{loss:g}' for loss in losses)}; one loss is required"
        )
    batches = sorted({run.batch_tokens for run in reached})
    if len(batches) < MIN_BATCHES:
        text = ", ".join(format_quantity(batch) for batch in batches) or "none"
        raise InputError(
            f"fit: found runs that reached the loss with batches of {text} tokens; at least {MIN_BATCHES} batches are required"
        )
    medians = {batch: np.median([run.steps for run in reached if run.batch_tokens == batch]) for batch in batches}
    if medians[batches[0]] <= medians[batches[-1]]:
        raise InputError(
            f"fit: found {medians[batches[0]]:,.0f} steps with the smallest batch and {medians[batches[-1]]:,.0f} with the "
            "largest; steps that fall with the batch are required: is the learning rate of each batch tuned?"
        )


def _log_steps(tradeoff: BatchTradeoff, batches: Array) -> Array:
    return np.asarray(math.log(tradeoff.min_steps) + np.log1p(tradeoff.noise_tokens / batches))


def _fit_robustly(batches: Array, log_steps: Array) -> BatchTradeoff:
    """Fit with Huber's weights from the residuals of the fit before; the first fit has equal weights."""
    weights = np.ones_like(log_steps)
    tradeoff = _least_squares(batches, log_steps, weights)
    for _ in range(NUM_REWEIGHTED):
        residuals = np.abs(log_steps - _log_steps(tradeoff, batches))
        sigma = max(1.4826 * float(np.median(residuals)), MIN_SIGMA)  # of normal errors, from their median
        weights = np.minimum(1.0, HUBER * sigma / np.maximum(residuals, MIN_SIGMA))
        tradeoff = _least_squares(batches, log_steps, weights)
    return tradeoff


def _least_squares(batches: Array, log_steps: Array, weights: Array) -> BatchTradeoff:
    def squared_error(log_noise: Array) -> tuple[Array, Array]:
        """Return the sum of squares for each B_noise, and ln S_min there."""
        log_min_steps = log_steps - np.log1p(np.exp(log_noise)[:, None] / batches)
        means = (log_min_steps * weights).sum(axis=1) / weights.sum()
        return (weights * (log_min_steps - means[:, None]) ** 2).sum(axis=1), means

    grid = np.linspace(math.log(batches.min() / SEARCH_MARGIN), math.log(batches.max() * SEARCH_MARGIN), NUM_GRID)
    best_index = int(np.argmin(squared_error(grid)[0]))
    low, high = grid[max(best_index - 1, 0)], grid[min(best_index + 1, NUM_GRID - 1)]
    for _ in range(NUM_REFINED):
        thirds = np.array([low + (high - low) / 3.0, high - (high - low) / 3.0])
        left, right = squared_error(thirds)[0]
        low, high = (low, thirds[1]) if left < right else (thirds[0], high)
    log_noise = np.array([(low + high) / 2.0])
    return BatchTradeoff(min_steps=math.exp(squared_error(log_noise)[1][0]), noise_tokens=math.exp(log_noise[0]))


def _bootstrap_fits(
    batches: Array, log_steps: Array, fitted: Array, num_samples: int, seed: int
) -> list[BatchTradeoff]:
    """Return fits to the law's steps plus residuals drawn with replacement, which in logarithms scatter equally at all
    batches."""
    random = np.random.default_rng(seed)
    residuals = (log_steps - fitted) * math.sqrt(len(log_steps) / (len(log_steps) - NUM_PARAMETERS))
    samples = (fitted + random.choice(residuals, len(log_steps)) for _ in range(num_samples))
    return [_least_squares(batches, sample, np.ones(len(log_steps))) for sample in samples]


def _interval90(estimates: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(estimates, QUANTILES)
    return float(low), float(high)
