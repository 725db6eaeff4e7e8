"""What a software stack supports of a layout and a job: one table of rules for searches, plans, and the warnings of an estimate.

A stack that is known only by its kind supports whatever is pinned; choices that are not pinned are searched among those that
some stack of the kind has (`layout/choices.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.stacks import Stack, stack_named
from shardwise.layout.context_parallel import variant_names
from shardwise.layout.degrees import Degrees, degrees_of
from shardwise.layout.layout import Layout
from shardwise.layout.rules.engine import RUNNABLE_RULES
from shardwise.layout.rules.legality import RULES, Rule
from shardwise.layout.rules.table import OF_MODES
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.recompute_policies import is_budget, is_set, parts_of_policy
from shardwise.pipeline.registry import SCHEDULES
from shardwise.values.elementwise import Value
from shardwise.values.precision import precision_named

OWN = "shardwise"  # the stack whose rules are those of the engine too
SPLITTING = ("tp", "cp", "pp", "ep")
BESIDE = {"pp": "in a pipeline", "cp": "with context parallelism", "ep": "with expert parallelism"}
# Modules that discard what they give are not run again with scales from earlier steps. Source: Megatron-Core 0.20.0,
# TransformerConfig: "Delayed scaling does not support moe_act and layernorm recompute for fp8".
NOT_DELAYED = ("layernorm", "moe_act")
USUAL_FORMATS = ("fp64", "fp32", "bf16", "fp16")  # of products, in any stack


def stack_of(cluster: Cluster) -> Stack | None:
    """The stack that a cluster is predicted for; None for a bound."""
    return stack_named(cluster.calibration.stack) if cluster.calibration else None


def as_run(stack: Stack | None, layout: Layout) -> Layout:
    """The layout as the stack runs it: with asynchronous tensor parallelism where the stack always overlaps."""
    overlaps = stack is not None and stack.overlaps_tp and layout.tp > 1 and layout.sequence_parallel
    return replace(layout, async_tp=True) if overlaps else layout


def _delayed(job: Job, module: str) -> bool:
    """Whether a module may not be run again under a job's precision."""
    return module in NOT_DELAYED and precision_named(job.precision).scaling == "delayed"


def stack_rules(stack: Stack) -> tuple[Rule, ...]:
    """A stack's requirements on degrees, beyond legality."""
    runs, name = stack.abilities, stack.name
    return (
        *(_axis_rule(name, axis, runs.axes) for axis in SPLITTING if axis not in runs.axes),
        Rule(
            "stack_zero",
            lambda a, j, n, d: _among(d["zero_stage"], {0, *runs.zero}),
            lambda a, j, n, d: f"{name} has no ZeRO-{d['zero_stage']}; {_zero_words(_stages(runs.zero))}",
        ),
        _zero_rule(stack, "pp", _stages(runs.zero_with_pp)),
        _zero_rule(stack, "cp", runs.zero_with_cp),
        _zero_rule(stack, "ep", runs.zero_with_ep),
        Rule(
            "stack_sequence_parallel",
            lambda a, j, n, d: runs.sequence_parallel | (d["sequence_parallel"] == 0) | ("tp" not in runs.axes),
            lambda a, j, n, d: f"{name} has no sequence parallelism; set sequence_parallel=false",
        ),
        Rule(
            "stack_whole_experts",
            lambda a, j, n, d: runs.whole_experts | (d["etp"] == d["tp"]),
            lambda a, j, n, d: f"{name} splits experts over tensor parallelism as it does layers; leave etp out",
        ),
        Rule(
            "stack_stages",
            lambda a, j, n, d: (
                (d["pp"] == 1) | runs.uneven_stages | (a.num_layers % (d["pp"] * d["num_virtual_stages"]) == 0)
            ),
            lambda a, j, n, d: (
                f"{name} has as many layers on each stage, and pp·num_virtual_stages = "
                f"{d['pp'] * d['num_virtual_stages']} does not divide {a.num_layers}; choose numbers that do"
            ),
        ),
        Rule(
            "stack_cp_variant",
            lambda a, j, n, d: (d["cp"] == 1) | ("cp" not in runs.axes) | _some_variant(stack, a, j, d),
            lambda a, j, n, d: f"none of {', '.join(runs.cp_variants)}, which {name} has, splits over cp = {d['cp']}",
        ),
        *(RUNNABLE_RULES if name == OWN else ()),
    )


