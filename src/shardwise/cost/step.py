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
    """What a stage holds: blocks, and whether the embedding and the head (1 or 0); virtual stages it hands over from.

    A tied embedding is one tensor with two uses: `copies` is 0 where the head's copy serves (one stage holds both), and
    `exchanges` is 1 where the two copies' gradients are exchanged (first and last stage of a pipeline).
    """

    blocks: Value
    embedding: int
    head: int
    carries: Value
    copies: int
    exchanges: int


def stage_counts(blocks: Value, *, first: bool, last: bool, num_virtual_stages: Value, tied: bool) -> Counts:
    """The counts of a stage that is the first, the last, both (no pipeline) or neither."""
    alone = first and last
    return Counts(
        blocks,
        embedding=int(first),
        head=int(last),
        carries=0 if alone else num_virtual_stages,
        copies=int(first and not (tied and alone)),
        exchanges=int(tied and first != last),
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
    times = {"block": counts.blocks, "embedding": counts.embedding, "head": counts.head}
    act = partial(_add_up, activation, {**times, "carry": counts.carries})
    held = partial(_add_up, state, {**times, "embedding": counts.copies})
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
        if isinstance(count, int) and count == 0:
            continue
        value = getattr(costs[unit], field)
        if not (isinstance(value, float) and value == 0.0):
            value = value if isinstance(count, int) and count == 1 else value * count
            total = value if total is None else total + value
    return 0.0 if total is None else total


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
    held = partial(_add_up, state, {"block": counts.blocks, "embedding": counts.copies, "head": counts.head})
    block, head = activation["block"], activation["head"]
    edge = maximum(state["embedding"].transient_bytes * counts.embedding, state["head"].transient_bytes * counts.head)
    inner = state["block"].transient_bytes * (counts.blocks > 0)
    return {
        "parameters": held("parameters_bytes"),
        "gradients": held("gradients_bytes"),
        "master": held("master_bytes"),
        "optimizer": held("optimizer_bytes"),
        "activations": in_flight * counts.blocks * block.saved_bytes + counts.head * head.saved_bytes,
        "workspace": block.workspace_bytes * (counts.blocks > 0),
        "gathered": inner + maximum(inner * (counts.blocks > 1), edge),
        "logits": head.logits_bytes * counts.head,
        "buffers": maximum(block.buffer_bytes, head.buffer_bytes * counts.head),
        "runtime": runtime,
    }
