"""The memory of one device of a pipeline stage, from the costs of its units. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from shardwise.cluster.chip import Chip
from shardwise.cost.counts import Counts, add_up, never, times_each
from shardwise.cost.host import NOTHING, STAYING, Host
from shardwise.cost.pipeline import Pipeline
from shardwise.cost.unit_costs import ActivationCost, StateCost
from shardwise.schedule.closed_form import SPLIT
from shardwise.symbolic import Value, maximum


def stage_memory(
    counts: Counts,
    activation: Mapping[str, ActivationCost],
    state: Mapping[str, StateCost],
    pipeline: Pipeline,
    stage: Value,
    chip: Chip,
    host: Host = NOTHING,
) -> dict[str, Value]:
    """Bytes of one device of a stage (from 0), by term.

    Activations are kept for every micro-batch in flight; the head's, and the loss over the logits, for one. One that waits
    for its weight gradients holds what they are made of instead, which counts where it is more. ZeRO's gathered weights and
    unscattered gradients are those of `_gathered`. With passes from both ends two run at once. What the host holds is not
    among them, but for what is on its way. The loss has let go of the logits before the first block runs backward, so the
    peak is at the one or the other, and the term of the other is 0.
    """
    held = partial(add_up, state, counts.held)
    ends = {"head": counts.head, "predict": counts.predict}
    several = {**counts.running, "predict": counts.predict}
    flying, at_once = pipeline.in_flight(stage), pipeline.ends
    kept = {u: 0 if never(count) else host.resident(flying * count) for u, count in several.items()}
    activations = add_up(activation, {**kept, "head": counts.head}, "saved_bytes")
    if pipeline.schedule in SPLIT:
        activations = activations + pipeline.waiting(stage) * _more_to_wait(activation, counts.running, host)
    workspace, logits = _largest(activation, several, "workspace_bytes"), add_up(activation, ends, "logits_bytes")
    if counts.head or counts.predict:
        workspace, logits = workspace * (workspace > logits), logits * (logits >= workspace)
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
        "workspace": workspace,
        "gathered": times_each(at_once, _gathered(counts, state, chip) + _largest(state, counts.held, "passing_bytes")),
        "logits": logits,
        "buffers": times_each(at_once, _largest(activation, {**counts.running, **ends}, "buffer_bytes")),
        "runtime": chip.runtime_bytes,
    }


def _more_to_wait(activation: Mapping[str, ActivationCost], layers: Mapping[str, Value], host: Host) -> Value:
    """Bytes that weight gradients of layers are made of beyond what is saved for the whole backward pass.

    What came back from the host for the backward pass does not leave again: all of it stays until the gradients are made.
    """
    costs = [(activation[unit], count) for unit, count in layers.items() if not never(count)]
    if host.activations:
        return sum((one.waiting_bytes * count for one, count in costs), start=0.0)
    return sum((maximum(one.waiting_bytes - one.saved_bytes, 0.0) * count for one, count in costs), start=0.0)


def _largest(costs: Mapping[str, ActivationCost | StateCost], times: Mapping[str, Value], field: str) -> Value:
    """The largest of a field among the units that the stage has."""
    return maximum(
        0.0, *(getattr(costs[unit], field) * (count > 0) for unit, count in times.items() if not never(count))
    )


def _gathered(counts: Counts, state: Mapping[str, StateCost], chip: Chip) -> Value:
    """Two neighbouring units of the largest: two layers of one kind, or a layer and its neighbour of another.

    On a TPU those of one: XLA gathers each weight ahead of its use and scatters each gradient as it comes, by the peaks that its
    compilers give (tests/crosscheck/golden). Source of two: PyTorch, FSDP2: a block at a time, the next one prefetched.
    """
    layers = [(state[unit].transient_bytes, count) for unit, count in counts.layers.items() if not never(count)]
    edges = _largest(
        state, {"embedding": counts.embedding, "head": counts.head, "predict": counts.predict}, "transient_bytes"
    )
    most = maximum(0.0, *(size * (count > 0) for size, count in layers))
    if chip.vendor == "Google":
        return maximum(most, edges)
    pairs = (size * (count > 0) + size * (count > 1) for size, count in layers)
    return maximum(most + edges, *pairs)
