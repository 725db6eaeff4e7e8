"""One pipeline stage's step: time, traffic and memory, from the costs of its units. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from shardwise.cost.host import NOTHING, STAYING, Host
from shardwise.cost.overlap import HIDEABLE, HIDEABLE_TOGETHER, exposed_s
from shardwise.cost.unit import ActivationCost, StateCost
from shardwise.job import Overlap
from shardwise.layout.stages import recomputed_layers
from shardwise.schedule.closed_form import BOTH_ENDS, SPLIT, Passes, bubble_s, in_flight, num_overlapped, num_waiting
from shardwise.symbolic import Value, maximum

KEPT = "kept_"  # before the name of a kind of layer: one that recomputes nothing, in a stage where others do


class Counts(NamedTuple):
    """What a stage holds: layers by kind, and whether the embedding and the head (1 or 0); virtual stages it hands over from.

    `kept` are the layers by kind that recompute nothing though the others do; empty where all layers do the same.
    `predict` are modules of multi-token prediction, on the last stage. `copies` are those of the embedding's weight: 0
    where the head's serves (tied, and one stage holds both); `exchanges` is 1 where the gradients of two copies are
    exchanged (first and last stage of a pipeline).
    """

    layers: Mapping[str, Value]
    embedding: int
    head: int
    predict: int
    carries: Value
    copies: int
    exchanges: int
    kept: Mapping[str, Value]

    @property
    def units(self) -> dict[str, Value]:
        """How often the stage has each unit that computes."""
        return {**self.running, "embedding": self.embedding, "head": self.head, "predict": self.predict}

    @property
    def running(self) -> dict[str, Value]:
        """The layers by kind, those that recompute nothing as kinds of their own."""
        again = {kind: count - self.kept.get(kind, 0) for kind, count in self.layers.items()}
        return {**again, **{KEPT + kind: count for kind, count in self.kept.items()}}

    @property
    def held(self) -> dict[str, Value]:
        """How often the stage holds each unit's weights."""
        ends = {"embedding": self.copies, "head": self.head, "predict": self.predict}
        return {**self.layers, **ends}


class Model(NamedTuple):
    """What of a model the stages depend on."""

    tied: bool
    num_predict_layers: int


def stage_counts(
    layers: Mapping[str, Value], model: Model, *, first: bool, last: bool, num_virtual_stages: Value,
    recompute_layers: Value | None = None,
) -> Counts:  # fmt: skip
    """The counts of a stage that is the first, the last, both (no pipeline) or neither.

    A tied embedding is one tensor with two uses, and so is one that multi-token prediction borrows.
    """
    again = recomputed_layers(layers, recompute_layers)
    alone = first and last
    borrowed = last and model.num_predict_layers > 0
    return Counts(
        layers,
        embedding=int(first),
        head=int(last),
        predict=model.num_predict_layers if last else 0,
        carries=0 if alone else num_virtual_stages,
        copies=int((first and not (model.tied and alone)) or (borrowed and not alone and not model.tied)),
        exchanges=int((model.tied or model.num_predict_layers > 0) and first != last),
        kept={} if recompute_layers is None else {kind: count - again[kind] for kind, count in layers.items()},
    )


def both_ends_counts(
    layers: Mapping[str, Value], model: Model, *, ends: bool, recompute_layers: Value | None = None
) -> Counts:
    """The counts of a device that holds a stage and its mirror image (`layers` of both), for micro-batches from both ends.

    At the ends that is the first and the last stage. Each of the two hands over.
    """
    own = stage_counts(layers, model, first=ends, last=ends, num_virtual_stages=1, recompute_layers=recompute_layers)
    return own._replace(carries=2)


