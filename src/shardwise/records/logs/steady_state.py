"""Steady state of a logged run: the median step, and which lines do not count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardwise.records.logs.logged_steps import LoggedStep
from shardwise.records.logs.training_log import TrainingLog
from shardwise.values import InputError

# The first tenth of a run's lines, at least 3 and at most 50, is its warm-up: compilation, autotuning, allocators, caches.
# Benchmark recipes leave out as much (NVIDIA's DGX Cloud ones take steps 25 to 50 of 50, MaxText's the last ones).
WARM_UP, LEAST_WARM_UP, MOST_WARM_UP = 0.1, 3, 50
# Outliers of the rest have a modified z-score above 3.5 (Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers:
# 0.6745 (x - median) / MAD), and more than a twentieth, by which steps of one job differ (docs/accuracy.md). They are steps
# with a checkpoint, an evaluation or a stall. Where more than a quarter would be, the run has several speeds, and all count.
Z_SCORE, NORMAL_MAD, CLOSE_PART, MOST_OUTLIERS = 3.5, 0.6745, 0.05, 0.25
RULE = (
    "the median of the lines behind the first tenth (at least 3, at most 50), without those of another batch and those that are "
    "over 5% and a modified z-score of 3.5 off (at most a quarter)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """What a run took when nothing disturbed it.

    `device_s_per_token`: seconds of a device for a token: the inverse of tokens/s of one device. `low` and `high`: its 10th and
    90th percentiles. `overhead`: by how much longer the lines behind the warm-up take on average with those that are far off.
    `num_lines` were read, of which `num_warm_up`, `num_other_batch` and `num_outliers` do not count. `mfu`, `tflops`: the
    framework's own, in the median; `batch_tokens` where the log says them.
    """

    device_s_per_token: float
    low: float
    high: float
    overhead: float
    num_lines: int
    num_warm_up: int
    num_other_batch: int
    num_outliers: int
    batch_tokens: int | None
    mfu: float | None
    tflops: float | None

    @property
    def num_steady(self) -> int:
        return self.num_lines - self.num_warm_up - self.num_other_batch - self.num_outliers


def measure_steady_state(
    log: TrainingLog, num_devices: int, seq_len: int, batch_tokens: int | None = None
) -> SteadyState:
    """Return the steady state of a run. `batch_tokens`: tokens of the global batch, for a log without them.

    Raises `InputError` if no line has a time or a rate, and for a batch that contradicts the log's.
    """
    timed = [(step, _batch_tokens(step, seq_len)) for step in log.steps if step.is_timed]
    if not timed:
        raise InputError(f"log: no step of {log.format.title} in it has a time or a rate; a log with one is required")
    logged_batch = timed[-1][1]
    if logged_batch and batch_tokens and logged_batch != batch_tokens:
        raise InputError(
            f"--batch-tokens: found {batch_tokens:,}, and the log says {logged_batch:,} (sequences of {seq_len:,}); the batch "
            "of the run is required, or none: the log has it"
        )
    batch = logged_batch or batch_tokens
    same_batch = [step for step, step_tokens in timed if step_tokens == logged_batch]
    warm_up = num_warm_up(len(same_batch))
    counted = same_batch[warm_up:]
    _require_batch(counted, num_devices, batch)
    paces = [_pace(step, num_devices, batch) for step in counted]
    typical = drop_outliers(paces)
    typical_pace = median(typical)
    return SteadyState(
        device_s_per_token=typical_pace, low=interpolated_percentile(typical, 0.1), high=interpolated_percentile(typical, 0.9),
        overhead=sum(paces) / len(paces) / (sum(typical) / len(typical)) - 1.0, num_lines=len(log.steps),
        num_warm_up=warm_up, num_other_batch=len(log.steps) - len(same_batch), num_outliers=len(paces) - len(typical),
        batch_tokens=logged_batch, mfu=_median_of_stated([step.mfu for step in counted]),
        tflops=_median_of_stated([step.tflops for step in counted]),
    )  # fmt: skip


def num_warm_up(num_lines: int) -> int:
    """Return how many of the first lines are the warm-up; at least half of them, and one, stay.

    >>> [num_warm_up(n) for n in (1, 2, 5, 8, 100, 10_000)]
    [0, 1, 2, 3, 10, 50]
    """
    return min(max(math.ceil(WARM_UP * num_lines), LEAST_WARM_UP), MOST_WARM_UP, num_lines // 2)


def drop_outliers(paces: Sequence[float]) -> list[float]:
    """Return the values without outliers (`RULE`), or all of them if over a quarter would go.

    >>> drop_outliers([1.0, 1.01, 0.99, 1.02, 7.0])
    [1.0, 1.01, 0.99, 1.02]
    """
    middle = median(paces)
    spread = median(abs(pace - middle) for pace in paces)
    max_deviation = max(Z_SCORE / NORMAL_MAD * spread, CLOSE_PART * middle)
    typical = [pace for pace in paces if abs(pace - middle) <= max_deviation]
    return typical if len(paces) - len(typical) <= MOST_OUTLIERS * len(paces) else list(paces)


def interpolated_percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, interpolated linearly between values."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    return ordered[low] + (position - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def _batch_tokens(step: LoggedStep, seq_len: int) -> int | None:
    return step.batch_tokens or (step.batch_seqs * seq_len if step.batch_seqs else None)


def _both_paces(step: LoggedStep, num_devices: int, batch_tokens: int | None) -> tuple[float | None, float | None]:
    """Return device-seconds per token by the step's time and by its rate."""
    by_time = step.step_time_s * num_devices / batch_tokens if step.step_time_s and batch_tokens else None
    return by_time, 1.0 / step.tokens_per_s if step.tokens_per_s else None


def _require_batch(steps: Sequence[LoggedStep], num_devices: int, batch_tokens: int | None) -> None:
    """Raise `InputError` if times and rates contradict this batch on this number of devices."""
    paces_and_steps = [(pace, step) for step in steps if all(pace := _both_paces(step, num_devices, batch_tokens))]
    ratios = [by_time / by_rate for (by_time, by_rate), _ in paces_and_steps if by_time and by_rate]
    if not ratios or 1 - CLOSE_PART < median(ratios) < 1 + CLOSE_PART:
        return
    step = paces_and_steps[len(paces_and_steps) // 2][1]
    raise InputError(
        f"log: step {step.step} took {step.step_time_s:g} s at {step.tokens_per_s:,.0f} tokens/s on each device, which on "
        f"{num_devices:,} devices is a batch of {median(ratios) * (batch_tokens or 0):,.0f} tokens and not of "
        f"{batch_tokens:,}; the batch and the devices of the run are required"
    )


def _pace(step: LoggedStep, num_devices: int, batch_tokens: int | None) -> float:
    """Return device-seconds per token by the step's time, which has more digits, or by its rate.

    By the rate if they differ: torchtitan's time is that of `log_freq` steps, also if fewer ran since the last line.
    """
    by_time, by_rate = _both_paces(step, num_devices, batch_tokens)
    if by_time and by_rate and not 1 - CLOSE_PART < by_time / by_rate < 1 + CLOSE_PART:
        return by_rate
    pace = by_time or by_rate
    if pace is None:
        raise InputError(
            "--batch-tokens: missing, and the log has times of steps alone; the tokens of a batch are required"
        )
    return pace


def _median_of_stated(values: Sequence[float | None]) -> float | None:
    stated = [value for value in values if value is not None]
    return median(stated) if stated else None
