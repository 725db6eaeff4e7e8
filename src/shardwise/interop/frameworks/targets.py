"""All targets by name, and the target of a plan."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.hardware import get_stack
from shardwise.interop.frameworks import accelerate, automodel, deepspeed, nanotron, shardwise_engine
from shardwise.interop.frameworks.maxtext import launch_config
from shardwise.interop.frameworks.megatron import bridge_recipe, launch_script
from shardwise.interop.frameworks.torchtitan import launch_flags, launch_toml
from shardwise.interop.frameworks.trainers import axolotl, llama_factory, sft_scripts
from shardwise.interop.launches.export_launch import ExportedLaunch, export
from shardwise.interop.launches.launch import launch_from_plan
from shardwise.interop.launches.target import Target
from shardwise.interop.launches.translate_launch import choose_precision, refusals
from shardwise.layout import stack_of
from shardwise.search import Plan
from shardwise.values import InputError, lookup

_TARGETS = (
    launch_script.TARGET, bridge_recipe.TARGET, automodel.TARGET, launch_flags.TARGET, launch_toml.TARGET, deepspeed.TARGET,
    accelerate.TARGET, launch_config.TPU, launch_config.GPU, nanotron.TARGET, shardwise_engine.SLURM, shardwise_engine.SKYPILOT,
)  # fmt: skip
TARGETS: Mapping[str, Target] = {target.name: target for target in _TARGETS}
# Targets whose launches are read: trainers too, which are not written.
READERS: Mapping[str, Target] = {
    **TARGETS,
    **{
        target.name: target for target in (axolotl.TARGET, llama_factory.TARGET, sft_scripts.OPENRLHF, sft_scripts.VERL)
    },
}


def get_target(name: str) -> Target:
    """Return a target by name. Raises `InputError` that lists the names."""
    return lookup(TARGETS, name, "target")


def get_reader(name: str) -> Target:
    """Return a target whose launches are read by name. Raises `InputError` that lists the names."""
    return lookup(READERS, name, "target")


def find_target(plan: Plan) -> Target | None:
    """Return the target of a plan's stack that can run it, or else the first of the same kind of stack; None if there is none."""
    stack, launch = stack_of(plan.cluster), launch_from_plan(plan)
    if stack is None:
        return None
    same_stack = [target for target in TARGETS.values() if target.stack == stack.name]
    same_kind = [target for target in TARGETS.values() if _stack_kind(target, plan) == stack.kind]
    candidates = (*same_stack, *same_kind)
    return next((target for target in candidates if not refusals(choose_precision(launch, target), target)), None)


def export_for_stack(plan: Plan) -> ExportedLaunch:
    """Write a plan as a launch of the framework that its stack is. Raises `InputError` if no framework runs it."""
    target = find_target(plan)
    if target is None:
        raise InputError(
            f"--export: no framework of this plan's stack runs it; `shardwise export PLAN --to TARGET` with one of "
            f"{', '.join(TARGETS)} says why"
        )
    return export(plan, target)


def _stack_kind(target: Target, plan: Plan) -> str | None:
    """Return the kind of a target's stack if it runs on the plan's chips."""
    stack = get_stack(target.stack)
    return stack.kind if plan.cluster.chip.platform in stack.platforms else None
