"""Steps as frameworks log them, the description of a framework's log, and the conversion of a tracker's tagged values to
steps.

`LogFormat` describes the lines and tags of a framework. TensorBoard, W&B and lines of JSON give `TaggedValues`, which the
tags of a format turn into `LoggedStep`s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from shardwise.values.input_texts import parse_number

MIB, GIB = 2.0**20, 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """Step as a framework logged it, numbered as it numbers them; None is what it did not log.

    `tokens_per_s` and `tflops` are those of one device, `step_time_s` seconds, `mfu` 0 to 1 by the framework's own count,
    `loss` nats, `memory_bytes` the peak of one device. `batch_seqs` or `batch_tokens` are the global batch. `clock_s`: the
    second at which it was logged. A line may be the mean of several steps.
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
        """True if the step has a time or a rate."""
        return bool(self.step_time_s or self.tokens_per_s)

    def without_timing(self) -> LoggedStep:
        """Return the step without times and rates."""
        return replace(self, step_time_s=None, tokens_per_s=None, tflops=None, mfu=None)

    def merge(self, later: LoggedStep) -> LoggedStep:
        """Return the step merged with a later record of it, of another rank or after a restart: later values, the larger
        memory."""
        later_fields = {step_field.name: getattr(later, step_field.name) for step_field in fields(later)}
        merged = replace(self, **{name: value for name, value in later_fields.items() if value is not None})
        peaks = [peak for peak in (self.memory_bytes, later.memory_bytes) if peak is not None]
        return replace(merged, memory_bytes=max(peaks, default=None))


class Tag(NamedTuple):
    """Number that a framework logs by name: its field of `LoggedStep`, and the factor to that field's unit."""

    field: str
    unit: float = 1.0


