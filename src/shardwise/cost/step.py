"""The time of one pipeline stage's step, from the costs of its units. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from shardwise.cost.counts import Counts, add_up, times_each
from shardwise.cost.host import NOTHING, Host
from shardwise.cost.overlap import HIDEABLE, HIDEABLE_TOGETHER, exposed_s
from shardwise.cost.pipeline import Pipeline
from shardwise.cost.unit_costs import ACTIVATION_AXES, ActivationCost, StateCost
from shardwise.job import Overlap
from shardwise.schedule.schedule import Passes, schedule_of
from shardwise.symbolic import Value, maximum


class StageCost(NamedTuple):
    """A stage's seconds per micro-batch and per step, and its bytes apart from what depends on micro-batches in flight."""

    forward_s: Value
    backward_s: Value
    recompute_s: Value
    forward_traffic: Mapping[str, Value]
    backward_traffic: Mapping[str, Value]
    first_traffic: Mapping[str, Value]  # the first micro-batch's forward, with the step's weights
    last_traffic: Mapping[str, Value]  # the last micro-batch's backward, with the step's gradients
    update_s: Value
    weight_s: Value  # the part of the backward pass that can wait, where the schedule lets it
    host_s: Value = 0.0  # of a micro-batch's activations to the host, and as much back
    stream_s: Value = 0.0  # of the optimizer's state through the device


def stage_cost(
    counts: Counts, activation: Mapping[str, ActivationCost], state: Mapping[str, StateCost], schedule: str = "1f1b",
    host: Host = NOTHING,
) -> StageCost:  # fmt: skip
    """Add up a stage's units.

    The embedding's weight is gathered where it is used, whoever holds it. The weight gradients of layers can wait; those of
    embedding and head are taken at once, for the gradients of logits are too large to keep. Where micro-batches come from
    both ends, two devices hold the same weights and exchange gradients.
    """
    times = counts.units
    act = partial(add_up, activation, {**times, "carry": counts.carries})
    held = partial(add_up, state, counts.held)
    gathering = {**counts.held, "embedding": counts.embedding}
    fsdp_f, fsdp_b = add_up(state, gathering, "gather_forward_s"), held("gather_backward_s")
    leaving = {**counts.running, **counts.predicting}
    saved = add_up(activation, leaving, "saved_bytes") if host.activations else 0.0
    streamed = held("master_bytes") + held("optimizer_bytes") if host.optimizer else 0.0
    forward = {axis: act("forward_traffic_s", axis) for axis in ACTIVATION_AXES} | {"fsdp": fsdp_f}
    backward = {axis: act("backward_traffic_s", axis) for axis in ACTIVATION_AXES} | {"fsdp": fsdp_b}
    step = {axis: held("step_traffic_s", axis) for axis in ("fsdp", "dp", "control")}
    last = {**backward, **step, "fsdp": fsdp_b + step["fsdp"]}
    if counts.exchanges:
        last["pp"] = last["pp"] + state["embedding"].exchange_s
    if schedule_of(schedule).both_ends:
        last["pp"] = last["pp"] + held("exchange_s")
    weight_s = add_up(activation, counts.running, "weight_s") if schedule_of(schedule).splits_backward else 0.0
    return StageCost(
        act("forward_s"), act("backward_s"), act("recompute_s"), forward, backward,
        {**forward, "fsdp": fsdp_f + held("step_weights_s")},
        last, held("update_s"), weight_s, saved / host.bytes_per_s, streamed / host.bytes_per_s,
    )  # fmt: skip


class Span(NamedTuple):
    """A part of a step: how often it comes, its compute, and the traffic beside it, of which some axes' can hide."""

    times: Value
    compute_s: Value
    traffic: Mapping[str, Value]
    hideable: tuple[str, ...] = HIDEABLE


def spans(cost: StageCost, pipeline: Pipeline) -> tuple[Span, ...]:
    """The parts of a stage's step: steady forward and backward passes, alone and together, the first and the last pass."""
    work_b = cost.backward_s + cost.recompute_s
    ends = (Span(1, cost.forward_s, cost.first_traffic), Span(1, work_b, cost.last_traffic))
    alone = pipeline.rounds - 1
    together: tuple[Span, ...] = ()
    if pipeline.ends > 1:
        alone = alone - pipeline.overlapped
        together = (_together(cost, pipeline.overlapped),)
    steady = (Span(alone, cost.forward_s, cost.forward_traffic), Span(alone, work_b, cost.backward_traffic))
    return (*steady, *together, *ends)


def _together(cost: StageCost, times: Value) -> Span:
    """A forward and a backward pass of different micro-batches at once: each hides the other's traffic."""
    traffic = {axis: seconds + cost.backward_traffic[axis] for axis, seconds in cost.forward_traffic.items()}
    return Span(times, cost.forward_s + cost.backward_s + cost.recompute_s, traffic, HIDEABLE_TOGETHER)


def span_s(span: Span, overlap: Overlap, share: Value | None = None) -> Value:
    """Seconds of a span, once; `share`: see `exposed_s`."""
    return span.compute_s + exposed_s(overlap, span.compute_s, span.traffic, span.hideable, share)


class StepTime(NamedTuple):
    """Seconds of a step on one stage: all micro-batches, bubble and update."""

    total_s: Value
    bubble_s: Value


def step_time(cost: StageCost, pipeline: Pipeline, overlap: Overlap, share: Value | None = None) -> StepTime:
    """The bubble is made of steady micro-batches, without the step's own traffic."""
    parts = spans(cost, pipeline)
    seconds = [_beside(span_s(part, overlap, share), cost.host_s) for part in parts]
    overlapped = seconds[2] if pipeline.ends > 1 else 0.0
    waits = pipeline.bubble_s(Passes(seconds[0], seconds[1], cost.weight_s, overlapped))
    total = waits + _beside(cost.update_s, cost.stream_s)
    for part, once in zip(parts, seconds, strict=True):
        total = total + times_each(part.times, once)
    return StepTime(total, waits)


def _beside(own_s: Value, host_s: Value) -> Value:
    """A span with transfers to or from the host beside all of it: the longer of the two. PCIe is full-duplex, so those of a
    forward and a backward pass that run together do not add up."""
    return own_s if isinstance(host_s, float) and host_s == 0.0 else maximum(own_s, host_s)
