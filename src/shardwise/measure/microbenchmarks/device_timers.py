"""Seconds of work on a device, by the host's clock or by events on a GPU's stream.

Benchmarks ask a timer and nothing else for times, so that the same code measures a CPU and a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], object]
# Larger than any L2 cache (H100 and H200: 50 MB, B200: 126 MB): written before a cold run, so that operands come from memory.
FLUSH_BYTES = 2**28
MOST_WRITES = 100  # of the buffer before a queued run: 5 ms on an H100


class WorkTimer(Protocol):
    """Clock of a device."""

    def time_run(self, run: Work, num_runs: int = 1) -> float:
        """Return the seconds of one of `num_runs` runs in a row."""

    def time_cold_run(self, run: Work) -> float:
        """Return the seconds of a run whose operands no cache of the device has."""

    def time_issue(self, run: Work, num_runs: int) -> float:
        """Return the seconds that the host takes to start one of `num_runs` runs, without waiting for their end."""

    def time_queued(self, run: Work, num_runs: int = 1) -> float:
        """Return the seconds of one of `num_runs` runs that the device finds in its queue, and does not wait for the host."""


class HostTimer:
    """Clock of the host, for work that has ended when its call returns.

    >>> from shardwise.measure.microbenchmarks.device_timers import HostTimer
    >>> HostTimer().time_run(lambda: sum(range(1000)), num_runs=3) > 0
    True
    """

    def time_run(self, run: Work, num_runs: int = 1) -> float:
        """Return the seconds of one of `num_runs` runs in a row."""
        started = time.perf_counter()
        for _ in range(num_runs):
            run()
        return (time.perf_counter() - started) / num_runs

    def time_cold_run(self, run: Work) -> float:
        """Return the seconds of a run: operations of a sample are larger than a host's caches, or are used while hot."""
        return self.time_run(run)

    def time_issue(self, run: Work, num_runs: int) -> float:
        """Return the seconds of one of `num_runs` runs: a CPU is its own host."""
        return self.time_run(run, num_runs)

    def time_queued(self, run: Work, num_runs: int = 1) -> float:
        """Return the seconds of one of `num_runs` runs: a CPU has no queue."""
        return self.time_run(run, num_runs)


class EventTimer:
    """Clock of a GPU: two events on its stream around the work.

    `cuda` has `Event` and `synchronize` of `torch.cuda`; `make_buffer` allocates what is written to empty the L2 cache.
    """

    def __init__(self, cuda: Any = torch.cuda, make_buffer: Callable[[], Tensor] | None = None) -> None:
        self.cuda = cuda
        self._make_buffer = make_buffer or (lambda: torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda"))
        self._buffer: Tensor | None = None

    def time_run(self, run: Work, num_runs: int = 1) -> float:
        """Return the seconds of one of `num_runs` runs in a row: each but the first is launched while the previous one runs."""
        first, last = (self.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(num_runs):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / num_runs  # of milliseconds

    def time_cold_run(self, run: Work) -> float:
        """Return the seconds of a run after the L2 cache was emptied; the host launches it while the cache is written, so
        that a short kernel is timed without its launch."""
        self._empty_cache()
        return self.time_run(run)

    def _empty_cache(self) -> None:
        if self._buffer is None:
            self._buffer = self._make_buffer()
        self._buffer.zero_()

    def time_queued(self, run: Work, num_runs: int = 1) -> float:
        """Return the seconds of one of `num_runs` runs, issued while the device writes its buffer twice as long as that takes.

        A queue has room for some 1,000 kernels: `run` has fewer in all.
        """
        self._empty_cache()
        issue_s, write_s = num_runs * self.time_issue(run, num_runs), self.time_run(self._empty_cache)
        for _ in range(min(MOST_WRITES, 1 + int(2.0 * issue_s / max(write_s, 1e-6)))):
            self._empty_cache()
        return self.time_run(run, num_runs)

    def time_issue(self, run: Work, num_runs: int) -> float:
        """Return the seconds that the host takes to start one of `num_runs` runs."""
        self.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num_runs):
            run()
        issued_s = (time.perf_counter() - started) / num_runs
        self.cuda.synchronize()
        return issued_s


def device_timer(device: str) -> WorkTimer:
    """Return the timer of "cuda" or "cpu"."""
    return EventTimer() if device == "cuda" else HostTimer()
