"""Named numbers of steps, as trackers of experiments keep them, and the steps of a framework that they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

from shardwise.measurement.logs.logged import LogFormat, LoggedStep, number

MOST_STEP = 10**12
# What a tracker calls the step, the most telling first. Sources: nanotron 0.4, trainer.py; Lightning 2.5, loggers/wandb.py; W&B's
# own, in its history and on the axis of its charts; MaxText e591f30c, metric_logger.py.
STEPS = ("iteration_step", "trainer/global_step", "_step", "Step", "step", "global_step")
CLOCKS = ("_timestamp", "_runtime")  # seconds, of W&B's history


class Point(NamedTuple):
    """Numbers that were logged of a step, by tag, and the second at which they were, where it is known."""

    step: int
    values: Mapping[str, float]
    clock_s: float | None = None


def point_of(row: Mapping[str, Any], tags: Collection[str]) -> Point | None:
    """What a row by column has of some tags; None for one without a step."""
    step = next((found for name in STEPS if (found := _plain(row.get(name))) is not None), None)
    if step is None:
        return None
    said = {tag: value for tag in tags if (value := _plain(row.get(tag))) is not None}
    return Point(
        int(step), said, next((found for name in CLOCKS if (found := _plain(row.get(name))) is not None), None)
    )


def _plain(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    return number(str(value)) if isinstance(value, (int, float, str)) else None


def format_of(tags: Set[str], formats: Iterable[LogFormat]) -> LogFormat | None:
    """The framework of which some tags are: that with most of them; None for tags that say neither pace nor loss of any."""
    told = [one for one in formats if not tags.isdisjoint(one.told_by)]
    return max(told, key=lambda one: len(tags & one.tags.keys()), default=None)


def gathered(points: Iterable[Point | None], most: int) -> tuple[dict[int, Point], int]:
    """Points by step, each with all that was logged of it, in the order in which they were last; of more than `most` the last.

    Beside them how many were None, which stands for one that is torn.
    """
    found: dict[int, Point] = {}
    torn = 0
    for point in points:
        if point is None:
            torn += 1
            continue
        earlier = found.pop(point.step, None)
        found[point.step] = Point(point.step, {**earlier.values, **point.values}, point.clock_s) if earlier else point
        if len(found) > most:
            del found[next(iter(found))]
    return found, torn


def steps_of(points: Iterable[Point], form: LogFormat) -> Iterator[LoggedStep]:
    """The steps of a framework.

    Where others have a rate, the time of a step without one does not count: it was one of another batch, or was torn.
    """
    steps = [step_of(point, form) for point in points if 0 <= point.step <= MOST_STEP]
    rated = any(step.tokens_per_s for step in steps)
    for step in steps:
        yield replace(step, step_time_s=None) if rated and not step.tokens_per_s else step


def step_of(point: Point, form: LogFormat) -> LoggedStep:
    """The step of a framework that a point is. Numbers that are not finite, and times and sizes not above 0, were not logged."""
    said: dict[str, Any] = {}
    for tag, (field, unit) in form.tags.items():
        value = point.values.get(tag, math.nan) * unit
        if math.isfinite(value) and (value > 0 or (field == "loss" and value == 0)):
            said[field] = int(value) if field.startswith("batch_") else value
    clock = point.clock_s if point.clock_s is not None and math.isfinite(point.clock_s) else None
    step = LoggedStep(step=point.step, clock_s=clock, **said)
    return step.untimed() if form.untimed and point.values.get(form.untimed) else step


def by_the_clock(steps: Iterable[LoggedStep]) -> Iterator[LoggedStep]:
    """The steps with the time between when each was logged and the one before it was, over the steps between them."""
    before: LoggedStep | None = None
    for step in steps:
        if before and before.clock_s and step.clock_s and step.step > before.step and step.clock_s > before.clock_s:
            yield replace(step, step_time_s=(step.clock_s - before.clock_s) / (step.step - before.step))
        else:
            yield step
        before = step
