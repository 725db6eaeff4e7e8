"""Rules of what a software stack supports of a layout and a job: one table for searches, plans, and the warnings of an
estimate.

A stack that is known only by its kind supports whatever is pinned; choices that are not pinned are searched among those that
some stack of the kind has (`layout/choices.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.hardware import Cluster, Stack, get_stack
from shardwise.layout.layers_per_stage import STAGES
from shardwise.layout.layout import Layout, cp_variant_names
from shardwise.layout.rules.engine import ENGINE_RULES
from shardwise.layout.rules.framework_rules import framework_rules, policy_problems
from shardwise.layout.rules.layout_rule import LayoutRule, RuleContext
from shardwise.layout.rules.model_and_cluster_rules import LEGALITY_RULES, has_even_batch
from shardwise.model import Architecture, Job, get_optimizer, is_byte_budget
from shardwise.model.optimizer_program import nearest_precision
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


def supported_values(stack: Stack) -> Mapping[str, tuple[Any, ...]]:
    """Return the values that a stack has of each choice of a layout, by the choice's name, defaults first where there are some.

    An axis that the stack lacks has a degree of 1; those that it has are not listed. The engine of `train` recomputes other
    sets of tensors than the named policies too.

    >>> from shardwise.hardware.stacks import get_stack
    >>> {name: supported_values(get_stack("megatron"))[name] for name in ("zero_stage", "sequence_parallel", "stages")}
    {'zero_stage': (0, 1, 2, 3), 'sequence_parallel': (False, True), 'stages': ('balanced', 'even', 'equal')}
    """
    abilities = stack.abilities
    return {
        "schedule": ("none", *(abilities.schedules or SCHEDULES)), "recompute": abilities.recompute,
        "offload": abilities.offload, "zero_stage": _with_replicas(abilities.zero),
        "cp_variant": abilities.cp_variants or cp_variant_names(), "async_tp": (False, True)[: 1 + abilities.async_tp],
        "stages": tuple(name for name in STAGES if name in abilities.stages),
        "sequence_parallel": (False, True)[: 1 + abilities.sequence_parallel],
        **{axis: (1,) for axis in SPLITTING_AXES if axis not in abilities.axes},
    }  # fmt: skip


def stack_rules(stack: Stack) -> tuple[LayoutRule, ...]:
    """Return a stack's requirements on degrees, beyond legality; for the engine's stack also the engine's."""
    abilities, name, supported = stack.abilities, stack.name, supported_values(stack)
    zero_stages, cp_variants = supported["zero_stage"], supported["cp_variant"]
    return (
        *(_axis_rule(name, axis, abilities.axes) for axis in SPLITTING_AXES if axis not in abilities.axes),
        LayoutRule(
            "stack_zero", "stack", ("zero_stage",),
            lambda c: _is_any_of(c["zero_stage"], zero_stages),
            lambda c: f"{name} has no ZeRO-{c['zero_stage']}; {_required_zero_text(zero_stages)}",
        ),
        _zero_rule(stack, "pp", _with_replicas(abilities.zero_with_pp)),
        _zero_rule(stack, "cp", abilities.zero_with_cp),
        _zero_rule(stack, "ep", abilities.zero_with_ep),
        LayoutRule(
            "stack_sequence_parallel", "stack", ("sequence_parallel",),
            lambda c: abilities.sequence_parallel | (c["sequence_parallel"] == 0) | ("tp" not in abilities.axes),
            lambda c: f"{name} has no sequence parallelism; set sequence_parallel=false",
        ),
        LayoutRule(
            "stack_precision", "stack", ("zero_stage",),
            lambda c: _runs_precision(stack, c),
            lambda c: (
                f"{name} has precision {c.precision.name} only with{'' if c['zero_stage'] == 0 else 'out'} ZeRO; set "
                f"{'another zero_stage than 0' if c['zero_stage'] == 0 else 'zero_stage=0'}, or another precision"
            ),
        ),
        LayoutRule(
            "stack_whole_experts", "stack", ("etp",),
            lambda c: abilities.whole_experts | (c["etp"] == c["tp"]),
            lambda c: f"{name} splits experts over tensor parallelism as it does layers; leave etp out",
        ),
        LayoutRule(
            "stack_stages", "stack", ("stages",),
            lambda c: (c["pp"] == 1) | abilities.uneven_stages | (c.model.num_layers % (c["pp"] * c["num_virtual_stages"]) == 0),
            lambda c: (
                f"{name} has as many layers on each stage, and pp·num_virtual_stages = {c['pp'] * c['num_virtual_stages']} does "
                f"not divide {c.model.num_layers}; choose numbers that do"
            ),
        ),
        LayoutRule(
            "stack_batch", "stack", ("dp", "fsdp", "micro_batch_seqs"),
            lambda c: abilities.uneven_batches | has_even_batch(c.job, c.degrees),
            lambda c: (
                f"{name} gives all replicas as many sequences, and dp·fsdp·micro_batch_seqs = "
                f"{c['dp'] * c['fsdp'] * c['micro_batch_seqs']} does not divide {c.job.num_seqs}; choose numbers that do"
            ),
        ),
        LayoutRule(
            "stack_cp_variant", "stack", ("cp_variant",),  # whichever variant: not one that a mode has
            lambda c: (c["cp"] == 1) | ("cp" not in abilities.axes) | _has_possible_variant(abilities.cp_variants, c),
            lambda c: f"none of {', '.join(abilities.cp_variants)}, which {name} has, splits over cp = {c['cp']}",
        ),
        *(ENGINE_RULES if name == ENGINE_STACK else ()),
        *framework_rules(name, abilities.rules),
        LayoutRule(
            "cp_by_stack", "stack", ("cp_variant",),
            lambda c: (c["cp"] == 1) | (cp_variant_names()[c["cp_variant"]] in cp_variants),
            lambda c: (
                f"{name} has no cp_variant={cp_variant_names()[c['cp_variant']]}; one of {', '.join(cp_variants)} is what it has"
            ),
            reads_mode=True,
        ),
    )  # fmt: skip


