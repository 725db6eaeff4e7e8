"""A step as a framework logged it, the description of a framework's log, and the steps that tagged values of a tracker make.

`LogFormat` describes the lines and tags of a framework. TensorBoard, W&B and lines of JSON give `TaggedValues`, which become
`LoggedStep` by the tags of a format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

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

    def without_timing(self) -> LoggedStep:
        """The step without how fast it was."""
        return replace(self, step_time_s=None, tokens_per_s=None, tflops=None, mfu=None)

    def merge(self, later: LoggedStep) -> LoggedStep:
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

    `markers`: a line of a step has one of them, and none of `excluded_markers`. `step` reads such a line; None: it is torn.
    `memory` reads the peak of one device, in bytes, off a line with `memory_marker`; `memory_kind` is the instrument.

    `tags`: its names of numbers in TensorBoard, in W&B and in lines of JSON; the name `identifying_tag` identifies the framework,
    where the others are common. A step with a number other than 0 for `untimed` was slowed down by a profiler or the like.
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

    def has_step(self, line: bytes) -> bool:
        """Whether a line is one of a step, as far as its words tell; it may be torn."""
        return any(marker in line for marker in self.markers) and not any(
            other in line for other in self.excluded_markers
        )

    @property
    def identifying_tags(self) -> tuple[str, ...]:
        """The tags of which one shows that others are its own: they say how fast a step was, or its loss."""
        named = [tag for tag, (name, _) in self.tags.items() if name in ("step_time_s", "tokens_per_s", "loss")]
        return (self.identifying_tag,) if self.identifying_tag else tuple(named)


def parse_finite(text: str | None) -> float | None:
    """A finite number; None for what is none, such as `nan`, or a value that was not printed."""
    try:
        value = float(text.replace(",", "")) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_positive(text: str | None) -> float | None:
    """A number above 0: what times, rates and memory are."""
    value = parse_finite(text)
    return value if value is not None and value > 0 else None


def parse_percent(text: str | None) -> float | None:
    """A part of a whole that was printed in percent."""
    value = parse_positive(text)
    return None if value is None else value / 100.0


def parse_scaled(text: str | None, unit: float) -> float | None:
    """A size above 0 that was printed in a unit."""
    value = parse_positive(text)
    return None if value is None else value * unit


LARGEST_STEP = 10**12
# What a tracker calls the step, the most telling first. Sources: nanotron 0.4, trainer.py; Lightning 2.5, loggers/wandb.py; W&B's
# own, in its history and on the axis of its charts; MaxText e591f30c, metric_logger.py.
STEP_COLUMNS = ("iteration_step", "trainer/global_step", "_step", "Step", "step", "global_step")
CLOCK_COLUMNS = ("_timestamp", "_runtime")  # seconds, of W&B's history


class TaggedValues(NamedTuple):
    """Numbers that were logged of a step, by tag, and the second at which they were, where it is known."""

    step: int
    values: Mapping[str, float]
    clock_s: float | None = None


def row_to_values(row: Mapping[str, Any], tags: Collection[str]) -> TaggedValues | None:
    """What a row by column has of some tags; None for one without a step."""
    step = next((found for name in STEP_COLUMNS if (found := _to_number(row.get(name))) is not None), None)
    if step is None:
        return None
    said = {tag: value for tag in tags if (value := _to_number(row.get(tag))) is not None}
    return TaggedValues(
        int(step),
        said,
        next((found for name in CLOCK_COLUMNS if (found := _to_number(row.get(name))) is not None), None),
    )


def _to_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    return parse_finite(str(value)) if isinstance(value, (int, float, str)) else None


def detect_format(tags: Set[str], formats: Iterable[LogFormat]) -> LogFormat | None:
    """The framework of which some tags are: that with most of them; None for tags that say neither pace nor loss of any."""
    told = [one for one in formats if not tags.isdisjoint(one.identifying_tags)]
    return max(told, key=lambda one: len(tags & one.tags.keys()), default=None)


def merge_by_step(points: Iterable[TaggedValues | None], most: int) -> tuple[dict[int, TaggedValues], int]:
    """Points by step, each with all that was logged of it, in the order in which they were last; of more than `most` the last.

    Beside them how many were None, which stands for one that is torn.
    """
    found: dict[int, TaggedValues] = {}
    torn = 0
    for point in points:
        if point is None:
            torn += 1
            continue
        earlier = found.pop(point.step, None)
        found[point.step] = (
            TaggedValues(point.step, {**earlier.values, **point.values}, point.clock_s) if earlier else point
        )
        if len(found) > most:
            del found[next(iter(found))]
    return found, torn


def to_steps(points: Iterable[TaggedValues], form: LogFormat) -> Iterator[LoggedStep]:
    """The steps of a framework.

    Where others have a rate, the time of a step without one does not count: it was one of another batch, or was torn.
    """
    steps = [to_step(point, form) for point in points if 0 <= point.step <= LARGEST_STEP]
    rated = any(step.tokens_per_s for step in steps)
    for step in steps:
        yield replace(step, step_time_s=None) if rated and not step.tokens_per_s else step


def to_step(point: TaggedValues, form: LogFormat) -> LoggedStep:
    """The step of a framework that a point is. Numbers that are not finite, and times and sizes not above 0, were not logged."""
    said: dict[str, Any] = {}
    for tag, (name, unit) in form.tags.items():
        value = point.values.get(tag, math.nan) * unit
        if math.isfinite(value) and (value > 0 or (name == "loss" and value == 0)):
            said[name] = int(value) if name.startswith("batch_") else value
    clock = point.clock_s if point.clock_s is not None and math.isfinite(point.clock_s) else None
    step = LoggedStep(step=point.step, clock_s=clock, **said)
    return step.without_timing() if form.untimed and point.values.get(form.untimed) else step


def fill_clock_times(steps: Iterable[LoggedStep]) -> Iterator[LoggedStep]:
    """The steps with the time between when each was logged and the one before it was, over the steps between them."""
    before: LoggedStep | None = None
    for step in steps:
        if before and before.clock_s and step.clock_s and step.step > before.step and step.clock_s > before.clock_s:
            yield replace(step, step_time_s=(step.clock_s - before.clock_s) / (step.step - before.step))
        else:
            yield step
        before = step
