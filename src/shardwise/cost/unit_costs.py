"""What one unit costs: the columns that a unit's price has, and a stage's sums are made of. Numbers or arrays."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.symbolic import Value


class ActivationCost(NamedTuple):
    """Per micro-batch. Seconds of compute and of traffic on the critical path; bytes kept, and bytes while working.

    `weight_s` is the part of `backward_s` that makes weight gradients (the casts of what it takes are no part of it: they run
    at once), `waiting_bytes` what that part reads. `workspace_bytes` are beside what is saved, of the
    head beside the logits.
    """

    forward_s: Value
    backward_s: Value
    recompute_s: Value
    tp_forward_s: Value
    tp_backward_s: Value
    cp_forward_s: Value
    cp_backward_s: Value
    ep_forward_s: Value
    ep_backward_s: Value
    pp_forward_s: Value
    pp_backward_s: Value
    saved_bytes: Value
    workspace_bytes: Value
    logits_bytes: Value
    buffer_bytes: Value
    weight_s: Value
    waiting_bytes: Value


class StateCost(NamedTuple):
    """Seconds of weight and gradient traffic per micro-batch and per step, of the update; bytes of state at rest."""

    gather_forward_s: Value
    gather_backward_s: Value
    step_weights_s: Value
    step_fsdp_s: Value
    step_dp_s: Value
    step_control_s: Value
    update_s: Value
    exchange_s: Value  # of the gradients of two copies of the same weights, on the first and the last stage
    parameters_bytes: Value
    gradients_bytes: Value
    master_bytes: Value
    optimizer_bytes: Value
    transient_bytes: Value
    unscattered_bytes: Value  # the gradients among the transient bytes
    arriving_bytes: Value  # what a device gets when they are scattered, before it is added to those that rest
    passing_bytes: Value  # gradients as products give them, where the ones that rest have another format
