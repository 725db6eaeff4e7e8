"""The noise scale that a run measured: over the tokens seen, beside its batch."""

from __future__ import annotations

import math

from shardwise.batch_size.noise_estimators import MeasuredNoise
from shardwise.batch_size.run_noise import RunNoise
from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Band, Line, LineChart
from shardwise.values import InputError, format_count


def run_noise_chart(found: RunNoise) -> LineChart:
    """The noise scale over the tokens seen, with its interval, beside the batch. Raises `InputError` where no part has one."""
    parts = [one for one in found.parts if 0 < one.measured.tokens < math.inf]
    if not parts:
        raise InputError(
            f"{found.path}: no part of the run has a noise scale to draw; more measured steps are required"
        )
    bounded = [one for one in parts if one.measured.low > 0 and one.measured.high < math.inf]
    ends = (parts[0].seen_tokens, parts[-1].seen_tokens)
    return LineChart(
        title="Gradient noise scale of a run", subtitle=f"{found.path.name}: {said(found.late)} over the last half",
        x=Axis(title="tokens seen", linear=True), y=Axis(title="tokens"),
        lines=(
            Line(label="noise scale", points=tuple((one.seen_tokens, one.measured.tokens) for one in parts)),
            Line(label="batch", points=tuple((end, found.batch_tokens) for end in ends), reference=True),
        ),
        bands=(
            Band(
                label="90% interval",
                edges=tuple((one.seen_tokens, one.measured.low, one.measured.high) for one in bounded),
            ),
        ) if len(bounded) > 1 else (),
    )  # fmt: skip


def said(found: MeasuredNoise) -> str:
    """A noise scale in words: "11.2K tokens, 90% interval 9.1K to 14K"."""
    high = "above" if found.high == math.inf else f"to {format_count(found.high)}"
    ends = f"{format_count(found.low)} {'and ' if found.high == math.inf else ''}{high}"
    tokens = "not told apart from infinity" if found.tokens == math.inf else f"{format_count(found.tokens)} tokens"
    return f"{tokens}, 90% interval {ends}"
