"""Bubbles and micro-batches in flight of pipeline schedules in closed form, for numbers or arrays.

AFAB and 1F1B run whole backward passes, interleaved 1F1B those of several virtual stages. ZB-H1 and ZB-H2 split the
backward pass: the weights' gradients (W) wait, and fill what would be idle. DualPipe sends micro-batches from both ends, so
each device holds two stages, and runs a forward and a backward pass of different micro-batches together.

Sources: S1, "pipeline parallelism"; Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.3; Qi et al.
2023, "Zero Bubble Pipeline Parallelism", section 2 and table 1; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", table 2.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.symbolic import Value, maximum, minimum, where

Schedule = Literal["none", "afab", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe"]
SCHEDULES: tuple[Schedule, ...] = ("none", "afab", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe")
SPLIT = ("zb_h1", "zb_h2", "dualpipe")  # those that split the backward pass in two
NATURAL = "natural"  # in a search: for each row the one that goes with its stages
BOTH_ENDS = ("dualpipe",)  # those whose micro-batches come in from both ends


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


def bubble_s(schedule: str, pp: Value, num_virtual_stages: Value, passes: Passes) -> Value:
    """Seconds that a stage waits in a step, for the first and the last micro-batch and between; never less than nothing.

    AFAB, 1F1B and interleaved 1F1B (p - 1)(F + B) / v, ZB-H1 (p - 1)(F + B - 2W), ZB-H2 (p - 1)(F + B - 3W), DualPipe
    (p/2 - 1)(F&B + B - 3W), with B the whole backward pass. Differs: Qi et al. call B what is left of it without W.
    Assumes: stages that take alike; ZB-H2 also an optimizer step that does not wait for all stages (their section 4).
    """
    forward, backward, weight, overlapped = passes
    if schedule == "zb_h1":
        return (pp - 1) * maximum(forward + backward - 2.0 * weight, 0.0)
    if schedule == "zb_h2":
        return (pp - 1) * maximum(forward + backward - 3.0 * weight, 0.0)
    if schedule == "dualpipe":
        return (pp / 2.0 - 1.0) * maximum(overlapped + backward - 3.0 * weight, 0.0)
    return (forward + backward) * ((pp - 1) / num_virtual_stages)


def bubble_ratio(pp: Value, num_micro_batches: Value, num_virtual_stages: Value = 1) -> Value:
    """Idle time over ideal time, (p - 1) / (v m): AFAB and 1F1B with v = 1, interleaved 1F1B with v > 1."""
    return (pp - 1) / (num_virtual_stages * num_micro_batches)


def num_overlapped(schedule: str, pp: Value, num_micro_batches: Value) -> Value:
    """Forward passes of a device that run together with a backward pass: m - p - 1 in DualPipe, none in others.

    Counted on the devices in the middle, which wait for as long as the closed form says; those at the ends have fewer pairs
    and wait less. Source: the order of passes in DeepSeek's published implementation.
    """
    return num_micro_batches - pp - 1 if schedule == "dualpipe" else 0


def min_micro_batches(schedule: str, pp: Value) -> Value:
    """The fewest micro-batches with which the schedule's closed forms hold.

    ZB-H1 warms up with p of them, ZB-H2 with 2p - 1; DualPipe's implementation requires 2p.
    """
    fewest = {"zb_h1": pp, "zb_h2": 2 * pp - 1, "dualpipe": 2 * pp}
    return fewest.get(schedule, 1)


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


def in_flight_split(schedule: str, pp: Value, num_micro_batches: Value) -> Value:
    """Micro-batches of which any stage holds something: p in ZB-H1, 2p - 1 in ZB-H2, p + 1 in DualPipe.

    The later the stage, the more of them only wait for their weights' gradients (`num_waiting`).
    """
    most = {"zb_h1": pp, "zb_h2": 2 * pp - 1, "dualpipe": pp + 1}
    return minimum(num_micro_batches, most[schedule])


def num_waiting(schedule: str, pp: Value, num_micro_batches: Value, stage: Value) -> Value:
    """How many of those in flight may hold only what their weights' gradients are made of.

    ZB-H1 i and ZB-H2 2i on stage i (from 0): Qi et al. have (p - i) M_B + i M_W and (2p - 2i - 1) M_B + 2i M_W. DualPipe
    i + 1 on the devices i and p - 1 - i, counted in the published implementation's order of passes.
    """
    if schedule == "zb_h1":
        return minimum(num_micro_batches, stage)
    if schedule == "zb_h2":
        return minimum(num_micro_batches, 2 * stage)
    if schedule == "dualpipe":
        return minimum(stage, pp - 1 - stage) + 1
    return 0


def in_flight(
    pp: Value, num_micro_batches: Value, num_virtual_stages: Value, stage: Value, schedule: str = "1f1b"
) -> Value:
    """Of any schedule. 1F1B is taken as interleaved where there is more than one virtual stage; without a pipeline it is 1."""
    if schedule == "afab":
        return in_flight_afab(num_micro_batches)
    if schedule in SPLIT:
        return in_flight_split(schedule, pp, num_micro_batches)
    plain = in_flight_1f1b(pp, num_micro_batches, stage)
    interleaved = in_flight_interleaved(pp, num_micro_batches, num_virtual_stages, stage)
    return where(num_virtual_stages > 1, interleaved, plain)
