"""Bubbles and micro-batches in flight of pipeline schedules in closed form, for numbers or arrays.

AFAB and 1F1B run whole backward passes, interleaved 1F1B those of several virtual stages. ZB-H1 and ZB-H2 split the
backward pass: the weights' gradients (W) wait, and fill what would be idle. DualPipe sends micro-batches from both ends, so
each device holds two stages, and runs a forward and a backward pass of different micro-batches together.

Every schedule is a row of `FORMS`; a name that is not there is an error and never another schedule.

Sources: S1, "pipeline parallelism"; Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.3; Qi et al.
2023, "Zero Bubble Pipeline Parallelism", section 2 and table 1; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", table 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shardwise.errors import chosen
from shardwise.symbolic import Value, maximum, minimum, where

Schedule = Literal["none", "afab", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe"]
SCHEDULES: tuple[Schedule, ...] = ("none", "afab", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe")
NATURAL = "natural"  # in a search: for each row the one that goes with its stages


class Passes(NamedTuple):
    """Seconds of one micro-batch on one stage, with the traffic that shows.

    `backward_s` is the whole backward pass with what it recomputes, `weight_s` the part of it for the weights' gradients
    (0 where nobody asks for it), `overlapped_s` a forward and a backward pass that run together.
    """

    forward_s: Value
    backward_s: Value
    weight_s: Value = 0.0
    overlapped_s: Value = 0.0


def natural_schedule(pp: int, num_virtual_stages: int) -> Schedule:
    """The schedule that goes with the degrees when none is named."""
    return "none" if pp == 1 else "interleaved" if num_virtual_stages > 1 else "1f1b"


def bubble_ratio(pp: Value, num_micro_batches: Value, num_virtual_stages: Value = 1) -> Value:
    """Idle time over ideal time, (p - 1) / (v m): AFAB and 1F1B with v = 1, interleaved 1F1B with v > 1."""
    return (pp - 1) / (num_virtual_stages * num_micro_batches)


def in_flight_1f1b(pp: Value, num_micro_batches: Value, stage: Value) -> Value:
    """Micro-batches whose activations stage `stage` (from 0) holds at once: min(m, p - stage)."""
    return minimum(num_micro_batches, pp - stage)


def in_flight_interleaved(pp: Value, num_micro_batches: Value, num_virtual_stages: Value, stage: Value) -> Value:
    """The same for interleaved 1F1B, in units of a whole stage's activations.

    Warm-up runs 2 (p - stage - 1) + (v - 1) p virtual stages forward and one more is in the steady state, each 1/v of
    the stage: p (1 + (p - 1) / (p v)) on the first stage. Source: Megatron-LM's warm-up count; Korthikanti et al. 2022.
    """
    chunks = 2 * (pp - stage - 1) + (num_virtual_stages - 1) * pp + 1
    return minimum(num_micro_batches, chunks / num_virtual_stages)


def in_flight_afab(num_micro_batches: Value) -> Value:
    """All-forward-all-backward holds every micro-batch."""
    return num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The closed forms of one schedule: p stages of v virtual ones, m micro-batches, a stage counted from 0.

    `goes_with(p, v)`: whether it can run on so many stages. `bubble_s(p, v, passes)`: seconds that a stage waits in a step,
    which `bubble` writes for people. `in_flight(p, m, v, stage)`: micro-batches whose activations a stage holds;
    `num_waiting(p, m, stage)`: how many of these may hold only what their weights' gradients are made of.
    `num_overlapped(p, m)`: forward passes of a device that run together with a backward pass. `min_micro_batches(p)`: the
    fewest with which the closed forms hold. `splits_backward`: the weights' gradients wait; `both_ends`: micro-batches come in
    from both ends.
    """

    goes_with: Callable[[Value, Value], Value]
    bubble_s: Callable[[Value, Value, Passes], Value]
    bubble: str
    in_flight: Callable[[Value, Value, Value, Value], Value]
    num_waiting: Callable[[Value, Value, Value], Value] = lambda p, m, stage: 0
    num_overlapped: Callable[[Value, Value], Value] = lambda p, m: 0
    min_micro_batches: Callable[[Value], Value] = lambda p: 1
    splits_backward: bool = False
    both_ends: bool = False


def _whole_passes_s(p: Value, v: Value, passes: Passes) -> Value:
    return (passes.forward_s + passes.backward_s) * ((p - 1) / v)


def _one_then_one(p: Value, m: Value, v: Value, stage: Value) -> Value:
    """1F1B, interleaved where there are virtual stages; 1 without a pipeline."""
    return where(v > 1, in_flight_interleaved(p, m, v, stage), in_flight_1f1b(p, m, stage))


def _alone(p: Value, v: Value) -> Value:
    return (p > 1) & (v == 1)


