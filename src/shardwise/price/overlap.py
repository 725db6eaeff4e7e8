"""Conventions of overlap: how much of the communication is exposed.

`per_axis`: as in real engines, data-parallel communication (fsdp, dp, and control: the loss) hides behind compute, the
rest is exposed. `sum`: all communication adds up and hides behind compute as one (S0, section 4). `max`: communication
on different axes overlaps, so the longest counts, behind compute (S3, section 2).

A measured stack (`hardware.calibration_constants.CONSTANTS`) exposes, under every convention, all communication that
kernels wait for (`BLOCKING`), and one share of the rest, or what compute is too short to hide where that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from shardwise.model import OverlapConvention
from shardwise.values import Value, lookup, maximum, sum_values

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
    """An overlap convention.

    `exposed_s(compute_s, traffic_s, hideable)` takes seconds by axis and the axes that can hide; `charge` shares its
    result out over the axes. `formula`: the part of one axis as text; None: the axis's own, which no other axis
    changes. `adds_up`: times of axes that hide alike may be summed beforehand, as the search does.
    """

    exposed_s: Callable[[Value, SecondsByAxis, Container[str]], Value]
    charge: Callable[[float, Mapping[str, float], Container[str]], dict[str, float]]
    formula: str | None = None
    adds_up: bool = True


def _per_axis(compute_s: Value, traffic_s: SecondsByAxis, hideable: Container[str]) -> Value:
    open_s = sum_values(t for axis, t in traffic_s.items() if axis not in hideable)
    hidden = sum_values(t for axis, t in traffic_s.items() if axis in hideable)
    return open_s + maximum(hidden - compute_s, 0.0)


def _charge_per_axis(exposed: float, traffic_s: Mapping[str, float], hideable: Container[str]) -> dict[str, float]:
    open_s = {axis: t for axis, t in traffic_s.items() if axis not in hideable}
    return open_s | _prorate(exposed - sum(open_s.values()), {a: t for a, t in traffic_s.items() if a in hideable})


def _charge_longest(exposed: float, traffic_s: Mapping[str, float], hideable: Container[str]) -> dict[str, float]:
    longest = max(traffic_s, key=lambda axis: traffic_s[axis])
    return {axis: exposed if axis == longest else 0.0 for axis in traffic_s}


CONVENTIONS: Mapping[str, ExposureConvention] = {
    "per_axis": ExposureConvention(_per_axis, _charge_per_axis),
    "sum": ExposureConvention(
        lambda compute_s, traffic_s, _: maximum(sum_values(traffic_s.values()) - compute_s, 0.0),
        lambda exposed, traffic_s, _: _prorate(exposed, traffic_s),
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
    """Return a convention by name. Raises `InputError` that lists the names."""
    return lookup(CONVENTIONS, overlap, "overlap")


def exposed_s(
    overlap: OverlapConvention, compute_s: Value, traffic_s: Mapping[str, Value], hideable: Container[str] = HIDEABLE,
    share: Value | None = None,
) -> Value:  # fmt: skip
    """Return the seconds by which communication, `traffic_s` by axis, lengthens a phase with `compute_s` of compute.

    `share`: the measured share that shows of what is not `BLOCKING`; None: what the convention says.
    """
    if share is not None:
        blocking_s = sum_values(_blocking_seconds(traffic_s).values())
        return blocking_s + _partly_exposed_s(compute_s, _other_seconds(traffic_s), hideable, share)
    return get_convention(overlap).exposed_s(compute_s, traffic_s, hideable)


def exposed_by_axis(
    overlap: OverlapConvention, compute_s: float, traffic_s: Mapping[str, float], hideable: Container[str] = HIDEABLE,
    share: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the exposed seconds of one layout, charged to the axes: they add up to `exposed_s`.

    Under `sum`, and of a stack's share, each axis bears its part, under `max` the longest bears all, under `per_axis`,
    and of what is `BLOCKING`, each bears its own.
    """
    if share is not None:
        nonblocking_s = _other_seconds(traffic_s)
        exposed = _partly_exposed_s(compute_s, nonblocking_s, hideable, share)
        return _blocking_seconds(traffic_s) | _prorate(exposed, nonblocking_s)
    exposed = exposed_s(overlap, compute_s, traffic_s, hideable)
    return get_convention(overlap).charge(exposed, traffic_s, hideable)


def exposed_formula(overlap: OverlapConvention, axis: str, per_axis_formula: str, *, measured: bool) -> str:
    """Return the exposed seconds of an axis as text.

    `per_axis_formula`: the text where each axis is charged its own; `measured`: under a measured stack.
    """
    if measured:
        return per_axis_formula if axis in BLOCKING else MEASURED_FORMULA
    return get_convention(overlap).formula or per_axis_formula


def _blocking_seconds(traffic_s: SecondsByAxis) -> dict[str, Any]:
    return {axis: seconds for axis, seconds in traffic_s.items() if axis in BLOCKING}


def _other_seconds(traffic_s: SecondsByAxis) -> dict[str, Any]:
    return {axis: seconds for axis, seconds in traffic_s.items() if axis not in BLOCKING}


def _partly_exposed_s(compute_s: Value, traffic_s: SecondsByAxis, hideable: Container[str], share: Value) -> Value:
    """Return the larger of a share of what the schedule does not hide, and of what compute is too short for."""
    by_stack = sum_values(t for axis, t in traffic_s.items() if axis in HIDEABLE or axis not in hideable)
    return maximum(sum_values(traffic_s.values()) - compute_s, share * by_stack)


def _prorate(total_s: float, parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {axis: total_s * part / total if total > 0 else 0.0 for axis, part in parts.items()}
