"""What the figures share: axes and evenly spread numbers."""

from __future__ import annotations

import math

from shardwise.present.draw.axis import Axis

SAMPLES_PER_DECADE = 24
INTENSITY = Axis(title="intensity, FLOPs per byte moved")
RATE = Axis(title="attainable FLOP/s of one chip")
BATCH = Axis(title="tokens of the global batch")


def spread(low: float, high: float) -> tuple[float, ...]:
    """Numbers evenly apart on a logarithmic axis, both ends included."""
    count = max(1, round(SAMPLES_PER_DECADE * math.log10(high / low)))
    return tuple(low * (high / low) ** (i / count) for i in range(count + 1))
