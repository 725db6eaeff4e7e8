"""The gradient noise scale that a run measured: over its last half, and in windows from its start to its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shardwise.batch_size.noise_estimators import MeasuredNoise, NoiseSample, estimate_noise
from shardwise.batch_size.noise_scale import NoiseScale
from shardwise.records import RunFolder, StepRecord, read_log
from shardwise.values import InputError

MAX_WINDOWS = 10  # of a run
MIN_WINDOW_STEPS = 5  # measured steps, which have an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseWindow:
    """Consecutive measured steps: `seen_tokens` is the mean of the tokens seen before them, `loss` their mean loss in nats,
    `measured` the noise scale over them."""

    first_step: int
    last_step: int
    seen_tokens: float
    loss: float
    measured: MeasuredNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNoise:
    """The noise scale of a run, in tokens. `late` is that over the last half of the measured steps: it grows as the loss
    falls.

    `parts` are windows from start to end. `batch_tokens` and `small_tokens` are those of the last measured step: of the global
    batch, and of the smaller batches that it is compared with.

    >>> late = estimate_noise([NoiseSample(5.0, 2.0, 8, 32)] * 10)
    >>> noise = RunNoise(path=Path("runs/a"), late=late, parts=(), num_measured=20, batch_tokens=32, small_tokens=8)
    >>> noise.progress, noise.late.tokens
    (0.5, 32.0)
    """

    path: Path
    late: MeasuredNoise
    parts: tuple[NoiseWindow, ...]
    num_measured: int
    batch_tokens: float
    small_tokens: float

    @property
    def progress(self) -> float:
        """Share of the loss's decrease under the true gradient that a step reaches: 1 / (1 + B_noise / B).

        Source: McCandlish et al. 2018, equation 2.7.
        """
        return 1.0 / (1.0 + self.late.tokens / self.batch_tokens)

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The noise scale for plans; None where |G|² may be 0."""
        late = self.late
        if not 0 < late.tokens < math.inf:
            return None
        is_bounded = 0 < late.low <= late.tokens <= late.high < math.inf
        return NoiseScale(
            tokens=late.tokens,
            interval90=(late.low, late.high) if is_bounded else None,
            source=f"measured: {self.path}",
        )


def run_noise(path: str | Path) -> RunNoise:
    """Return the gradient noise scale that the run in a folder measured (`shardwise train --noise-scale-every N`).

    It is the ratio of the means of tr(Sigma) and |G|² over steps with its 90% interval, over the last half of those that
    measured it (`late`) and in `parts` from the run's start to its end. Unit: tokens. Raises `InputError` where the folder has
    no log, or no step measured it. Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.

    >>> import shardwise as sw
    >>> sw.run_noise("no/run")
    Traceback (most recent call last):
    ...
    shardwise.values.errors.InputError: no/run/log.jsonl: cannot read: No such file or directory; the log of a run is required
    """
    folder = RunFolder(Path(path))
    return estimate_run_noise(read_log(folder.log).steps, folder.path)


def estimate_run_noise(records: Sequence[StepRecord], path: Path) -> RunNoise:
    """Return the noise scale of a run from its log's steps. Raises `InputError` where no step measured it."""
    tokens_by_step = {record.step: record.num_tokens for record in records}
    tokens_before: dict[int, float] = {}
    total_tokens = 0.0
    for step, tokens in sorted(tokens_by_step.items()):
        tokens_before[step], total_tokens = total_tokens, total_tokens + tokens
    measured = [(record, sample) for record in records if (sample := noise_sample_of(record)) is not None]
    if not measured:
        raise InputError(
            f"{path}: no step measured the noise scale; a run of `shardwise train --noise-scale-every N` is required"
        )
    last_sample = measured[-1][1]
    return RunNoise(
        path=path, late=estimate_noise([sample for _, sample in measured[len(measured) // 2 :]]),
        parts=tuple(_noise_window(window, tokens_before) for window in _split_windows(measured)), num_measured=len(measured),
        batch_tokens=last_sample.big_tokens, small_tokens=last_sample.small_tokens,
    )  # fmt: skip


def noise_sample_of(record: StepRecord) -> NoiseSample | None:
    """Return the norms that a step measured; None where it measured none."""
    norms_and_tokens = record.small_norm_squared, record.big_norm_squared, record.small_tokens, record.big_tokens
    small_squared, big_squared, small, big = norms_and_tokens
    if small_squared is None or big_squared is None or small is None or big is None:
        return None
    return NoiseSample(small_squared, big_squared, small, big)


def _split_windows(
    measured: Sequence[tuple[StepRecord, NoiseSample]],
) -> Iterator[Sequence[tuple[StepRecord, NoiseSample]]]:
    """Yield up to `MAX_WINDOWS` windows of about equal length, each of `MIN_WINDOW_STEPS` steps at least unless there are
    fewer."""
    num_windows = min(MAX_WINDOWS, max(len(measured) // MIN_WINDOW_STEPS, 1))
    ends = [round(len(measured) * index / num_windows) for index in range(num_windows + 1)]
    yield from (measured[start:stop] for start, stop in pairwise(ends))


def _noise_window(measured: Sequence[tuple[StepRecord, NoiseSample]], tokens_before: dict[int, float]) -> NoiseWindow:
    records = [record for record, _ in measured]
    return NoiseWindow(
        first_step=records[0].step, last_step=records[-1].step,
        seen_tokens=sum(tokens_before[record.step] for record in records) / len(records),
        loss=sum(record.loss for record in records) / len(records), measured=estimate_noise([sample for _, sample in measured]),
    )  # fmt: skip
