"""The memory of one device of a pipeline stage, from the costs of its units. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from shardwise.cluster.chip import Chip
from shardwise.cost.counts import Counts, add_up, never, times_each
from shardwise.cost.host import NOTHING, STAYING, Host
from shardwise.cost.pipeline import Pipeline
from shardwise.cost.unit_costs import ActivationCost, StateCost
from shardwise.symbolic import Value, maximum, where

Fullest = tuple[Value, Value, Value]  # bytes of workspace, logits and what is gathered at a moment


def stage_memory(
    counts: Counts,
    activation: Mapping[str, ActivationCost],
    state: Mapping[str, StateCost],
    pipeline: Pipeline,
    stage: Value,
    chip: Chip,
    host: Host = NOTHING,
    *,
    stepwise: bool = False,
) -> dict[str, Value]:
    """Bytes of one device of a stage (from 0), by term.

    Activations are kept for every micro-batch in flight; the head's, and the loss over the logits, for one. One that waits
    for its weight gradients holds what they are made of instead, which counts where it is more. ZeRO's gathered weights and
    unscattered gradients are those of `_gathered`. With passes from both ends two run at once. What the host holds is not
    among them, but for what is on its way. The workspace and the logits are those of the fullest moment (`_fullest`), and with
    a `stepwise` engine (`loss.Loss`) so is what is gathered.
    """
    held = partial(add_up, state, counts.held)
    ends = {"head": counts.head, **counts.predicting}
    several = {**counts.running, **counts.predicting}
    flying, at_once = pipeline.in_flight(stage), pipeline.ends
    kept = {u: 0 if never(count) else host.resident(flying * count) for u, count in several.items()}
    activations = add_up(activation, {**kept, "head": counts.head}, "saved_bytes")
    if pipeline.form.splits_backward:
        activations = activations + pipeline.waiting(stage) * _more_to_wait(activation, counts.running, host)
    workspace, logits, gathered = _fullest(counts, activation, state, chip, stepwise=stepwise)
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
        "gathered": times_each(at_once, gathered + _largest(state, counts.held, "passing_bytes")),
        "logits": logits,
        "buffers": times_each(at_once, _largest(activation, {**counts.running, **ends}, "buffer_bytes")),
        "runtime": chip.runtime_bytes,
    }


def _fullest(
    counts: Counts,
    activation: Mapping[str, ActivationCost],
    state: Mapping[str, StateCost],
    chip: Chip,
    *,
    stepwise: bool,
) -> Fullest:
    """Workspace, logits, and what ZeRO gathers, when the device is the fullest: at the loss or in a layer's backward pass.

    The loss has freed the logits before the first layer runs backward, and the head what it saved; then the last module of
    multi-token prediction does. The share of the activations that stands for the workspace of other than stepwise engines was
    measured with the latter still there.
    """
    gathered = _gathered(counts, state, chip)
    if not (counts.head or counts.predict):
        return _largest(activation, counts.running, "workspace_bytes"), 0.0, gathered
    head, further = {"head": counts.head}, counts.predicting
    largest, total = partial(_largest, activation, field="workspace_bytes"), partial(add_up, activation)
    logits = total({**head, **further}, "logits_bytes")
    if not stepwise:
        return _fuller((largest({**counts.running, **further}), 0.0, gathered), (0.0, logits, gathered))
    at_loss, in_module, in_layer = _gathered_stepwise(counts, state)
    layer = largest(counts.running) - total({**head, **further}, "saved_bytes"), 0.0, in_layer
    fullest = _fuller(layer, (total(head, "workspace_bytes"), logits, at_loss))
    if not counts.predict:
        return fullest
    module = largest({"predict": 1}) - total(head, "saved_bytes")
    return _fuller((module, total({**further, "predict": 0}, "logits_bytes"), in_module), fullest)


def _fuller(one: Fullest, other: Fullest) -> Fullest:
    """The one of two moments that holds more."""
    more = sum(one) > sum(other)
    workspace, logits, gathered = (where(more, a, b) for a, b in zip(one, other, strict=True))
    return workspace, logits, gathered


def _gathered_stepwise(counts: Counts, state: Mapping[str, StateCost]) -> tuple[Value, Value, Value]:
    """What is gathered at the loss, in the last module of multi-token prediction, and in the last layer.

    At the loss, weights of the head and of the unit before it; in that unit its own and those of the one before, its gradients
    and the head's, which are being scattered, and the part of these that arrives; in a module the head's weights too, and behind
    it the gradients of the embedding that it has used. Source: train/parallel (weights are gathered one unit ahead in the
    backward pass; of gradients one unit's arrive while the next one's are made).
    """
    ends = {"embedding": counts.embedding, "head": counts.head, **counts.predicting}
    whole, gradients = (
        [(getattr(state[unit], field), count) for unit, count in counts.layers.items() if not never(count)]
        for field in ("transient_bytes", "unscattered_bytes")
    )
    weights = [(size - own, count) for (size, count), (own, _) in zip(whole, gradients, strict=True)]
    of_head = _largest(state, ends, "transient_bytes") - _largest(state, ends, "unscattered_bytes")
    of_layer, made = (maximum(0.0, *(size * (count > 0) for size, count in sizes)) for sizes in (weights, gradients))
    two = maximum(of_layer, *(size * (count > 0) + size * (count > 1) for size, count in weights))
    scattered = _largest(state, ends, "unscattered_bytes") + _largest(state, ends, "arriving_bytes")
    in_layer = two + made + scattered
    if not counts.predict:
        return of_layer + of_head, 0.0, in_layer
    both = [state["head"], state["predict"]]
    at_loss = sum((one.transient_bytes - one.unscattered_bytes for one in both), start=0.0)
    leaving = sum((one.unscattered_bytes for one in both), start=0.0) + state["head"].arriving_bytes
    return at_loss, at_loss + of_layer + leaving, in_layer + state["embedding"].unscattered_bytes


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
        state, {"embedding": counts.embedding, "head": counts.head, **counts.predicting}, "transient_bytes"
    )
    most = maximum(0.0, *(size * (count > 0) for size, count in layers))
    if chip.vendor == "Google":
        return maximum(most, edges)
    pairs = (size * (count > 0) + size * (count > 1) for size, count in layers)
    return maximum(most + edges, *pairs)