def async_tp_domain_rule(domain: int) -> LayoutRule:
    """Return the rule that limits asynchronous tensor parallelism to devices that reach one another's memory.

    Source: torchtitan (arXiv 2410.06511, section 3): asynchronous within nodes, by PyTorch's SymmetricMemory, which maps the
    memory of other devices as Transformer Engine's userbuffers do. No published run has it over a network.
    """
    return LayoutRule(
        "async_tp_by_domain", "cluster", ("async_tp",),
        lambda c: (c["async_tp"] == 0) | (c["tp"] <= domain),
        lambda c: f"async_tp over tp = {c['tp']}: {domain} devices reach one another's memory; choose a smaller tp",
        reads_mode=True,
    )  # fmt: skip


def _axis_rule(name: str, axis: str, stack_axes: tuple[str, ...]) -> LayoutRule:
    return LayoutRule(
        f"stack_{axis}", "stack", (axis,),
        lambda c: c[axis] == 1,
        lambda c: (
            f"{name} has no {axis}, found {axis} = {c[axis]}; it has data parallelism"
            + "".join(f", {supported_axis}" for supported_axis in stack_axes)
            + f"; set {axis}=1"
        ),
    )  # fmt: skip


def _zero_rule(stack: Stack, axis: str, stages: tuple[int, ...]) -> LayoutRule:
    """Return the rule about ZeRO stages together with an axis. Other rules report an axis or a stage that the stack lacks."""
    missing_stages = set(range(4)) - set(_with_replicas(stack.abilities.zero))
    return LayoutRule(
        f"stack_zero_with_{axis}", "stack", ("zero_stage",),
        lambda c: (
            (c[axis] == 1)
            | (axis not in stack.abilities.axes)
            | _is_any_of(c["zero_stage"], {*stages, *missing_stages})
        ),
        lambda c: (
            f"{stack.name} has no {f'ZeRO-{stage}' if (stage := c['zero_stage']) else 'plain replicas'} {AXIS_PHRASES[axis]}; "
            f"{_required_zero_text(stages)}, or {axis}=1"
        ),
    )  # fmt: skip


def _is_any_of(value: Value, values: Collection[int]) -> Value:
    is_member: Value = False
    for allowed in values:
        is_member = is_member | (value == allowed)
    return is_member


def _with_replicas(zero: tuple[int, ...]) -> tuple[int, ...]:
    """Return ZeRO stages with stage 0, plain replicas, among them."""
    return tuple(sorted({0, *zero}))


def _required_zero_text(stages: tuple[int, ...]) -> str:
    return f"a zero_stage of {', '.join(map(str, stages))} is required"


def _runs_precision(stack: Stack, context: RuleContext) -> Value:
    """Return whether a recipe that a stack has goes with a stage of ZeRO; a single replica needs none."""
    name, abilities = context.precision.name, stack.abilities
    with_zero, with_replicas = name in abilities.precisions, name in abilities.replica_precisions
    if with_zero == with_replicas:
        return True
    return (
        (context["zero_stage"] > 0) | (context["dp"] * context["fsdp"] == 1)
        if with_zero
        else context["zero_stage"] == 0
    )


