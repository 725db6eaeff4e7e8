"""One pipeline stage's step: time, traffic and memory, from the costs of its units. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from shardwise.cost.host import NOTHING, STAYING, Host
from shardwise.cost.overlap import exposed_s
from shardwise.cost.unit import ActivationCost, StateCost
from shardwise.job import Overlap
from shardwise.layout.stages import recomputed_layers
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
    host_s: Value = 0.0  # of a micro-batch's activations to the host, and as much back
    stream_s: Value = 0.0  # of the optimizer's state through the device


def stage_cost(
    counts: Counts, activation: Mapping[str, ActivationCost], state: Mapping[str, StateCost], host: Host = NOTHING
) -> StageCost:
    """Add up a stage's units. The embedding's weight is gathered where it is used, whoever holds it."""
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
    return StageCost(
        act("forward_s"), act("backward_s"), act("recompute_s"), forward, backward,
        {**forward, "fsdp": fsdp_f + held("step_weights_s")},
        last, held("update_s"), saved / host.bytes_per_s, streamed / host.bytes_per_s,
    )  # fmt: skip


def _add_up(costs: Mapping[str, ActivationCost | StateCost], times: Mapping[str, Value], field: str) -> Value:
    """A field over all units, each as often as the stage has it; units that it never has are not looked at."""
    total: Value = None
    for unit, count in times.items():
        if _never(count):
            continue
        value = getattr(costs[unit], field)
        if not (isinstance(value, float) and value == 0.0):
            value = value if isinstance(count, int) and count == 1 else value * count
            total = value if total is None else total + value
    return 0.0 if total is None else total


def _never(count: Value) -> bool:
    return isinstance(count, int) and count == 0


class StepTime(NamedTuple):
    """Seconds of a step on one stage: steady micro-batches, what the step's own traffic adds, bubble and update."""

    total_s: Value
    bubble_s: Value


def step_time(cost: StageCost, num_micro_batches: Value, bubble: Value, overlap: Overlap) -> StepTime:
    """`bubble` is idle over ideal time. The bubble repeats steady micro-batches, without the step's own traffic."""
    work_b = cost.backward_s + cost.recompute_s

    def phase_s(work: Value, traffic: Mapping[str, Value]) -> Value:
        return _beside(work + exposed_s(overlap, work, traffic), cost.host_s)

    forward, backward = phase_s(cost.forward_s, cost.forward_traffic), phase_s(work_b, cost.backward_traffic)
    first, last = phase_s(cost.forward_s, cost.first_traffic), phase_s(work_b, cost.last_traffic)
    bubble_s = bubble * num_micro_batches * (forward + backward)
    update_s = _beside(cost.update_s, cost.stream_s)
    return StepTime((num_micro_batches - 1) * (forward + backward) + first + last + bubble_s + update_s, bubble_s)


def _beside(own_s: Value, host_s: Value) -> Value:
    """A phase with transfers to or from the host beside all of it: the longer of the two."""
    return own_s if isinstance(host_s, float) and host_s == 0.0 else maximum(own_s, host_s)


def stage_memory(
    counts: Counts,
    activation: Mapping[str, ActivationCost],
    state: Mapping[str, StateCost],
    in_flight: Value,
    runtime: float,
    host: Host = NOTHING,
) -> dict[str, Value]:
    """Bytes of one device of a stage, by term.

    Activations are kept for every micro-batch in flight; the head's, and the loss over the logits, for one. ZeRO's
    gathered weights and unscattered gradients are those of two neighbouring units (the next one is prefetched).
    What the host holds is not among them, but for what is on its way.
    """
    held = partial(_add_up, state, counts.held)
    ends = {"head": counts.head, "predict": counts.predict}
    several = {**counts.running, "predict": counts.predict}
    kept = {u: 0 if _never(count) else host.resident(in_flight * count) for u, count in several.items()}
    return {
        "parameters": held("parameters_bytes"),
        "gradients": held("gradients_bytes"),
        "master": held("master_bytes")
        if not host.optimizer
        else STAYING * _largest(state, counts.held, "master_bytes"),
        "optimizer": held("optimizer_bytes")
        if not host.optimizer
        else STAYING * _largest(state, counts.held, "optimizer_bytes"),
        "activations": _add_up(activation, {**kept, "head": counts.head}, "saved_bytes"),
        "workspace": _largest(activation, several, "workspace_bytes"),
        "gathered": _gathered(counts, state),
        "logits": _add_up(activation, ends, "logits_bytes"),
        "buffers": _largest(activation, {**counts.running, **ends}, "buffer_bytes"),
        "runtime": runtime,
    }


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
