"""The table of layout rules, every violation of one layout, and the modes in which columns of degrees can run."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.hardware import Stack
from shardwise.layout.layers_per_stage import min_layers_per_stage, stage_placement
from shardwise.layout.layout import Layout, cp_variant_names
from shardwise.layout.rules.engine import ENGINE_RULES
from shardwise.layout.rules.layout_rule import LayoutRule, RuleContext
from shardwise.layout.rules.model_and_cluster_rules import (
    EQUAL_STAGES,
    EVEN_BATCH,
    LEGALITY_RULES,
    SHARDED_REPLICAS,
    tensor_set_problems,
)
from shardwise.layout.rules.recurrence_rules import RECURRENCE_RULES
from shardwise.layout.rules.stack_abilities import async_tp_domain_rule, stack_rules
from shardwise.layout.sharding_scheme import Degrees, ParallelMode
from shardwise.model import Architecture, Job
from shardwise.values import InputError, Value


def layout_rules(
    stack: Stack | None = None, *, equal_stages: bool = False, divisible: bool = False, runnable: bool = False,
    domain: int | None = None, sharded_replicas: bool = False,
) -> tuple[LayoutRule, ...]:  # fmt: skip
    """Return the rules that layouts must keep, in the order in which a search counts what breaks them.

    Legality comes first, then what a search asks for: `sharded_replicas` for ZeRO where replicas lend to ep, `equal_stages` for
    virtual stages with equally many layers, `divisible` for a batch without idle replicas, `runnable` for what `train` runs.
    `domain` limits asynchronous tensor parallelism to so many devices, and `stack` adds what that stack has.

    >>> [rule.name for rule in layout_rules(divisible=True) if rule.source == "job"]
    ['sequence_by_cp', 'sequence_by_tp', 'micro_batch', 'schedule_batch', 'even_batch']
    """
    return (
        *LEGALITY_RULES,
        *RECURRENCE_RULES,
        *(SHARDED_REPLICAS,) * sharded_replicas,
        *(EQUAL_STAGES,) * equal_stages,
        *(EVEN_BATCH,) * divisible,
        *ENGINE_RULES * runnable,
        *(() if domain is None else (async_tp_domain_rule(domain),)),
        *(() if stack is None else stack_rules(stack)),
    )


def legal_modes(
    architecture: Architecture, job: Job, degrees: Degrees, modes: Sequence[ParallelMode], rules: Sequence[LayoutRule]
) -> list[Value]:  # fmt: skip
    """Return for each mode which rows of degrees can run in it; `ep` of `degrees` is the one without whole experts."""
    legal_by_mode = []
    for mode in modes:
        context = mode_context(architecture, job, degrees, mode)
        legal: Value = degrees["tp"] > 1 if mode.whole_experts else True
        for rule in rules:
            legal = legal & rule.legal(context)
        legal_by_mode.append(legal)
    return legal_by_mode


def mode_context(architecture: Architecture, job: Job, degrees: Degrees, mode: ParallelMode) -> RuleContext:
    """Return the context of degrees in a mode; `ep` of `degrees` is the one without whole experts."""
    expert_degrees: dict[str, Value] = {"ep": degrees["ep"] * degrees["tp"], "etp": 1} if mode.whole_experts else {}
    mode_degrees = {
        **degrees,
        "etp": degrees["tp"],
        **expert_degrees,
        "cp_variant": cp_variant_names().index(mode.cp_variant),
        "async_tp": mode.async_tp,
    }
    return RuleContext(architecture, job, 0, mode_degrees)  # no rule of modes reads the number of devices


def violations(architecture: Architecture, job: Job, num_devices: int, layout: Layout) -> list[str]:
    """Return everything that is wrong with a layout, by every rule; empty when it can run."""
    context = RuleContext.from_layout(architecture, job, num_devices, layout)
    problems = [f"{rule.name}: {rule.explain(context)}" for rule in layout_rules() if not rule.legal(context)]
    if layout.recompute == "none" and layout.recompute_layers is not None:
        problems.append(
            f"recompute_layers: {layout.recompute_layers} layers of each stage with recompute = none; set another "
            "recompute, such as full, or leave recompute_layers out"
        )
    return (
        problems
        + tensor_set_problems(architecture, layout.recompute)
        + _layers_per_stage_problems(architecture, layout)
    )


def _layers_per_stage_problems(architecture: Architecture, layout: Layout) -> list[str]:
    layers = layout.layers_per_stage
    if layers is None:
        return []
    problems = []
    minimums = min_layers_per_stage(stage_placement(layout))
    short_stages = [
        stage for stage, (num_layers, minimum) in enumerate(zip(layers, minimums, strict=False)) if num_layers < minimum
    ]
    if short_stages:
        stage = short_stages[0]
        problems.append(
            f"stage {stage} of {layers[stage]} layers is in num_virtual_stages = {layout.num_virtual_stages} parts; at "
            f"least {minimums[stage]} layers are required, or a smaller num_virtual_stages: only the first and the last part "
            "of all may have none"
        )
    if len(layers) != layout.pp:
        problems.append(f"{len(layers)} stages are given for pp = {layout.pp}; one number for each stage is required")
    if sum(layers) != architecture.num_layers:
        problems.append(
            f"{sum(layers)} layers are given, {architecture.name} has {architecture.num_layers}; change the numbers so that "
            "they add up to that"
        )
    return [f"layers_per_stage: {problem}" for problem in problems]


def require_legal(architecture: Architecture, job: Job, num_devices: int, layout: Layout) -> None:
    """Raise `InputError` with every violation."""
    problems = violations(architecture, job, num_devices, layout)
    if problems:
        raise InputError(*(f"layout: {problem}" for problem in problems))
