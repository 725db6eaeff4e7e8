"""One pipeline stage's step: time, traffic and memory, from the costs of its units. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from shardwise.cost.overlap import exposed_s
from shardwise.cost.unit import ActivationCost, StateCost
from shardwise.job import Overlap
from shardwise.symbolic import Value, maximum


class Counts(NamedTuple):
    """What a stage holds: layers by kind, and whether the embedding and the head (1 or 0); virtual stages it hands over from.

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

    @property
    def units(self) -> dict[str, Value]:
        """How often the stage has each unit that computes."""
        return {**self.layers, "embedding": self.embedding, "head": self.head, "predict": self.predict}

    @property
    def held(self) -> dict[str, Value]:
        """How often the stage holds each unit's weights."""
        return {**self.units, "embedding": self.copies}


class Model(NamedTuple):
    """What of a model the stages depend on."""

    tied: bool
    num_predict_layers: int


def stage_counts(
    layers: Mapping[str, Value], model: Model, *, first: bool, last: bool, num_virtual_stages: Value
) -> Counts:
    """The counts of a stage that is the first, the last, both (no pipeline) or neither.

    A tied embedding is one tensor with two uses, and so is one that multi-token prediction borrows.
    """
    alone = first and last
    again = last and model.num_predict_layers > 0
    return Counts(
        layers,
        embedding=int(first),
        head=int(last),
        predict=model.num_predict_layers if last else 0,
        carries=0 if alone else num_virtual_stages,
        copies=int((first and not (model.tied and alone)) or (again and not alone and not model.tied)),
        exchanges=int((model.tied or model.num_predict_layers > 0) and first != last),
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


def stage_cost(counts: Counts, activation: Mapping[str, ActivationCost], state: Mapping[str, StateCost]) -> StageCost:
    """Add up a stage's units."""
    times = counts.units
    act = partial(_add_up, activation, {**times, "carry": counts.carries})
    held = partial(_add_up, state, counts.held)
    fsdp_f, fsdp_b = _add_up(state, times, "gather_forward_s"), held("gather_backward_s")
    axes = ("tp", "cp", "ep", "pp")
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
        last, held("update_s"),
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
    forward = cost.forward_s + exposed_s(overlap, cost.forward_s, cost.forward_traffic)
    backward = work_b + exposed_s(overlap, work_b, cost.backward_traffic)
    first = cost.forward_s + exposed_s(overlap, cost.forward_s, cost.first_traffic)
    last = work_b + exposed_s(overlap, work_b, cost.last_traffic)
    bubble_s = bubble * num_micro_batches * (forward + backward)
    return StepTime((num_micro_batches - 1) * (forward + backward) + first + last + bubble_s + cost.update_s, bubble_s)


def stage_memory(
    counts: Counts,
    activation: Mapping[str, ActivationCost],
    state: Mapping[str, StateCost],
    in_flight: Value,
    runtime: float,
) -> dict[str, Value]:
    """Bytes of one device of a stage, by term.

    Activations are kept for every micro-batch in flight; the head's, and the loss over the logits, for one. ZeRO's
    gathered weights and unscattered gradients are those of two neighbouring units (the next one is prefetched).
    """
    held = partial(_add_up, state, counts.held)
    ends = {"head": counts.head, "predict": counts.predict}
    several = {**counts.layers, "predict": counts.predict}
    kept = {unit: 0 if _never(count) else in_flight * count for unit, count in several.items()} | {"head": counts.head}
    return {
        "parameters": held("parameters_bytes"),
        "gradients": held("gradients_bytes"),
        "master": held("master_bytes"),
        "optimizer": held("optimizer_bytes"),
        "activations": _add_up(activation, kept, "saved_bytes"),
        "workspace": _largest(activation, several, "workspace_bytes"),
        "gathered": _gathered(counts, state),
        "logits": _add_up(activation, ends, "logits_bytes"),
        "buffers": _largest(activation, {**counts.layers, **ends}, "buffer_bytes"),
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
