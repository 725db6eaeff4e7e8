"""Seconds of a step by term, and timestamps of the host and of a GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

ClockReading = float | torch.cuda.Event


@dataclass(slots=True)
class _ClockSpan:
    term: str
    start: ClockReading
    stop: ClockReading | None = None
    inner: list[_ClockSpan] = field(default_factory=list)


class StepClock:
    """Times the spans of a step by term. A span inside another counts for its own term only. On a GPU timestamps are
    events on the compute stream, so that a span is what the device worked on or waited for, not what the host did."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.recorder: Callable[[str], AbstractContextManager[None]] | None = None  # also entered around each span
        self._outer: list[_ClockSpan] = []
        self._open: list[_ClockSpan] = []
        self._is_paused = False
        self._step_start: ClockReading = self._mark()

    def begin(self) -> None:
        """Start a step."""
        self._outer.clear()
        self._open.clear()
        self._step_start = self._mark()

    def end(self) -> dict[str, float]:
        """Return the seconds of the step so far by term; "other" is the time outside all spans."""
        now = self._mark()
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds_by_term: dict[str, float] = {}
        for span in self._outer:
            _add_span(span, seconds_by_term, self.on_gpu)
        total = _seconds(self._step_start, now, self.on_gpu)
        return {**seconds_by_term, "other": max(total - sum(seconds_by_term.values()), 0.0)}

    @contextmanager
    def __call__(self, term: str) -> Iterator[None]:
        """Time a span of a term."""
        if self._is_paused:
            yield
            return
        span = _ClockSpan(term, self._mark())
        (self._open[-1].inner if self._open else self._outer).append(span)
        self._open.append(span)
        try:
            with nullcontext() if self.recorder is None else self.recorder(term):
                yield
        finally:
            span.stop = self._mark()
            self._open.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time no span meanwhile."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _mark(self) -> ClockReading:
        if not self.on_gpu:
            return time.perf_counter()
        return _record_event()


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _add_span(span: _ClockSpan, seconds_by_term: dict[str, float], on_gpu: bool) -> float:
    """Add the seconds of a span and of the spans inside it; return its total seconds."""
    assert span.stop is not None
    total = _seconds(span.start, span.stop, on_gpu)
    inner_seconds = sum(_add_span(child, seconds_by_term, on_gpu) for child in span.inner)
    seconds_by_term[span.term] = seconds_by_term.get(span.term, 0.0) + max(total - inner_seconds, 0.0)
    return total


def _seconds(start: ClockReading, stop: ClockReading, on_gpu: bool) -> float:
    if on_gpu:
        return start.elapsed_time(stop) / 1e3  # type: ignore[union-attr, arg-type, no-any-return]
    return stop - start  # type: ignore[operator]


class Timestamp(NamedTuple):
    """A moment on the host, and on a GPU also in the compute stream. `host_ns`: the host's monotonic clock; `cpu_ns`:
    CPU time of this thread; `event`: the event recorded on the stream."""

    host_ns: int
    cpu_ns: int = 0
    event: torch.cuda.Event | None = None


class DeviceTimer:
    """Takes timestamps on a device, and converts them to nanoseconds. Taking one never waits for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.origin = self.now()
        if self.on_gpu:  # on an empty stream: its clock and the host's agree at the origin
            torch.cuda.synchronize(device)
            self.origin = self.now()

    def now(self) -> Timestamp:
        """Return the present moment, on a GPU also of its current stream."""
        if not self.on_gpu:
            return Timestamp(time.perf_counter_ns(), time.thread_time_ns())
        event = _record_event()
        return Timestamp(time.perf_counter_ns(), event=event)

    def ns(self, timestamp: Timestamp) -> int:
        """Return nanoseconds since the first timestamp. On a GPU all of its work must be done."""
        if timestamp.event is None or self.origin.event is None:
            return timestamp.host_ns - self.origin.host_ns
        return round(float(self.origin.event.elapsed_time(timestamp.event)) * 1e6)  # from milliseconds