class Pipeline(NamedTuple):
    """How micro-batches go through the stages.

    With a schedule that sends them from both ends, a device's two stages are taken as one, and so are two micro-batches,
    one from either end: `rounds` of them make a step.
    """

    schedule: str
    pp: Value
    num_virtual_stages: Value
    num_micro_batches: Value

    @property
    def ends(self) -> int:
        """From how many ends micro-batches come in."""
        return 2 if self.schedule in BOTH_ENDS else 1

    @property
    def rounds(self) -> Value:
        return self._each(self.num_micro_batches)

    @property
    def overlapped(self) -> Value:
        """Rounds whose forward and backward passes run together with others'."""
        return self._each(num_overlapped(self.schedule, self.pp, self.num_micro_batches))

    def bubble_s(self, passes: Passes) -> Value:
        """Seconds that the device waits; the passes of a round are as many as there are ends."""
        return self._each(bubble_s(self.schedule, self.pp, self.num_virtual_stages, passes))

    def in_flight(self, stage: Value) -> Value:
        """Rounds whose activations a stage holds."""
        pp, m, v = self.pp, self.num_micro_batches, self.num_virtual_stages
        return self._each(in_flight(pp, m, v, stage, self.schedule))

    def waiting(self, stage: Value) -> Value:
        """How many of these may wait for their weight gradients only."""
        return self._each(num_waiting(self.schedule, self.pp, self.num_micro_batches, stage))

    def _each(self, number: Value) -> Value:
        """In rounds, what is counted in micro-batches."""
        return number / self.ends if self.ends > 1 else number


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
    act = partial(_add_up, activation, {**times, "carry": counts.carries})
    held = partial(_add_up, state, counts.held)
    gathering = {**counts.held, "embedding": counts.embedding}
    fsdp_f, fsdp_b = _add_up(state, gathering, "gather_forward_s"), held("gather_backward_s")
    axes = ("tp", "cp", "ep", "pp")
    leaving = {**counts.running, "predict": counts.predict}
    saved = _add_up(activation, leaving, "saved_bytes") if host.activations else 0.0
    streamed = held("master_bytes") + held("optimizer_bytes") if host.optimizer else 0.0
    forward = {axis: act(f"{axis}_forward_s") for axis in axes} | {"fsdp": fsdp_f}
    backward = {axis: act(f"{axis}_backward_s") for axis in axes} | {"fsdp": fsdp_b}
    last = {
        **backward,
        "fsdp": fsdp_b + held("step_fsdp_s"),
        "dp": held("step_dp_s"),
        "control": held("step_control_s"),
    }
    if counts.exchanges:
        last["pp"] = last["pp"] + state["embedding"].exchange_s
    if schedule in BOTH_ENDS:
        last["pp"] = last["pp"] + held("exchange_s")
    weight_s = _add_up(activation, counts.running, "weight_s") if schedule in SPLIT else 0.0
    return StageCost(
        act("forward_s"), act("backward_s"), act("recompute_s"), forward, backward,
        {**forward, "fsdp": fsdp_f + held("step_weights_s")},
        last, held("update_s"), weight_s, saved / host.bytes_per_s, streamed / host.bytes_per_s,
    )  # fmt: skip


def _add_up(costs: Mapping[str, ActivationCost | StateCost], times: Mapping[str, Value], field: str) -> Value:
    """A field over all units, each as often as the stage has it; units that it never has are not looked at."""
    total: Value = None
    for unit, count in times.items():
        if _never(count):
            continue
        value = getattr(costs[unit], field)
        if not (isinstance(value, float) and value == 0.0):
            value = _times(count, value)
            total = value if total is None else total + value
    return 0.0 if total is None else total


def _times(count: Value, value: Value) -> Value:
    return value if isinstance(count, int) and count == 1 else value * count


def _never(count: Value) -> bool:
    return isinstance(count, int) and count == 0


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


def span_s(span: Span, overlap: Overlap) -> Value:
    """Seconds of a span, once."""
    return span.compute_s + exposed_s(overlap, span.compute_s, span.traffic, span.hideable)


class StepTime(NamedTuple):
    """Seconds of a step on one stage: all micro-batches, bubble and update."""

    total_s: Value
    bubble_s: Value


def step_time(cost: StageCost, pipeline: Pipeline, overlap: Overlap) -> StepTime:
    """The bubble is made of steady micro-batches, without the step's own traffic."""
    parts = spans(cost, pipeline)
    seconds = [_beside(span_s(part, overlap), cost.host_s) for part in parts]
    overlapped = seconds[2] if pipeline.ends > 1 else 0.0
    waits = pipeline.bubble_s(Passes(seconds[0], seconds[1], cost.weight_s, overlapped))
    total = waits + _beside(cost.update_s, cost.stream_s)
    for part, once in zip(parts, seconds, strict=True):
        total = total + _times(part.times, once)
    return StepTime(total, waits)


