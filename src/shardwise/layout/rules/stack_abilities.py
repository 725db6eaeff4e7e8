"""Rules of what a software stack supports of a layout and a job: one table for searches, plans, and the warnings of an
estimate.

A stack that is known only by its kind supports whatever is pinned; choices that are not pinned are searched among those that
some stack of the kind has (`layout/choices.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.hardware import Cluster, Stack, get_stack
from shardwise.layout.context_parallel import cp_variant_names
from shardwise.layout.layout import Layout
from shardwise.layout.rules.engine import ENGINE_RULES
from shardwise.layout.rules.legality import RULES, LayoutRule
from shardwise.layout.rules.table import MODE_RULES
from shardwise.layout.sharding_scheme import Degrees, layout_degrees
from shardwise.model import Architecture, Job, is_byte_budget
from shardwise.model.recompute_policies import is_tensor_set, required_abilities
from shardwise.pipeline import SCHEDULES
from shardwise.values import Value, get_precision

ENGINE_STACK = "shardwise"  # the stack whose rules are those of the engine too
SPLITTING_AXES = ("tp", "cp", "pp", "ep")
AXIS_PHRASES = {"pp": "in a pipeline", "cp": "with context parallelism", "ep": "with expert parallelism"}
# Modules that discard what they give are not run again with scales from earlier steps. Source: Megatron-Core 0.20.0,
# TransformerConfig: "Delayed scaling does not support moe_act and layernorm recompute for fp8".
NEVER_WITH_DELAYED_SCALING = ("layernorm", "moe_act")
COMMON_PRODUCT_FORMATS = ("fp64", "fp32", "bf16", "fp16")  # of products, in any stack


def stack_of(cluster: Cluster) -> Stack | None:
    """Return the stack that a cluster is predicted for; None for a bound."""
    return get_stack(cluster.calibration.stack) if cluster.calibration else None


def layout_as_run(stack: Stack | None, layout: Layout) -> Layout:
    """Return the layout as the stack runs it: with asynchronous tensor parallelism where the stack always overlaps."""
    overlaps = stack is not None and stack.overlaps_tp and layout.tp > 1 and layout.sequence_parallel
    return replace(layout, async_tp=True) if overlaps else layout


def forbids_recompute(job: Job, module: str) -> bool:
    """Return whether a module may not be recomputed under a job's precision."""
    return module in NEVER_WITH_DELAYED_SCALING and get_precision(job.precision).scaling == "delayed"


def stack_rules(stack: Stack) -> tuple[LayoutRule, ...]:
    """Return a stack's requirements on degrees, beyond legality."""
    abilities, name = stack.abilities, stack.name
    return (
        *(_axis_rule(name, axis, abilities.axes) for axis in SPLITTING_AXES if axis not in abilities.axes),
        LayoutRule(
            "stack_zero",
            lambda a, j, n, d: _is_one_of(d["zero_stage"], {0, *abilities.zero}),
            lambda a, j, n, d: (
                f"{name} has no ZeRO-{d['zero_stage']}; {_required_zero_text(zero_stages_with_replicas(abilities.zero))}"
            ),
        ),
        _zero_rule(stack, "pp", zero_stages_with_replicas(abilities.zero_with_pp)),
        _zero_rule(stack, "cp", abilities.zero_with_cp),
        _zero_rule(stack, "ep", abilities.zero_with_ep),
        LayoutRule(
            "stack_sequence_parallel",
            lambda a, j, n, d: (
                abilities.sequence_parallel | (d["sequence_parallel"] == 0) | ("tp" not in abilities.axes)
            ),
            lambda a, j, n, d: f"{name} has no sequence parallelism; set sequence_parallel=false",
        ),
        LayoutRule(
            "stack_whole_experts",
            lambda a, j, n, d: abilities.whole_experts | (d["etp"] == d["tp"]),
            lambda a, j, n, d: f"{name} splits experts over tensor parallelism as it does layers; leave etp out",
        ),
        LayoutRule(
            "stack_stages",
            lambda a, j, n, d: (
                (d["pp"] == 1) | abilities.uneven_stages | (a.num_layers % (d["pp"] * d["num_virtual_stages"]) == 0)
            ),
            lambda a, j, n, d: (
                f"{name} has as many layers on each stage, and pp·num_virtual_stages = "
                f"{d['pp'] * d['num_virtual_stages']} does not divide {a.num_layers}; choose numbers that do"
            ),
        ),
        LayoutRule(
            "stack_cp_variant",
            lambda a, j, n, d: (d["cp"] == 1) | ("cp" not in abilities.axes) | _has_possible_variant(stack, a, j, d),
            lambda a, j, n, d: (
                f"none of {', '.join(abilities.cp_variants)}, which {name} has, splits over cp = {d['cp']}"
            ),
        ),
        *(ENGINE_RULES if name == ENGINE_STACK else ()),
    )


