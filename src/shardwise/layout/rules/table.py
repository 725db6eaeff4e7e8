"""Apply the layout rules: every violation of one layout, and the modes in which columns of degrees can run."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.layout.context_parallel import cp_variant_names
from shardwise.layout.layers_per_stage import min_layers_per_stage, stage_placement
from shardwise.layout.layout import Layout
from shardwise.layout.rules.legality import RULES, LayoutRule, tensor_set_problems
from shardwise.layout.sharding_scheme import Degrees, ParallelMode, layout_degrees
from shardwise.model import Architecture, Job
from shardwise.values import InputError, Value

MODE_RULES = (
    "sequence_by_cp",
    "cp_variant",
    "heads_by_cp",
    "cp_by_stack",
    "async_tp",
    "async_tp_by_domain",
    "experts",
    "whole_experts",
)  # rules that read them


def legal_modes(
    architecture: Architecture,
    job: Job,
    degrees: Degrees,
    modes: Sequence[ParallelMode],
    rules: Sequence[LayoutRule] = RULES,
) -> list[Value]:
    """Return for each mode which rows of degrees can run in it; `ep` of `degrees` is the one without whole experts."""
    rules, legal_by_mode = [rule for rule in rules if rule.name in MODE_RULES], []
    for mode in modes:
        expert_degrees: dict[str, Value] = {"ep": degrees["ep"] * degrees["tp"], "etp": 1} if mode.whole_experts else {}
        mode_degrees = {
            **degrees,
            "etp": degrees["tp"],
            **expert_degrees,
            "cp_variant": cp_variant_names().index(mode.cp_variant),
            "async_tp": mode.async_tp,
        }
        legal: Value = degrees["tp"] > 1 if mode.whole_experts else True
        for rule in rules:
            legal = legal & rule.legal(architecture, job, 0, mode_degrees)
        legal_by_mode.append(legal)
    return legal_by_mode


def violations(architecture: Architecture, job: Job, num_devices: int, layout: Layout) -> list[str]:
    """Return everything that is wrong with a layout, by every rule; empty when it can run."""
    degrees = layout_degrees(layout)
    problems = [f"{r.name}: {r.explain(architecture, job, num_devices, degrees)}" for r in RULES
             if not r.legal(architecture, job, num_devices, degrees)]  # fmt: skip
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
