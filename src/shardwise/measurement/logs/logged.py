"""What a training log records of a step, and the description of a framework's log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

MIB, GIB = 2.0**20, 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A step as a framework printed it, numbered as it numbers them; None is what it did not print.

    `tokens_per_s` and `tflops` are those of one device, `step_time_s` seconds, `mfu` 0 to 1 by the framework's own count, `loss`
    nats, `memory_bytes` the peak of one device. `batch_seqs` or `batch_tokens` are the global batch. `clock_s`: the second at
    which it was logged. A line may be the mean of several steps.
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
    clock_s: float | None = None

    @property
    def is_timed(self) -> bool:
        """Whether it says how fast it was."""
        return bool(self.step_time_s or self.tokens_per_s)

    def untimed(self) -> LoggedStep:
        """The step without how fast it was."""
        return replace(self, step_time_s=None, tokens_per_s=None, tflops=None, mfu=None)

    def merged(self, later: LoggedStep) -> LoggedStep:
        """The step when it was printed once more, by another rank or after a restart: the later values, the larger memory."""
        said = {one.name: getattr(later, one.name) for one in fields(later)}
        found = replace(self, **{name: value for name, value in said.items() if value is not None})
        peaks = [one for one in (self.memory_bytes, later.memory_bytes) if one is not None]
        return replace(found, memory_bytes=max(peaks, default=None))


class Tag(NamedTuple):
    """A number that a framework logs by name: the field of `LoggedStep` that it is, and what one of its units is there."""

    field: str
    unit: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """A framework's log. `source` is where its lines and tags are made, at a release.

    `markers`: a line of a step has one of them, and none of `others`. `step` reads such a line; None: it is torn. `memory` reads
    the peak of one device, in bytes, off a line with `memory_marker`; `memory_kind` is the instrument.

    `tags`: its names of numbers in TensorBoard, in W&B and in lines of JSON; the name `telling` identifies the framework, where
    the others are common. A step with a number other than 0 for `untimed` was slowed down by a profiler or the like.
    """

    name: str
    title: str
    source: str
    markers: tuple[bytes, ...] = ()
    step: Callable[[str], LoggedStep | None] = lambda text: None
    others: tuple[bytes, ...] = ()
    tags: Mapping[str, Tag] = field(default_factory=dict)
    telling: str | None = None
    untimed: str | None = None
    memory_marker: bytes | None = None
    memory: Callable[[str], float | None] = lambda text: None
    memory_kind: str = "reserved"

    def has_step(self, line: bytes) -> bool:
        """Whether a line is one of a step, as far as its words tell; it may be torn."""
        return any(marker in line for marker in self.markers) and not any(other in line for other in self.others)

    @property
    def told_by(self) -> tuple[str, ...]:
        """The tags of which one shows that others are its own: they say how fast a step was, or its loss."""
        named = [tag for tag, (name, _) in self.tags.items() if name in ("step_time_s", "tokens_per_s", "loss")]
        return (self.telling,) if self.telling else tuple(named)


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