def mode_rule(stack: Stack) -> Rule:
    """The variant of context parallelism that a mode uses, where the sequence is split."""
    has = stack.abilities.cp_variants
    return Rule(
        "cp_by_stack",
        lambda a, j, n, d: (d["cp"] == 1) | (not has) | (variant_names()[d["cp_variant"]] in has),
        lambda a, j, n, d: (
            f"{stack.name} has no cp_variant={variant_names()[d['cp_variant']]}; one of {', '.join(has)} is what it has"
        ),
    )


def domain_rule(domain: int) -> Rule:
    """Where a search may overlap tensor parallelism with products: among devices that reach one another's memory.

    Source: torchtitan (arXiv 2410.06511, section 3): asynchronous within nodes, by PyTorch's SymmetricMemory, which maps the
    memory of other devices as Transformer Engine's userbuffers do. No published run has it over a network.
    """
    return Rule(
        "async_tp_by_domain",
        lambda a, j, n, d: (d["async_tp"] == 0) | (d["tp"] <= domain),
        lambda a, j, n, d: (
            f"async_tp over tp = {d['tp']}: {domain} devices reach one another's memory; choose a smaller tp"
        ),
    )


def _axis_rule(name: str, axis: str, has: tuple[str, ...]) -> Rule:
    return Rule(
        f"stack_{axis}",
        lambda a, j, n, d: d[axis] == 1,
        lambda a, j, n, d: (
            f"{name} has no {axis}, found {axis} = {d[axis]}; it has data parallelism"
            + "".join(f", {one}" for one in has)
            + f"; set {axis}=1"
        ),
    )


def _zero_rule(stack: Stack, axis: str, stages: tuple[int, ...]) -> Rule:
    """The ZeRO stages that a stack has with an axis that it has; an axis that it lacks is reported by the rule of all stages."""
    nowhere = set(range(4)) - set(_stages(stack.abilities.zero))
    return Rule(
        f"stack_zero_with_{axis}",
        lambda a, j, n, d: (
            (d[axis] == 1) | (axis not in stack.abilities.axes) | _among(d["zero_stage"], {*stages, *nowhere})
        ),
        lambda a, j, n, d: (
            f"{stack.name} has no {f'ZeRO-{stage}' if (stage := d['zero_stage']) else 'plain replicas'} {BESIDE[axis]}; "
            f"{_zero_words(stages)}, or {axis}=1"
        ),
    )


def _among(value: Value, values: set[int]) -> Value:
    found: Value = False
    for one in values:
        found = found | (value == one)
    return found


def _dealt_out(uneven: bool) -> tuple[str, ...]:
    """How a stack distributes layers over pipeline stages, its default first."""
    return ("balanced", "even")[not uneven :]


def _stages(zero: tuple[int, ...]) -> tuple[int, ...]:
    """Stages of ZeRO, plain replicas among them."""
    return tuple(sorted({0, *zero}))


def _zero_words(stages: tuple[int, ...]) -> str:
    return f"a zero_stage of {', '.join(map(str, stages))} is required"


def _some_variant(stack: Stack, architecture: Architecture, job: Job, degrees: Degrees) -> Value:
    """Whether one of the stack's variants of context parallelism splits the sequence, or the heads."""
    found: Value = False
    for name in stack.abilities.cp_variants:
        own: Value = True
        for rule in (rule for rule in RULES if rule.name in OF_MODES and "cp" in rule.name):
            own = own & rule.legal(architecture, job, 0, {**degrees, "cp_variant": variant_names().index(name)})
        found = found | own
    return found


