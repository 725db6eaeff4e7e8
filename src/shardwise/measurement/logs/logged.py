"""What one line of a training log says of a step, and what a framework's log is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

MIB, GIB = 2.0**20, 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A step as a framework printed it, numbered as it numbers them; None is what it did not print.

    `tokens_per_s` and `tflops` are those of one device, `step_time_s` seconds, `mfu` 0 to 1 by the framework's own count, `loss`
    nats, `memory_bytes` the peak of one device. `batch_seqs` or `batch_tokens` are the global batch. A line may be the mean of
    several steps.
    """

    step: int
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    loss: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    memory_bytes: float | None = None
    batch_seqs: int | None = None
    batch_tokens: int | None = None

    def merged(self, later: LoggedStep) -> LoggedStep:
        """The step when it was printed once more, by another rank or after a restart: the later values, the larger memory."""
        said = {one.name: getattr(later, one.name) for one in fields(later)}
        found = replace(self, **{name: value for name, value in said.items() if value is not None})
        peaks = [one for one in (self.memory_bytes, later.memory_bytes) if one is not None]
        return replace(found, memory_bytes=max(peaks, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """A framework's log. `source` is where its lines are made, at a release.

    `markers`: a line of a step has one of them, and none of `others`. `step` reads such a line; None: it is torn. `memory` reads
    the peak of one device, in bytes, off a line with `memory_marker`; `memory_kind` is the instrument.
    """

    name: str
    title: str
    source: str
    markers: tuple[bytes, ...]
    step: Callable[[str], LoggedStep | None]
    others: tuple[bytes, ...] = ()
    memory_marker: bytes | None = None
    memory: Callable[[str], float | None] = lambda text: None
    memory_kind: str = "reserved"

    def has_step(self, line: bytes) -> bool:
        """Whether a line is one of a step, as far as its words tell; it may be torn."""
        return any(marker in line for marker in self.markers) and not any(other in line for other in self.others)


def number(text: str | None) -> float | None:
    """A finite number; None for what is none, such as `nan`, or a value that was not printed."""
    try:
        value = float(text.replace(",", "")) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def above_zero(text: str | None) -> float | None:
    """A number above 0: what times, rates and memory are."""
    value = number(text)
    return value if value is not None and value > 0 else None


def percent(text: str | None) -> float | None:
    """A part of a whole that was printed in percent."""
    value = above_zero(text)
    return None if value is None else value / 100.0


def of_unit(text: str | None, unit: float) -> float | None:
    """A size above 0 that was printed in a unit."""
    value = above_zero(text)
    return None if value is None else value * unit
