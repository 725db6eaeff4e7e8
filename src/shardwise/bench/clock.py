"""Times a kernel: the median of repetitions, on the device's own clock where it has one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UPS = 2
REPEATS = 9  # at least; more as long as there is time
LEAST_S = 0.05  # of a repetition on a device whose clock is the host's: short kernels run several times


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: the median of `repeats`, and between which eight of ten lie."""

    seconds: float
    low: float
    high: float
    repeats: int


def timed(run: Callable[[], object], device: str, budget_s: float = 1.0) -> Timing:
    """Time `run` for about `budget_s`, after warming up; on a GPU between events, without the launch."""
    for _ in range(WARM_UPS):
        run()
    once = _on_gpu if device == "cuda" else _on_host
    inner = 1 if device == "cuda" else max(1, min(1000, int(LEAST_S / max(_on_host(run, 1), 1e-7))))
    found: list[float] = []
    started = time.perf_counter()
    while len(found) < REPEATS or time.perf_counter() - started < budget_s:
        found.append(once(run, inner))
        if len(found) >= REPEATS and time.perf_counter() - started > budget_s:
            break
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