_1F1B = Form(goes_with=_alone, bubble_s=_whole_passes_s, bubble="(p - 1) · (F + B) / v", in_flight=_one_then_one)
FORMS: Mapping[str, Form] = {
    "none": replace(_1F1B, goes_with=lambda p, v: p == 1),
    "afab": replace(_1F1B, in_flight=lambda p, m, v, stage: in_flight_afab(m)),
    "1f1b": _1F1B,
    "interleaved": replace(_1F1B, goes_with=lambda p, v: v > 1),
    # On stage i i micro-batches wait of p in flight, p M_B on the first and (p - i) M_B + i M_W in Qi et al.'s words.
    "zb_h1": Form(
        goes_with=_alone, bubble="(p - 1) · (F + B - 2W)",
        bubble_s=lambda p, v, t: (p - 1) * maximum(t.forward_s + t.backward_s - 2.0 * t.weight_s, 0.0),
        in_flight=lambda p, m, v, stage: minimum(m, p), num_waiting=lambda p, m, stage: minimum(m, stage),
        min_micro_batches=lambda p: p, splits_backward=True,
    ),
    # (2p - 2i - 1) M_B + 2i M_W
    "zb_h2": Form(
        goes_with=_alone, bubble="(p - 1) · (F + B - 3W)",
        bubble_s=lambda p, v, t: (p - 1) * maximum(t.forward_s + t.backward_s - 3.0 * t.weight_s, 0.0),
        in_flight=lambda p, m, v, stage: minimum(m, 2 * p - 1), num_waiting=lambda p, m, stage: minimum(m, 2 * stage),
        min_micro_batches=lambda p: 2 * p - 1, splits_backward=True,
    ),
    # Waiting on the devices i and p - 1 - i, and pairs on those in the middle, as counted in the published implementation's
    # order of passes, which requires 2p micro-batches. The middle waits for as long as the closed form says; devices at the ends
    # have fewer pairs and wait less.
    "dualpipe": Form(
        goes_with=_alone, bubble="(p/2 - 1) · (F&B + B - 3W)",
        bubble_s=lambda p, v, t: (p / 2.0 - 1.0) * maximum(t.overlapped_s + t.backward_s - 3.0 * t.weight_s, 0.0),
        in_flight=lambda p, m, v, stage: minimum(m, p + 1),
        num_waiting=lambda p, m, stage: minimum(stage, p - 1 - stage) + 1,
        num_overlapped=lambda p, m: m - p - 1, min_micro_batches=lambda p: 2 * p, splits_backward=True, both_ends=True,
    ),
    NATURAL: replace(_1F1B, goes_with=lambda p, v: True),
}  # fmt: skip


def form_of(schedule: str) -> Form:
    """A schedule's closed forms by its name. Raises `InputError` that lists the names.

    >>> form_of("zb_h1").min_micro_batches(4)
    4
    """
    return chosen(FORMS, schedule, "schedule")


def bubble_s(schedule: str, pp: Value, num_virtual_stages: Value, passes: Passes) -> Value:
    """Seconds that a stage waits in a step, for the first and the last micro-batch and between; never less than nothing.

    AFAB, 1F1B and interleaved 1F1B (p - 1)(F + B) / v, ZB-H1 (p - 1)(F + B - 2W), ZB-H2 (p - 1)(F + B - 3W), DualPipe
    (p/2 - 1)(F&B + B - 3W), with B the whole backward pass. Differs: Qi et al. call B what is left of it without W.
    Assumes: stages that take alike; ZB-H2 also an optimizer step that does not wait for all stages (their section 4).
    Raises `InputError` for a schedule that is not known.
    """
    return form_of(schedule).bubble_s(pp, num_virtual_stages, passes)


def num_overlapped(schedule: str, pp: Value, num_micro_batches: Value) -> Value:
    """Forward passes of a device that run together with a backward pass: m - p - 1 in DualPipe, none in others."""
    return form_of(schedule).num_overlapped(pp, num_micro_batches)


def min_micro_batches(schedule: str, pp: Value) -> Value:
    """The fewest micro-batches with which the schedule's closed forms hold.

    ZB-H1 warms up with p of them, ZB-H2 with 2p - 1; DualPipe's implementation requires 2p.
    """
    return form_of(schedule).min_micro_batches(pp)


def num_waiting(schedule: str, pp: Value, num_micro_batches: Value, stage: Value) -> Value:
    """How many of those in flight may hold only what their weights' gradients are made of.

    ZB-H1 i and ZB-H2 2i on stage i (from 0): Qi et al. have (p - i) M_B + i M_W and (2p - 2i - 1) M_B + 2i M_W. DualPipe
    i + 1 on the devices i and p - 1 - i, counted in the published implementation's order of passes.
    """
    return form_of(schedule).num_waiting(pp, num_micro_batches, stage)


def in_flight(
    pp: Value, num_micro_batches: Value, num_virtual_stages: Value, stage: Value, schedule: str = "1f1b"
) -> Value:
    """Micro-batches of which a stage holds something, of any schedule. 1F1B is taken as interleaved where there is more than
    one virtual stage; without a pipeline it is 1. Of the split ones it is the most of any stage: the later the stage, the more
    of them only wait for their weights' gradients (`num_waiting`)."""
    return form_of(schedule).in_flight(pp, num_micro_batches, num_virtual_stages, stage)


def in_flight_split(schedule: str, pp: Value, num_micro_batches: Value) -> Value:
    """Micro-batches of which any stage holds something: p in ZB-H1, 2p - 1 in ZB-H2, p + 1 in DualPipe.

    The later the stage, the more of them only wait for their weights' gradients (`num_waiting`). Raises `InputError` for a
    schedule that does not split the backward pass, whose stages hold different numbers.
    """
    split = {name: form for name, form in FORMS.items() if form.splits_backward}
    return chosen(split, schedule, "schedule").in_flight(pp, num_micro_batches, 1, 0)