class RunHeader(NamedTuple):
    """The global batch, in sequences or tokens, and the tokens of a sequence, which a framework logs before its first step."""

    seq_len: int | None = None
    batch_seqs: int | None = None
    batch_tokens: int | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of the global batch, or None."""
        return self.batch_tokens or (self.batch_seqs * self.seq_len if self.batch_seqs and self.seq_len else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """Log format of a framework. `source`: where its lines and tags are made, at a release.

    `markers`: a line of a step has one of them, and none of `excluded_markers`. `step` parses such a line; None: it is torn.
    `memory` parses the peak of one device, in bytes, from a line with `memory_marker`; `memory_kind` is the instrument.
    `header` parses what is logged of a run before its steps, from a line with `header_marker`.

    `tags`: its names of numbers in TensorBoard, in W&B and in lines of JSON; `identifying_tag` identifies the framework if
    the other tags are common. A step with a number other than 0 for `untimed` was slowed down by a profiler or the like.
    """

    name: str
    title: str
    source: str
    markers: tuple[bytes, ...] = ()
    step: Callable[[str], LoggedStep | None] = lambda text: None
    excluded_markers: tuple[bytes, ...] = ()
    tags: Mapping[str, Tag] = field(default_factory=dict)
    identifying_tag: str | None = None
    untimed: str | None = None
    memory_marker: bytes | None = None
    memory: Callable[[str], float | None] = lambda text: None
    memory_kind: str = "reserved"
    header_marker: bytes | None = None
    header: Callable[[str], RunHeader | None] = lambda text: None

    def has_step(self, line: bytes) -> bool:
        """Return True if a line has the words of a step; it may be torn."""
        return any(marker in line for marker in self.markers) and not any(
            excluded in line for excluded in self.excluded_markers
        )

    @property
    def identifying_tags(self) -> tuple[str, ...]:
        """Tags that identify the framework: times, rates and losses of its steps."""
        rate_tags = [tag for tag, (name, _) in self.tags.items() if name in ("step_time_s", "tokens_per_s", "loss")]
        return (self.identifying_tag,) if self.identifying_tag else tuple(rate_tags)


def parse_finite(text: str | None) -> float | None:
    """Parse a finite number; None for a missing text or one such as `nan`."""
    try:
        number = parse_number(text.replace(",", "")) if text is not None else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def parse_positive(text: str | None) -> float | None:
    """Parse a number above 0, such as a time, a rate or a memory size."""
    number = parse_finite(text)
    return number if number is not None and number > 0 else None


def parse_percent(text: str | None) -> float | None:
    """Parse a percentage above 0 into a fraction."""
    percent = parse_positive(text)
    return None if percent is None else percent / 100.0


def parse_scaled(text: str | None, unit: float) -> float | None:
    """Parse a number above 0 that was printed in a unit."""
    number = parse_positive(text)
    return None if number is None else number * unit


LARGEST_STEP = 10**12
# Names of the step in trackers, the most specific first. Sources: nanotron 0.4, trainer.py; Lightning 2.5, loggers/wandb.py;
# W&B's own, in its history and on the axis of its charts; MaxText e591f30c, metric_logger.py.
STEP_COLUMNS = ("iteration_step", "trainer/global_step", "_step", "Step", "step", "global_step")
CLOCK_COLUMNS = ("_timestamp", "_runtime")  # seconds, of W&B's history


class TaggedValues(NamedTuple):
    """Numbers logged for a step, by tag, and the second at which they were, if it is known."""

    step: int
    values: Mapping[str, float]
    clock_s: float | None = None


def row_to_values(row: Mapping[str, Any], tags: Collection[str]) -> TaggedValues | None:
    """Return the step and the values of the given tags in a row, or None without a step."""
    step = next((number for name in STEP_COLUMNS if (number := _to_number(row.get(name))) is not None), None)
    if step is None:
        return None
    tag_values = {tag: value for tag in tags if (value := _to_number(row.get(tag))) is not None}
    return TaggedValues(
        int(step),
        tag_values,
        next((number for name in CLOCK_COLUMNS if (number := _to_number(row.get(name))) is not None), None),
    )


def _to_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    return parse_finite(str(value)) if isinstance(value, (int, float, str)) else None


def detect_format(tags: Set[str], formats: Iterable[LogFormat]) -> LogFormat | None:
    """Return the format that shares the most tags, or None if no tag is a time, a rate or a loss of any format."""
    candidates = [log_format for log_format in formats if not tags.isdisjoint(log_format.identifying_tags)]
    return max(candidates, key=lambda log_format: len(tags & log_format.tags.keys()), default=None)


def merge_by_step(points: Iterable[TaggedValues | None], max_steps: int) -> tuple[dict[int, TaggedValues], int]:
    """Return points by step, each with all values logged for it, ordered by their last record, at most the last `max_steps`;
    and the number of None, which are torn points."""
    by_step: dict[int, TaggedValues] = {}
    torn = 0
    for point in points:
        if point is None:
            torn += 1
            continue
        earlier = by_step.pop(point.step, None)  # a repeated step moves to the end, so that the cap drops the oldest
        by_step[point.step] = (
            TaggedValues(point.step, {**earlier.values, **point.values}, point.clock_s) if earlier else point
        )
        if len(by_step) > max_steps:
            del by_step[next(iter(by_step))]
    return by_step, torn


def to_steps(points: Iterable[TaggedValues], log_format: LogFormat) -> Iterator[LoggedStep]:
    """Yield the steps of a framework.

    If some steps have a rate, the time of a step without one is dropped: it had another batch, or was torn.
    """
    steps = [to_step(point, log_format) for point in points if 0 <= point.step <= LARGEST_STEP]
    rated = any(step.tokens_per_s for step in steps)
    for step in steps:
        yield replace(step, step_time_s=None) if rated and not step.tokens_per_s else step


def to_step(point: TaggedValues, log_format: LogFormat) -> LoggedStep:
    """Return the step of a point. Numbers that are not finite, and times and sizes not above 0, count as not logged."""
    step_fields: dict[str, Any] = {}
    for tag, (name, unit) in log_format.tags.items():
        number = point.values.get(tag, math.nan) * unit
        if math.isfinite(number) and (number > 0 or (name == "loss" and number == 0)):
            step_fields[name] = int(number) if name.startswith("batch_") else number
    clock = point.clock_s if point.clock_s is not None and math.isfinite(point.clock_s) else None
    step = LoggedStep(step=point.step, clock_s=clock, **step_fields)
    return step.without_timing() if log_format.untimed and point.values.get(log_format.untimed) else step


def fill_clock_times(steps: Iterable[LoggedStep]) -> Iterator[LoggedStep]:
    """Yield the steps with times from the clock: seconds since the previous logged step, over the steps between them."""
    previous: LoggedStep | None = None
    for step in steps:
        if (
            previous
            and previous.clock_s
            and step.clock_s
            and step.step > previous.step
            and step.clock_s > previous.clock_s
        ):
            yield replace(step, step_time_s=(step.clock_s - previous.clock_s) / (step.step - previous.step))
        else:
            yield step
        previous = step
