"""How much of the communication is exposed, by convention.

`per_axis`: as in real engines: data-parallel communication (fsdp, dp, and control: the loss) hides behind compute, the rest is
exposed.

`sum`: all communication adds up and hides behind compute as one (S0, section 4).

`max`: communication on different axes overlaps, so the longest counts, behind compute (S3, section 2).

A measured stack (`hardware.calibration_constants.CONSTANTS`) exposes, under every convention, all communication that kernels
wait for (`BLOCKING`), and one share of the rest, or what compute is too short to hide where that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from shardwise.model.job import OverlapConvention
from shardwise.values.elementwise import Value, maximum, sum_values
from shardwise.values.errors import lookup

HIDEABLE = ("fsdp", "dp", "control")
# Axes that also hide where a forward and a backward pass of different micro-batches run together (DualPipe).
# Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1: AllToAlls and the pipeline's traffic.
HIDEABLE_TOGETHER = (*HIDEABLE, "ep", "pp")
# What a measured stack shows in full: a product waits for its operand and the next for its sum, attention for keys and values.
# What of it runs in pieces beside kernels (`derive.ring_attention_and_matmul`) hid there before. Published runs of
# unknown stacks are predicted
# within 10.4% on average where tensor parallelism is among these, within 11.8% where it shows a share as others do; transfers
# between stages and experts' exchanges are nearer as a share.
BLOCKING = ("tp", "cp")


SecondsByAxis = Mapping[str, Value]


class ExposureConvention(NamedTuple):
    """`exposed_s` of compute, traffic by axis and the axes that can hide; `charge` shares that out over the axes.

    `formula`: the part of one axis in symbols; None: its own, which no other axis changes.
    `adds_up`: the times of axes that are hidden alike may be added before it is asked, as the search does.
    """

    exposed_s: Callable[[Value, SecondsByAxis, Container[str]], Value]
    charge: Callable[[float, Mapping[str, float], Container[str]], dict[str, float]]
    formula: str | None = None
    adds_up: bool = True


def _per_axis(compute_s: Value, traffic_s: SecondsByAxis, hideable: Container[str]) -> Value:
    open_s = sum_values(t for axis, t in traffic_s.items() if axis not in hideable)
    hidden = sum_values(t for axis, t in traffic_s.items() if axis in hideable)
    return open_s + maximum(hidden - compute_s, 0.0)


def _charge_per_axis(whole: float, traffic_s: Mapping[str, float], hideable: Container[str]) -> dict[str, float]:
    own = {axis: t for axis, t in traffic_s.items() if axis not in hideable}
    return own | _prorate(whole - sum(own.values()), {a: t for a, t in traffic_s.items() if a in hideable})


def _charge_longest(whole: float, traffic_s: Mapping[str, float], hideable: Container[str]) -> dict[str, float]:
    longest = max(traffic_s, key=lambda axis: traffic_s[axis])
    return {axis: whole if axis == longest else 0.0 for axis in traffic_s}


CONVENTIONS: Mapping[str, ExposureConvention] = {
    "per_axis": ExposureConvention(_per_axis, _charge_per_axis),
    "sum": ExposureConvention(
        lambda compute_s, traffic_s, _: maximum(sum_values(traffic_s.values()) - compute_s, 0.0),
        lambda whole, traffic_s, _: _prorate(whole, traffic_s),
        formula="its part of Σ max(traffic - compute, 0), the traffic of all axes",
    ),
    "max": ExposureConvention(
        lambda compute_s, traffic_s, _: maximum(maximum(0.0, *traffic_s.values()) - compute_s, 0.0),
        _charge_longest,
        formula="Σ max(traffic - compute, 0) of the passes in which its traffic is the longest",
        adds_up=False,
    ),
}
MEASURED_FORMULA = "its part of max(traffic - compute, exposed · traffic), the traffic of all axes but tp and cp"


def get_convention(overlap: str) -> ExposureConvention:
    """A convention by name. Raises `InputError` that lists the names."""
    return lookup(CONVENTIONS, overlap, "overlap")


def exposed_s(
    overlap: OverlapConvention, compute_s: Value, traffic_s: Mapping[str, Value], hideable: Container[str] = HIDEABLE,
    share: Value | None = None,
) -> Value:  # fmt: skip
    """Seconds by which communication lengthens a phase with `compute_s` of compute; `traffic_s` by axis.

    `share`: the measured share that shows of what is not `BLOCKING`; None: what the convention says.
    """
    if share is not None:
        return sum_values(_blocking_seconds(traffic_s).values()) + _partly_exposed_s(
            compute_s, _other_seconds(traffic_s), hideable, share
        )
    return get_convention(overlap).exposed_s(compute_s, traffic_s, hideable)


def exposed_by_axis(
    overlap: OverlapConvention, compute_s: float, traffic_s: Mapping[str, float], hideable: Container[str] = HIDEABLE,
    share: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """The same for one layout, charged to the axes: their parts add up to `exposed_s`.

    Under `sum`, and of a stack's share, each axis bears its part, under `max` the longest bears all of it, under `per_axis`, and
    of what is `BLOCKING`, each bears its own.
    """
    if share is not None:
        others = _other_seconds(traffic_s)
        return _blocking_seconds(traffic_s) | _prorate(_partly_exposed_s(compute_s, others, hideable, share), others)
    whole = exposed_s(overlap, compute_s, traffic_s, hideable)
    return get_convention(overlap).charge(whole, traffic_s, hideable)


def exposed_formula(overlap: OverlapConvention, axis: str, own: str, *, measured: bool) -> str:
    """The exposed seconds of an axis in symbols; `own`: where each axis is charged its own, `measured`: under a measured
    stack."""
    if measured:
        return own if axis in BLOCKING else MEASURED_FORMULA
    return get_convention(overlap).formula or own


def _blocking_seconds(traffic_s: SecondsByAxis) -> dict[str, Any]:
    return {axis: seconds for axis, seconds in traffic_s.items() if axis in BLOCKING}


def _other_seconds(traffic_s: SecondsByAxis) -> dict[str, Any]:
    return {axis: seconds for axis, seconds in traffic_s.items() if axis not in BLOCKING}


def _partly_exposed_s(compute_s: Value, traffic_s: SecondsByAxis, hideable: Container[str], share: Value) -> Value:
    """Exposed seconds of communication next to compute: a share of what the schedule does not hide, or what compute is too
    short for."""
    by_stack = sum_values(t for axis, t in traffic_s.items() if axis in HIDEABLE or axis not in hideable)
    return maximum(sum_values(traffic_s.values()) - compute_s, share * by_stack)


def _prorate(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {axis: whole * part / total if total > 0 else 0.0 for axis, part in parts.items()}