def cp_variant_rule(stack: Stack) -> LayoutRule:
    """Return the rule about the variant of context parallelism, where the sequence is split."""
    variants = stack.abilities.cp_variants
    return LayoutRule(
        "cp_by_stack",
        lambda a, j, n, d: (d["cp"] == 1) | (not variants) | (cp_variant_names()[d["cp_variant"]] in variants),
        lambda a, j, n, d: (
            f"{stack.name} has no cp_variant={cp_variant_names()[d['cp_variant']]}; one of {', '.join(variants)} is what it has"
        ),
    )


def async_tp_domain_rule(domain: int) -> LayoutRule:
    """Return the rule that limits asynchronous tensor parallelism to devices that reach one another's memory.

    Source: torchtitan (arXiv 2410.06511, section 3): asynchronous within nodes, by PyTorch's SymmetricMemory, which maps the
    memory of other devices as Transformer Engine's userbuffers do. No published run has it over a network.
    """
    return LayoutRule(
        "async_tp_by_domain",
        lambda a, j, n, d: (d["async_tp"] == 0) | (d["tp"] <= domain),
        lambda a, j, n, d: (
            f"async_tp over tp = {d['tp']}: {domain} devices reach one another's memory; choose a smaller tp"
        ),
    )


def _axis_rule(name: str, axis: str, stack_axes: tuple[str, ...]) -> LayoutRule:
    return LayoutRule(
        f"stack_{axis}",
        lambda a, j, n, d: d[axis] == 1,
        lambda a, j, n, d: (
            f"{name} has no {axis}, found {axis} = {d[axis]}; it has data parallelism"
            + "".join(f", {supported_axis}" for supported_axis in stack_axes)
            + f"; set {axis}=1"
        ),
    )


def _zero_rule(stack: Stack, axis: str, stages: tuple[int, ...]) -> LayoutRule:
    """Return the rule about ZeRO stages together with an axis. Another rule reports an axis that the stack lacks."""
    missing_stages = set(range(4)) - set(zero_stages_with_replicas(stack.abilities.zero))
    return LayoutRule(
        f"stack_zero_with_{axis}",
        lambda a, j, n, d: (
            (d[axis] == 1)
            | (axis not in stack.abilities.axes)
            | _is_one_of(d["zero_stage"], {*stages, *missing_stages})
        ),
        lambda a, j, n, d: (
            f"{stack.name} has no {f'ZeRO-{stage}' if (stage := d['zero_stage']) else 'plain replicas'} {AXIS_PHRASES[axis]}; "
            f"{_required_zero_text(stages)}, or {axis}=1"
        ),
    )


def _is_one_of(value: Value, values: set[int]) -> Value:
    is_member: Value = False
    for allowed in values:
        is_member = is_member | (value == allowed)
    return is_member


def stage_divisions(uneven: bool) -> tuple[str, ...]:
    """Return how a stack can distribute layers over pipeline stages, its default first."""
    return ("balanced", "even")[not uneven :]


def zero_stages_with_replicas(zero: tuple[int, ...]) -> tuple[int, ...]:
    """Return ZeRO stages with stage 0, plain replicas, among them."""
    return tuple(sorted({0, *zero}))


def _required_zero_text(stages: tuple[int, ...]) -> str:
    return f"a zero_stage of {', '.join(map(str, stages))} is required"


