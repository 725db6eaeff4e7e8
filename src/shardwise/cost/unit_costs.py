"""What one unit costs: the columns that a unit's price has, and a stage's sums are made of. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

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

    forward_s: Value
    backward_s: Value
    recompute_s: Value
    weight_s: Value
    forward_traffic_s: Traffic
    backward_traffic_s: Traffic
    saved_bytes: Value
    workspace_bytes: Value
    logits_bytes: Value
    buffer_bytes: Value
    waiting_bytes: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCost:
    """Seconds of weight and gradient traffic per micro-batch and per step, of the update; bytes of state at rest.

    `exchange_s`: of the gradients of two copies of the same weights, on the first and the last stage. `unscattered_bytes`: the
    gradients among the transient bytes. `arriving_bytes`: what a device gets when they are scattered, before it is added to those
    that rest. `passing_bytes`: gradients as products give them, where the ones that rest have another format.
    """

    gather_forward_s: Value
    gather_backward_s: Value
    step_weights_s: Value
    step_traffic_s: Traffic
    update_s: Value
    exchange_s: Value
    parameters_bytes: Value
    gradients_bytes: Value
    master_bytes: Value
    optimizer_bytes: Value
    transient_bytes: Value
    unscattered_bytes: Value
    arriving_bytes: Value
    passing_bytes: Value


Cost = TypeVar("Cost", ActivationCost, StateCost)


def merged(costs: Sequence[Cost], merge: Callable[[Sequence[Value]], Value]) -> Cost:
    """One cost of several, column by column."""
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(costs[0])):
        values = [getattr(cost, name) for cost in costs]
        by_axis = isinstance(values[0], Mapping)
        columns[name] = (
            {axis: merge([value[axis] for value in values]) for axis in values[0]} if by_axis else merge(values)
        )
    return type(costs[0])(**columns)
