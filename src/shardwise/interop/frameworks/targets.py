"""All targets by name, and the target of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.hardware import get_stack
from shardwise.interop.frameworks import accelerate, automodel, deepspeed, nanotron, shardwise_engine
from shardwise.interop.frameworks.maxtext import launch_config
from shardwise.interop.frameworks.megatron import bridge_recipe, deepspeed_fork, launch_script
from shardwise.interop.frameworks.torchtitan import launch_flags, launch_toml
from shardwise.interop.frameworks.trainers import axolotl, llama_factory, ms_swift, sft_scripts, torchtune
from shardwise.interop.launches.export_launch import ExportedLaunch, export
from shardwise.interop.launches.launch import Launch, Machines, launch_from_plan
from shardwise.interop.launches.target import Target
from shardwise.interop.launches.translate_launch import choose_precision, model_refusals, refusals
from shardwise.layout import Layout, stack_of
from shardwise.price import Problem
from shardwise.search import Plan
from shardwise.values import InputError, lookup

_TARGETS = (
    launch_script.TARGET, bridge_recipe.TARGET, automodel.TARGET, launch_flags.TARGET, launch_toml.TARGET, deepspeed.TARGET,
    accelerate.TARGET, launch_config.TPU, launch_config.GPU, nanotron.TARGET, shardwise_engine.SLURM, shardwise_engine.SKYPILOT,
)  # fmt: skip
TARGETS: Mapping[str, Target] = {target.name: target for target in _TARGETS}
# Targets whose launches are read: trainers and Megatron-DeepSpeed too, which are not written.
_READ_ONLY = (
    axolotl.TARGET,
    llama_factory.TARGET,
    ms_swift.TARGET,
    torchtune.TARGET,
    sft_scripts.OPENRLHF,
    sft_scripts.VERL,
    deepspeed_fork.TARGET,
)
READERS: Mapping[str, Target] = {**TARGETS, **{target.name: target for target in _READ_ONLY}}


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


def require_stack_model(problem: Problem) -> None:
    """Raise `InputError` if no framework of a problem's stack has its model, with the reasons and the stacks that have it.

    A stack without a framework here, and one that is known only by its kind, passes.
    """
    stack = stack_of(problem.cluster)
    targets = [target for target in TARGETS.values() if stack is not None and target.stack == stack.name]
    launch = _smallest_launch(problem)
    reasons = {target: model_refusals(launch, target) for target in targets}
    if not targets or not all(reasons.values()):
        return
    target, problems = min(reasons.items(), key=lambda item: len(item[1]))
    stacks = [
        candidate.stack
        for candidate in TARGETS.values()
        if candidate not in reasons and not model_refusals(launch, candidate)
    ]
    platform = problem.cluster.chip.platform
    names = ", ".join(dict.fromkeys(name for name in stacks if platform in get_stack(name).platforms))
    raise InputError(
        f"{target.title} {target.version} cannot run {problem.architecture.name}", *problems,
        f"the nearest that can be run: the same plan with a stack that has the model ({names}), or without one",
    )  # fmt: skip


def require_launchable(plan: Plan) -> Plan:
    """Return a plan that a framework of its stack runs.

    Raises `InputError` for another, with the reasons and the nearest layout.
    """
    stack, launch = stack_of(plan.cluster), launch_from_plan(plan)
    targets = [target for target in TARGETS.values() if stack is not None and target.stack == stack.name]
    if targets and all(refusals(choose_precision(launch, target), target) for target in targets):
        export(plan, targets[0])
    return plan


def _smallest_launch(problem: Problem) -> Launch:
    """Return a launch of a problem's model on one device, in the precision of its stack."""
    job = replace(problem.job, global_batch_tokens=problem.job.seq_len)
    machines = Machines(num_devices=1, devices_per_node=1, chip=problem.cluster.chip.name)
    return Launch(model=problem.architecture, job=job, layout=Layout(), machines=machines)


def _stack_kind(target: Target, plan: Plan) -> str | None:
    """Return the kind of a target's stack if it runs on the plan's chips."""
    stack = get_stack(target.stack)
    return stack.kind if plan.cluster.chip.platform in stack.platforms else None