def _has_possible_variant(stack: Stack, architecture: Architecture, job: Job, degrees: Degrees) -> Value:
    is_possible: Value = False
    for name in stack.abilities.cp_variants:
        is_legal: Value = True
        for rule in (rule for rule in RULES if rule.name in MODE_RULES and "cp" in rule.name):
            is_legal = is_legal & rule.legal(
                architecture, job, 0, {**degrees, "cp_variant": cp_variant_names().index(name)}
            )
        is_possible = is_possible | is_legal
    return is_possible


def unsupported_choices(stack: Stack, architecture: Architecture, job: Job, layout: Layout) -> list[str]:
    """Return what a stack does not support of a layout and its job, with what it does instead; empty where it runs all of it."""
    choices = _checked_choices(layout)
    return [
        *_layout_problems(stack, architecture, job, layout),
        *_choice_problems(stack, job, choices),
        *_job_problems(stack, job),
    ]


def _layout_problems(stack: Stack, architecture: Architecture, job: Job, layout: Layout) -> Iterator[str]:
    degrees = layout_degrees(layout)
    for rule in (*stack_rules(stack), cp_variant_rule(stack)):
        if rule.name == "stack_stages" and layout.layers_per_stage:
            continue  # judged below
        if not rule.legal(architecture, job, layout.num_devices, degrees):
            yield rule.explain(architecture, job, layout.num_devices, degrees)
    layers = layout.layers_per_stage
    if layers and len(set(layers)) > 1 and not stack.abilities.uneven_stages:
        yield f"{stack.name} has as many layers on each stage, found {','.join(map(str, layers))}"


def _checked_choices(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in ("schedule", "recompute", "offload", "async_tp")}


def _choice_problems(stack: Stack, job: Job, choices: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a stack lacks among some choices; a missing axis is reported alone."""
    abilities = stack.abilities
    supported: dict[str, tuple[Any, ...]] = {
        "schedule": ("none", *(abilities.schedules or SCHEDULES)), "recompute": _supported_policies(stack, choices),
        "offload": abilities.offload,
        "zero_stage": zero_stages_with_replicas(abilities.zero), "cp_variant": abilities.cp_variants or cp_variant_names(),
        "async_tp": (False, True)[: 1 + abilities.async_tp], "stages": stage_divisions(abilities.uneven_stages),
        "sequence_parallel": (False, True)[: 1 + abilities.sequence_parallel],
        **{axis: (1,) for axis in SPLITTING_AXES if axis not in abilities.axes},
    }  # fmt: skip
    for name, value in choices.items():
        parts = required_abilities(value) if name == "recompute" else (value,)
        if name in supported and not set(parts) <= set(supported[name]):
            allowed = " or ".join(str(choice).lower() for choice in supported[name])
            yield f"{stack.name} has no {name}={str(value).lower()}; {name}={allowed} is what it runs"
        elif name == "recompute" and (forbidden := [part for part in parts if forbids_recompute(job, part)]):
            yield (
                f"{stack.name} does not run {' and '.join(forbidden)} again with delayed scaling, found precision "
                f"{job.precision}; recompute=none, mlp or full, or another precision, is required"
            )


def _supported_policies(stack: Stack, choices: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the recompute policies that a stack runs; the engine of `train` runs any set of tensors too."""
    policy = str(choices.get("recompute", ""))
    return (
        *stack.abilities.recompute,
        *((policy,) if stack.name == ENGINE_STACK and (is_tensor_set(policy) or is_byte_budget(policy)) else ()),
    )


def _job_problems(stack: Stack, job: Job) -> Iterator[str]:
    abilities, product = stack.abilities, get_precision(job.precision).matmul_format
    if job.loss is not None and job.loss not in abilities.losses:
        yield f"{stack.name} has no loss of the kind {job.loss}; it has {', '.join(abilities.losses)}"
    if product not in (*COMMON_PRODUCT_FORMATS, *abilities.products):
        formats = ", ".join(("16 and 32 bits", *abilities.products))
        yield f"{stack.name} has no products in {product} (precision {job.precision}); it has those in {formats}"


def unsupported_pins(stack: Stack, job: Job, pins: Mapping[str, Any]) -> list[str]:
    """Return what the stack does not run of a job and of pinned choices."""
    return [*_job_problems(stack, job), *_choice_problems(stack, job, pins)] if stack.known else []