def _has_possible_variant(variants: tuple[str, ...], context: RuleContext) -> Value:
    is_possible: Value = False
    for name in variants:
        of_variant = context.with_degrees(cp_variant=cp_variant_names().index(name))
        is_legal: Value = True
        for rule in LEGALITY_RULES:
            if "cp_variant" in rule.choices:
                is_legal = is_legal & rule.legal(of_variant)
        is_possible = is_possible | is_legal
    return is_possible


def unsupported_choices(stack: Stack, architecture: Architecture, job: Job, layout: Layout) -> list[str]:
    """Return what a stack does not support of a layout and its job, with what it does instead; empty where it runs all of it."""
    context = RuleContext.from_layout(architecture, job, layout.num_devices, layout)
    return [
        *(
            rule.explain(context)
            for rule in stack_rules(stack)
            if not (layout.layers_per_stage and "stages" in rule.choices) and not rule.legal(context)
        ),
        *choice_problems(stack, layout, job),
    ]


def choice_problems(stack: Stack, layout: Layout, job: Job) -> Iterator[str]:
    """Yield what a stack does not support among the choices of a layout that are not degrees, and of its job."""
    layers = layout.layers_per_stage
    if layers and len(set(layers)) > 1 and not stack.abilities.uneven_stages:
        yield f"{stack.name} has as many layers on each stage, found {','.join(map(str, layers))}"
    names = ("schedule", "recompute", "offload", "async_tp")
    yield from _value_problems(stack, job, {name: getattr(layout, name) for name in names})
    yield from policy_problems(
        stack.name, stack.abilities.rules, layout.recompute, layout.recompute_layers, layout.offload
    )
    yield from _job_problems(stack, job)


def _value_problems(stack: Stack, job: Job, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield which of some choices' values a stack lacks."""
    supported = supported_values(stack)
    for name, value in values.items():
        parts = required_abilities(value) if name == "recompute" else (value,)
        if name in supported and not set(parts) <= {*supported[name]} and not _is_set_for_engine(stack, name, value):
            allowed = " or ".join(str(choice).lower() for choice in supported[name])
            yield f"{stack.name} has no {name}={str(value).lower()}; {name}={allowed} is what it runs"
        elif name == "recompute" and (forbidden := [part for part in parts if forbids_recompute(job, part)]):
            yield (
                f"{stack.name} does not run {' and '.join(forbidden)} again with delayed scaling, found precision "
                f"{job.precision}; recompute=none, mlp or full, or another precision, is required"
            )


def _is_set_for_engine(stack: Stack, name: str, value: Any) -> bool:
    """Return whether a choice is a recompute policy that the engine of `train` runs though no table has its name."""
    return stack.name == ENGINE_STACK and name == "recompute" and (is_tensor_set(value) or is_byte_budget(value))


def _job_problems(stack: Stack, job: Job) -> Iterator[str]:
    abilities, product = stack.abilities, get_precision(job.precision).matmul_format
    if job.loss is not None and job.loss not in abilities.losses:
        yield f"{stack.name} has no loss of the kind {job.loss}; it has {', '.join(abilities.losses)}"
    if product not in (*COMMON_PRODUCT_FORMATS, *abilities.products):
        formats = ", ".join(("16 and 32 bits", *abilities.products))
        yield f"{stack.name} has no products in {product} (precision {job.precision}); it has those in {formats}"
    elif (nearest := supported_precision(stack, job)) != job.precision:
        yield f"{stack.name} has no precision {job.precision}; precision={nearest} is the nearest that it has"


def supported_precision(stack: Stack, job: Job) -> str:
    """Return a job's precision recipe, or the nearest that a stack has.

    >>> from shardwise.hardware import get_stack
    >>> supported_precision(get_stack("nanotron"), Job(global_batch_tokens=4096, seq_len=4096, precision="bf16"))
    'bf16_fp32_gradients'
    """
    recipes = (*stack.abilities.precisions, *stack.abilities.replica_precisions)
    nearest = nearest_precision(get_precision(job.precision), recipes, get_optimizer(job.optimizer))
    return job.precision if job.precision in recipes else nearest or job.precision


def unsupported_pins(stack: Stack, job: Job, pins: Mapping[str, Any]) -> list[str]:
    """Return what the stack does not run of a job and of pinned choices."""
    return [*_job_problems(stack, job), *_value_problems(stack, job, pins)] if stack.is_known else []
