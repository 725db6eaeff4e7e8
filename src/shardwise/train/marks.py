"""Moments of a step: on a CPU when the host came by, on a GPU when the stream did."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Mark(NamedTuple):
    """A moment: nanoseconds of the host's monotonic clock and of this thread on a core, and on a GPU an event on the stream that
    computed then."""

    host_ns: int
    cpu_ns: int = 0
    event: torch.cuda.Event | None = None


class Marks:
    """Takes marks on a device, and says when they were. A GPU is never waited for in between."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.origin = self.now()
        if self.on_gpu:  # the stream is empty, so that its clock and the host's are the same at this mark
            torch.cuda.synchronize(device)
            self.origin = self.now()

    def now(self) -> Mark:
        """This moment; of a GPU that of its current stream."""
        if not self.on_gpu:
            return Mark(time.perf_counter_ns(), time.thread_time_ns())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Mark(time.perf_counter_ns(), event=event)

    def ns(self, mark: Mark) -> int:
        """Nanoseconds from the first mark on; of a GPU all of its work must be done."""
        if mark.event is None or self.origin.event is None:
            return mark.host_ns - self.origin.host_ns
        return round(float(self.origin.event.elapsed_time(mark.event)) * 1e6)  # from milliseconds
