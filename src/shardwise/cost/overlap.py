"""How much of the communication shows, by convention.

`per_axis`: what real engines do: data-parallel traffic (fsdp, dp, and control: the loss) hides behind compute, the rest
is exposed.
`sum`: all communication adds up and hides behind compute as one (S0, section 4).
`max`: communication on different axes overlaps, so the longest counts, behind compute (S3, section 2).

A stack that was measured (`cluster.calibration.CONSTANTS`) shows the same share of all communication, and what compute is too
short to hide, under whichever convention.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from shardwise.job import Overlap
from shardwise.symbolic import Value, added, maximum

HIDEABLE = ("fsdp", "dp", "control")
# What hides besides where a forward and a backward pass of different micro-batches run together (DualPipe).
# Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1: AllToAlls and the pipeline's traffic.
HIDEABLE_TOGETHER = (*HIDEABLE, "ep", "pp")


def exposed_s(
    overlap: Overlap, compute_s: Value, traffic_s: Mapping[str, Value], hideable: Container[str] = HIDEABLE,
    share: Value | None = None,
) -> Value:  # fmt: skip
    """Seconds by which communication lengthens a phase with `compute_s` of compute; `traffic_s` by axis.

    `share`: the measured share of all of it that shows; None: what the convention says.
    """
    if share is not None:
        everything = added(traffic_s.values())
        hidden = [
            axis for axis in traffic_s if axis in hideable and axis not in HIDEABLE
        ]  # by the schedule, not the stack
        return maximum(everything - compute_s, share * added(t for axis, t in traffic_s.items() if axis not in hidden))
    if overlap == "sum":
        return maximum(added(traffic_s.values()) - compute_s, 0.0)
    if overlap == "max":
        return maximum(maximum(0.0, *traffic_s.values()) - compute_s, 0.0)
    open_s = added(t for axis, t in traffic_s.items() if axis not in hideable)
    hidden = added(t for axis, t in traffic_s.items() if axis in hideable)
    return open_s + maximum(hidden - compute_s, 0.0)


def exposed_by_axis(
    overlap: Overlap, compute_s: float, traffic_s: Mapping[str, float], hideable: Container[str] = HIDEABLE,
    share: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """The same for one layout, charged to the axes: their parts add up to `exposed_s`.

    Under `sum`, and where a stack was measured, each axis bears its share,
    under `max` the longest bears all of it, under `per_axis` each bears its own.
    """
    whole = exposed_s(overlap, compute_s, traffic_s, hideable, share)
    if share is not None:
        return _shared(whole, traffic_s)
    if overlap == "per_axis":
        own = {axis: t for axis, t in traffic_s.items() if axis not in hideable}
        return own | _shared(whole - sum(own.values()), {a: t for a, t in traffic_s.items() if a in hideable})
    if overlap == "max":
        longest = max(traffic_s, key=lambda axis: traffic_s[axis])
        return {axis: whole if axis == longest else 0.0 for axis in traffic_s}
    return _shared(whole, traffic_s)


def _shared(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {axis: whole * part / total if total > 0 else 0.0 for axis, part in parts.items()}
