"""Times a kernel: the median of repetitions, on the device's own clock where it has one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UPS = 2
REPEATS = 9  # at least; more as long as there is time
LEAST_S, MOST_INNER = 0.05, 1000  # seconds of a repetition, for which a short kernel runs several times


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: the median of `repeats`, and between which eight of ten lie."""

    seconds: float
    low: float
    high: float
    repeats: int


def timed(run: Callable[[], object], device: str, budget_s: float = 1.0) -> Timing:
    """Time `run` for about `budget_s`, after warming up. Short kernels run several times in a row, so that each but the first is
    launched while the one before runs."""
    for _ in range(WARM_UPS):
        run()
    once = _on_gpu if device == "cuda" else _on_host
    inner = max(1, min(MOST_INNER, int(LEAST_S / max(once(run, 1), 1e-7))))
    found: list[float] = []
    started = time.perf_counter()
    while len(found) < REPEATS or time.perf_counter() - started < budget_s:
        found.append(once(run, inner))
    return timing(found)


def timing(found: list[float]) -> Timing:
    """The median of some seconds, and their 10th and 90th percentiles."""
    ordered = sorted(found)
    return Timing(
        statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10], len(ordered)
    )


def _on_host(run: Callable[[], object], inner: int) -> float:
    started = time.perf_counter()
    for _ in range(inner):
        run()
    return (time.perf_counter() - started) / inner


def _on_gpu(run: Callable[[], object], inner: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(inner):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / inner
