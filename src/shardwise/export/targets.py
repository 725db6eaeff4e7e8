"""The targets by name."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cluster.stacks import stack_named
from shardwise.errors import chosen
from shardwise.export import (
    accelerate,
    automodel,
    deepspeed,
    maxtext,
    megatron,
    megatron_bridge,
    nanotron,
    own,
    torchtitan,
    torchtitan_toml,
)
from shardwise.export.exporting import in_own_precision
from shardwise.export.launch import launch_of
from shardwise.export.saying import refusals
from shardwise.export.target import Target
from shardwise.planning.abilities import stack_of
from shardwise.planning.plan import Plan

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        megatron.TARGET,
        megatron_bridge.TARGET,
        automodel.TARGET,
        torchtitan.TARGET,
        torchtitan_toml.TARGET,
        deepspeed.TARGET,
        accelerate.TARGET,
        maxtext.TPU,
        maxtext.GPU,
        nanotron.TARGET,
        own.SLURM,
        own.SKYPILOT,
    )
}


def target_named(name: str) -> Target:
    """A target. Raises `InputError` that lists the names."""
    return chosen(TARGETS, name, "target")


def target_for(plan: Plan) -> Target | None:
    """The target of a plan's stack that runs it; of a stack that is only a kind the first of that kind. None where none does."""
    stack, launch = stack_of(plan.cluster), launch_of(plan)
    if stack is None:
        return None
    own = [target for target in TARGETS.values() if target.stack == stack.name]
    alike = [target for target in TARGETS.values() if _kind_on(target, plan) == stack.kind]
    return next((target for target in (*own, *alike) if not refusals(in_own_precision(launch, target), target)), None)


def _kind_on(target: Target, plan: Plan) -> str | None:
    """The kind of a target's stack, where that runs on the plan's chips."""
    stack = stack_named(target.stack)
    return stack.kind if plan.cluster.chip.platform in stack.platforms else None