def _beside(own_s: Value, host_s: Value) -> Value:
    """A span with transfers to or from the host beside all of it: the longer of the two. PCIe is full-duplex, so those of a
    forward and a backward pass that run together do not add up."""
    return own_s if isinstance(host_s, float) and host_s == 0.0 else maximum(own_s, host_s)


def stage_memory(
    counts: Counts,
    activation: Mapping[str, ActivationCost],
    state: Mapping[str, StateCost],
    pipeline: Pipeline,
    stage: Value,
    runtime: float,
    host: Host = NOTHING,
) -> dict[str, Value]:
    """Bytes of one device of a stage (from 0), by term.

    Activations are kept for every micro-batch in flight; the head's, and the loss over the logits, for one. One that waits
    for its weight gradients holds what they are made of instead, which counts where it is more. ZeRO's gathered weights and
    unscattered gradients are those of two neighbouring units (the next one is prefetched). With passes from both ends two
    run at once. What the host holds is not among them, but for what is on its way.
    """
    held = partial(_add_up, state, counts.held)
    ends = {"head": counts.head, "predict": counts.predict}
    several = {**counts.running, "predict": counts.predict}
    flying, at_once = pipeline.in_flight(stage), pipeline.ends
    kept = {u: 0 if _never(count) else host.resident(flying * count) for u, count in several.items()}
    activations = _add_up(activation, {**kept, "head": counts.head}, "saved_bytes")
    if pipeline.schedule in SPLIT:
        activations = activations + pipeline.waiting(stage) * _more_to_wait(activation, counts.running, host)
    return {
        "parameters": held("parameters_bytes"),
        "gradients": held("gradients_bytes"),
        "master": held("master_bytes")
        if not host.optimizer
        else STAYING * _largest(state, counts.held, "master_bytes"),
        "optimizer": held("optimizer_bytes")
        if not host.optimizer
        else STAYING * _largest(state, counts.held, "optimizer_bytes"),
        "activations": activations,
        "workspace": _largest(activation, several, "workspace_bytes"),
        "gathered": _times(at_once, _gathered(counts, state)),
        "logits": _add_up(activation, ends, "logits_bytes"),
        "buffers": _times(at_once, _largest(activation, {**counts.running, **ends}, "buffer_bytes")),
        "runtime": runtime,
    }


def _more_to_wait(activation: Mapping[str, ActivationCost], layers: Mapping[str, Value], host: Host) -> Value:
    """Bytes that weight gradients of layers are made of beyond what is saved for the whole backward pass.

    What came back from the host for the backward pass does not leave again: all of it stays until the gradients are made.
    """
    costs = [(activation[unit], count) for unit, count in layers.items() if not _never(count)]
    if host.activations:
        return sum((one.waiting_bytes * count for one, count in costs), start=0.0)
    return sum((maximum(one.waiting_bytes - one.saved_bytes, 0.0) * count for one, count in costs), start=0.0)


def _largest(costs: Mapping[str, ActivationCost | StateCost], times: Mapping[str, Value], field: str) -> Value:
    """The largest of a field among the units that the stage has."""
    return maximum(
        0.0, *(getattr(costs[unit], field) * (count > 0) for unit, count in times.items() if not _never(count))
    )


def _gathered(counts: Counts, state: Mapping[str, StateCost]) -> Value:
    """Two neighbouring units of the largest: two layers of one kind, or a layer and its neighbour of another."""
    layers = [(state[unit].transient_bytes, count) for unit, count in counts.layers.items() if not _never(count)]
    edges = _largest(
        state, {"embedding": counts.embedding, "head": counts.head, "predict": counts.predict}, "transient_bytes"
    )
    most = maximum(0.0, *(size * (count > 0) for size, count in layers))
    pairs = (size * (count > 0) + size * (count > 1) for size, count in layers)
    return maximum(most + edges, *pairs)
