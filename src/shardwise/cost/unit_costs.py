"""The cost of one unit: the columns of a unit's price, from which the sums of a stage are made. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

from shardwise.symbolic import Value

Traffic = Mapping[str, Value]  # seconds by parallel axis
ACTIVATION_AXES = ("tp", "cp", "ep", "pp")  # whose collectives move activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCost:
    """Per micro-batch. Seconds of compute and of traffic on the critical path; bytes kept, and bytes while working.

    `weight_s` is the part of `backward_s` that makes weight gradients (the casts of what it takes are no part of it: they run
    at once), `waiting_bytes` what that part reads. `backward_traffic_s` has that of recomputation too. `workspace_bytes` are
    beside what is saved, of the head beside the logits.
    """

    forward_s: Annotated[Value, "its kernels in a forward pass"]
    backward_s: Annotated[Value, "its kernels in a backward pass"]
    recompute_s: Annotated[Value, "its kernels that run again for a backward pass"]
    weight_s: Annotated[Value, "those of a backward pass that make weight gradients"]
    forward_traffic_s: Annotated[Traffic, "its collectives on activations in a forward pass"]
    backward_traffic_s: Annotated[Traffic, "its collectives on activations in a backward pass"]
    saved_bytes: Annotated[Value, "what it keeps for a backward pass"]
    workspace_bytes: Annotated[Value, "what it needs beside that while it runs backward"]
    making_bytes: Annotated[Value, "the same from when it makes the first gradient of a weight"]
    logits_bytes: Annotated[Value, "the loss over its logits"]
    buffer_bytes: Annotated[Value, "input and output of its largest collective on activations"]
    waiting_bytes: Annotated[Value, "what its weight gradients are made of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCost:
    """Seconds of weight and gradient traffic per micro-batch and per step, of the update; bytes of state at rest.

    `exchange_s`: of the gradients of two copies of the same weights, on the first and the last stage. `unscattered_bytes`: the
    gradients among the transient bytes. `arriving_bytes`: what a device gets when they are scattered, before it is added to those
    that rest. `leaving_bytes`: what of both is still there when the gradients of the next unit are made. `passing_bytes`:
    gradients as products give them, where the ones that rest have another format.
    """

    gather_forward_s: Annotated[Value, "ZeRO's collectives for it in a forward pass"]
    gather_backward_s: Annotated[Value, "ZeRO's collectives for it in a backward pass"]
    step_weights_s: Annotated[Value, "gathers of its weights, once per step, and what its update moves"]
    step_traffic_s: Annotated[Traffic, "collectives for its gradients, once per step"]
    update_s: Annotated[Value, "its kernels in the update"]
    exchange_s: Annotated[Value, "gradients exchanged with the device that has the same weights"]
    parameters_bytes: Annotated[Value, "its weights as they rest"]
    gradients_bytes: Annotated[Value, "its gradients as they rest"]
    master_bytes: Annotated[Value, "the optimizer's copy of its weights"]
    optimizer_bytes: Annotated[Value, "its moments"]
    transient_bytes: Annotated[Value, "its gathered weights and its gradients before they are scattered"]
    unscattered_bytes: Annotated[Value, "its gradients among these"]
    arriving_bytes: Annotated[Value, "what a device gets of its gradients when they are scattered"]
    leaving_bytes: Annotated[Value, "the last of its gradients to be scattered"]
    passing_bytes: Annotated[Value, "its gradients as products give them"]
    update_bytes: Annotated[Value, "what is there beside the state while matrices are updated as a whole"]


Cost = TypeVar("Cost", ActivationCost, StateCost)
Merge = Callable[[Sequence[Value]], Value]


def merged(costs: Sequence[Cost], merge: Merge, merge_traffic: Merge | None = None) -> Cost:
    """One cost of several, column by column; `merge_traffic` merges those by axis, `merge` if there is none."""
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(costs[0])):
        values = [getattr(cost, name) for cost in costs]
        if isinstance(values[0], Mapping):
            of_axis = merge_traffic or merge
            columns[name] = {axis: of_axis([value[axis] for value in values]) for axis in values[0]}
        else:
            columns[name] = merge(values)
    return type(costs[0])(**columns)
