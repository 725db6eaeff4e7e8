"""Formats as charts: how far apart their numbers are at every size, and what points between 1 and 2 are rounded to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Line, LineChart
from shardwise.values import NumberFormat
from shardwise.values.quantization import round_to_format

NUM_POINTS = 10_000  # Nanotron team 2025, The Ultra-Scale Playbook, mixed precision training


def format_charts(formats: Sequence[NumberFormat]) -> tuple[LineChart, LineChart]:
    """The range and the resolution of formats, a line for each."""
    return _range_chart(formats), _rounding_chart(formats)


def _range_chart(formats: Sequence[NumberFormat]) -> LineChart:
    return LineChart(
        title="Range and resolution",
        subtitle="distance to the next number, over the number: from the smallest subnormal to the largest number",
        x=Axis(title="size of a number", unit="x"), y=Axis(title="relative distance to the next", unit="x"),
        lines=tuple(Line(label=one.name, points=tuple(_distances(one))) for one in formats),
    )  # fmt: skip


def _distances(one: NumberFormat) -> Iterator[tuple[float, float]]:
    """Of powers of two, where the relative distance is largest: subnormals are evenly spaced, and so lose bits."""
    exponent, largest = int(np.log2(one.min_subnormal)), int(np.floor(np.log2(one.max)))
    for power in (2.0**e for e in range(exponent, largest + 1)):
        yield power, max(power, one.min_normal) * one.epsilon / power
    if one.max > 2.0**largest:
        yield one.max, 2.0**largest * one.epsilon / one.max


def _rounding_chart(formats: Sequence[NumberFormat]) -> LineChart:
    counts = ", ".join(f"{one.name} {one.num_between_1_and_2:,}" for one in formats)
    return LineChart(
        title=f"{NUM_POINTS:,} points between 1 and 2, rounded",
        subtitle=f"numbers from 1 up to 2: {counts}",
        x=Axis(title="x - 1", unit="x", linear=True), y=Axis(title="x rounded, - 1", unit="x", linear=True),
        lines=tuple(Line(label=one.name, points=tuple(_steps(one))) for one in formats),
    )  # fmt: skip


def _steps(one: NumberFormat) -> Iterator[tuple[float, float]]:
    """The points at which the rounded value is another one than before or behind: the corners of the staircase.

    Where nearly every point is a number of its own the staircase is a straight line, to less than a pixel.
    """
    x = 1.0 + np.arange(NUM_POINTS) / (NUM_POINTS - 1)
    y = round_to_format(x, one)
    changes = np.flatnonzero(np.diff(y))
    corners = np.unique(np.concatenate([[0], changes, changes + 1, [NUM_POINTS - 1]]))
    if len(corners) > NUM_POINTS // 2:
        corners = corners[[0, -1]]
    yield from zip((x[corners] - 1).tolist(), (y[corners] - 1).tolist(), strict=True)