def lacking(stack: Stack, architecture: Architecture, job: Job, layout: Layout) -> list[str]:
    """What a stack does not support of a layout and its job, with what it does instead; empty where it runs all of it."""
    chosen = _chosen(layout)
    return [*_of_layout(stack, architecture, job, layout), *_of_choices(stack, job, chosen), *_of_job(stack, job)]


def _of_layout(stack: Stack, architecture: Architecture, job: Job, layout: Layout) -> Iterator[str]:
    degrees = degrees_of(layout)
    for rule in (*stack_rules(stack), mode_rule(stack)):
        if rule.name == "stack_stages" and layout.layers_per_stage:
            continue  # judged below
        if not rule.legal(architecture, job, layout.num_devices, degrees):
            yield rule.explain(architecture, job, layout.num_devices, degrees)
    layers = layout.layers_per_stage
    if layers and len(set(layers)) > 1 and not stack.abilities.uneven_stages:
        yield f"{stack.name} has as many layers on each stage, found {','.join(map(str, layers))}"


def _chosen(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in ("schedule", "recompute", "offload", "async_tp")}


def _of_choices(stack: Stack, job: Job, chosen: Mapping[str, Any]) -> Iterator[str]:
    """What a stack lacks among some choices; a missing axis is reported alone."""
    runs = stack.abilities
    has: dict[str, tuple[Any, ...]] = {
        "schedule": ("none", *(runs.schedules or SCHEDULES)), "recompute": _policies(stack, chosen), "offload": runs.offload,
        "zero_stage": _stages(runs.zero), "cp_variant": runs.cp_variants or variant_names(),
        "async_tp": (False, True)[: 1 + runs.async_tp], "sequence_parallel": (False, True)[: 1 + runs.sequence_parallel],
        "stages": _dealt_out(runs.uneven_stages),
        **{axis: (1,) for axis in SPLITTING if axis not in runs.axes},
    }  # fmt: skip
    for name, value in chosen.items():
        parts = parts_of_policy(value) if name == "recompute" else (value,)
        if name in has and not set(parts) <= set(has[name]):
            known = " or ".join(str(one).lower() for one in has[name])
            yield f"{stack.name} has no {name}={str(value).lower()}; {name}={known} is what it runs"
        elif name == "recompute" and (refused := [part for part in parts if _delayed(job, part)]):
            yield (
                f"{stack.name} does not run {' and '.join(refused)} again with delayed scaling, found precision "
                f"{job.precision}; recompute=none, mlp or full, or another precision, is required"
            )


def _policies(stack: Stack, chosen: Mapping[str, Any]) -> tuple[str, ...]:
    """The recompute policies that a stack runs; the engine of `train` runs any set of tensors too."""
    own = str(chosen.get("recompute", ""))
    return (*stack.abilities.recompute, *((own,) if stack.name == OWN and (is_set(own) or is_budget(own)) else ()))


def _of_job(stack: Stack, job: Job) -> Iterator[str]:
    """What a stack does not support of a job."""
    runs, product = stack.abilities, precision_named(job.precision).product_format
    if job.loss is not None and job.loss not in runs.losses:
        yield f"{stack.name} has no loss of the kind {job.loss}; it has {', '.join(runs.losses)}"
    if product not in (*USUAL_FORMATS, *runs.products):
        formats = ", ".join(("16 and 32 bits", *runs.products))
        yield f"{stack.name} has no products in {product} (precision {job.precision}); it has those in {formats}"


def refused(stack: Stack, job: Job, asked: Mapping[str, Any]) -> list[str]:
    """What the stack does not run of a job and of the choices that are pinned."""
    return [*_of_job(stack, job), *_of_choices(stack, job, asked)] if stack.known else []
