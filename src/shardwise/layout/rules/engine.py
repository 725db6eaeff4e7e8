"""Rules of what `train` runs: one table for searches, for the checks before a run, and for the engine. It imports no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from shardwise.layout.layout import Layout
from shardwise.layout.rules.layout_rule import LayoutRule, RuleContext
from shardwise.layout.sharding_scheme import layout_degrees
from shardwise.model import (
    DEFAULT_OPTIMIZER,
    HAS_WEIGHT_PER_HEAD,
    IS_LAYER_NORM,
    Architecture,
    Job,
    ModelStructure,
    get_optimizer,
    unit_program,
    units_of_structure,
)
from shardwise.pipeline import get_schedule
from shardwise.values import PRECISIONS, Precision, Value, get_precision, raise_problems

ENGINE_FORMATS = ("fp64", "fp32", "bf16", "fp16")
# Of moments, and of gradients that are added up in another: each parameter's have a scale.
SCALED_FORMATS = ("fp8",)
ENGINE_LOSS = "in_place"  # the kind that the trained model has
# Required values of all other choices.
ENGINE_PINS: Mapping[str, Any] = {"offload": "none"}


# Structures that the engine does not run, besides those with an operation that it has no kernel for.
UNRUNNABLE_STRUCTURES: Mapping[str, Callable[[ModelStructure], bool]] = {
    "norms of what the products back to the residual stream read": lambda structure: structure.inner_norms,
    "LayerNorm of queries and keys": lambda structure: structure.qk_norm and IS_LAYER_NORM[structure.norm],
    "weights of queries' and keys' norms for each head": lambda s: s.qk_norm and HAS_WEIGHT_PER_HEAD[s.qk_norm_over],
    "a bias of the head": lambda structure: "head" in structure.bias,
    "a gate of attention": lambda structure: structure.attention_gate != "none",
    "values taken from keys": lambda structure: structure.values_from_keys,
    "an MLP beside experts": lambda structure: structure.feed_forward == "mlp_and_experts",
    "experts of a latent": lambda structure: structure.latent_experts,
    "values of another width than keys": lambda structure: structure.separate_values,
    "a norm of the rotary part of keys": lambda structure: structure.rotary_key_norm,
    "norms of the residual stream itself": lambda structure: structure.stream_norms != "none",
    "a head without a norm, or with a layer": lambda s: not s.final_norm or s.head_layer,
    "attention in chunks": lambda structure: structure.window_kind != "sliding",
    "differential attention": lambda structure: structure.differential,
    "an embedding for each layer": lambda structure: structure.layer_inputs,
    "keys and values that layers share": lambda structure: structure.key_sharing != "none",
    "streams that layers predict": lambda structure: structure.alternating_streams,
    "a learned residual of low rank": lambda structure: structure.laurel,
    "blocks that layers share": lambda structure: structure.shared_block,
    "gates of norms": lambda structure: structure.norm_gates,
    "queries that read two latents": lambda structure: structure.raw_query_latent,
    "norms of one half of a block": lambda s: (s.pre_norms_over, s.post_norms_over) != ("both", "both"),
}


@lru_cache(maxsize=1024)
def unrunnable_parts(structure: ModelStructure) -> tuple[str, ...]:
    """Return what a model of this structure has that the engine does not run; empty where it runs all of it."""
    structures = (structure, *(layer for _, layer in structure.kinds))
    parts = [name for name, is_present in UNRUNNABLE_STRUCTURES.items() if any(map(is_present, structures))]
    for unit in units_of_structure(structure):
        parts += filter(None, (operation.missing_kernel for operation in unit_program(structure, unit).operations))
    return tuple(dict.fromkeys(parts))


def _router_problem(architecture: Architecture) -> str | None:
    gating, layers = architecture.numerics.gating, architecture.layer_architectures.values()
    problems = (gating.problem(layer.num_experts, layer.experts_per_token) for layer in layers if layer.num_experts)
    return next(filter(None, problems), None)


def rotary_problem(architecture: Architecture) -> str | None:
    """Return what is wrong with a model's rotary angles for the width of its heads; None if nothing is."""
    rotary = architecture.numerics.rotary
    layers = (layer for layer in architecture.layer_architectures.values() if layer.mixer == "attention")
    widths = (layer.rope_head_dim or layer.head_dim for layer in layers if layer.structure.has_rotary)
    return next(filter(None, map(rotary.problem, widths)), None)


def _recipe_rule(
    name: str, choices: tuple[str, ...], legal: Callable[[RuleContext], Value], explain: Callable[[RuleContext], str]
) -> LayoutRule:
    return LayoutRule(name, "engine", choices, legal, lambda c: f"precision {c.precision.name}: {explain(c)}")


def _has_scaled_state(precision: Precision) -> bool:
    """Return whether resting weights or moments have scales, which follow from all elements under one scale."""
    return precision.weights not in ENGINE_FORMATS or bool({*precision.moment_dtypes} & {*SCALED_FORMATS})


# The engine's requirements on degrees, beyond legality.
ENGINE_RULES: tuple[LayoutRule, ...] = (
    _recipe_rule(
        "whole_scales", ("zero_stage",),
        lambda c: (c["zero_stage"] == 0) | (not _has_scaled_state(c.precision)),
        lambda c: (
            f"state in fp8 that zero_stage={c['zero_stage']} splits within what has one scale is planned, not yet runnable; plan "
            f"again with {pin_flags({'zero_stage': 0})}"
        ),
    ),
    _recipe_rule(
        "sums_in_scales", (),
        lambda c: (c.num_devices == 1) | (c.precision.gradient_reduction not in SCALED_FORMATS),
        lambda c: (
            f"gradients that devices sum in {c.precision.gradient_reduction} are planned, not yet runnable on several devices"
        ),
    ),
    _recipe_rule(
        "gathered_as_it_rests", ("zero_stage",),
        lambda c: (c["zero_stage"] < 3) | (c.precision.gathered in (None, c.precision.weights)),
        lambda c: (
            f"weights in {c.precision.weights} that zero_stage=3 gathers in {c.precision.gathered} are planned, not yet "
            f"runnable; plan again with {pin_flags({'zero_stage': 2})}"
        ),
    ),
    _recipe_rule(
        "narrow_products_whole", ("async_tp",),
        lambda c: (c["async_tp"] == 0) | (not c.precision.scaling),
        lambda c: (
            f"products in {c.precision.matmul} in pieces (async_tp) are planned, not yet runnable; plan again with "
            f"{pin_flags({'async_tp': False})}"
        ),
    ),
    LayoutRule(
        "structures_with_kernels", "engine", (),
        lambda c: not unrunnable_parts(c.model.structure),
        lambda c: (
            f"{c.model.name} has {', '.join(unrunnable_parts(c.model.structure))}: planned, not yet runnable; train a model "
            "without it"
        ),
    ),
    LayoutRule(
        "known_arithmetic", "engine", (),
        lambda c: not c.model.numerics.missing_arithmetic,
        lambda c: (
            f"{c.model.name} has {'; '.join(c.model.numerics.missing_arithmetic)} in its config, which the engine does not "
            "compute: planned, not yet runnable; train a model without it"
        ),
    ),
    LayoutRule(
        "groups_of_experts", "engine", (),
        lambda c: _router_problem(c.model) is None,
        lambda c: f"of the router's groups, {_router_problem(c.model)}; plan again with numbers of experts that have them",
    ),
    LayoutRule(
        "rotary_pairs", "engine", (),
        lambda c: rotary_problem(c.model) is None,
        lambda c: f"{rotary_problem(c.model)}; plan again with another width of heads",
    ),
    LayoutRule(
        "async_tp_by_schedule", "engine", ("async_tp", "schedule"),
        lambda c: (c["async_tp"] == 0) | (not get_schedule(c["schedule"]).splits_backward),
        lambda c: (
            f"async_tp with schedule={c['schedule']}, which splits the backward pass, is planned, not yet runnable; plan again "
            "with --pin async_tp=false, or with --pin schedule=1f1b"
        ),
    ),
)  # fmt: skip


def job_for_engine(job: Job) -> Job:
    """Return the job with the engine's loss. Raises `InputError` for a precision recipe that no layout runs with."""
    raise_problems([*_recipe_problems(get_precision(job.precision), job.optimizer)])
    return replace(job, loss=ENGINE_LOSS)


def require_runnable(
    architecture: Architecture, layout: Layout, precision: Precision, optimizer: str = DEFAULT_OPTIMIZER
) -> None:
    """Raise `InputError` with everything in a layout, a precision recipe and an optimizer that the engine does not support,
    and the fix."""
    problems = (
        *_pin_problems(layout),
        *_rule_problems(architecture, layout, precision),
        *_adapter_problems(architecture, precision),
    )
    raise_problems([*problems, *_recipe_problems(precision, optimizer)])


def _pin_problems(layout: Layout) -> Iterator[str]:
    missing = {name: getattr(layout, name) for name, value in ENGINE_PINS.items() if getattr(layout, name) != value}
    if missing:
        text = ", ".join(f"{name}={_flag_value(value)}" for name, value in missing.items())
        yield (
            f"plan: {text} {'is' if len(missing) == 1 else 'are'} planned, not yet runnable; plan again with --runnable, or "
            f"{pin_flags({name: ENGINE_PINS[name] for name in missing})}"
        )


def _rule_problems(architecture: Architecture, layout: Layout, precision: Precision) -> Iterator[str]:
    # No engine rule reads the job but for its precision, which need not be one that has a name.
    job = Job(global_batch_tokens=1, seq_len=1)
    context = RuleContext(architecture, job, layout.num_devices, layout_degrees(layout), precision)
    yield from (f"plan: {rule.explain(context)}" for rule in ENGINE_RULES if not rule.legal(context))


def add_engine_pins(pins: Mapping[str, Any]) -> dict[str, Any]:
    """Return pins of a search with those that leave only what the engine runs. Raises `InputError` for a pin that it does not
    run."""
    raise_problems(
        [
            f"--runnable: {name}={_flag_value(pins[name])} is planned, not yet runnable; {name}={_flag_value(value)} is required"
            for name, value in ENGINE_PINS.items()
            if pins.get(name, value) != value
        ]
    )
    return {**ENGINE_PINS, **pins}


def pin_flags(changes: Mapping[str, object]) -> str:
    """Return the flags of `shardwise plan` for values of a layout."""
    return " ".join(f"--pin {name}={'all' if value is None else _flag_value(value)}" for name, value in changes.items())


def _flag_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _recipe_problems(precision: Precision, optimizer: str) -> Iterator[str]:
    names = ", ".join(name for name, recipe in PRECISIONS.items() if not list(_unsupported_formats(recipe, optimizer)))
    yield from (
        f"precision {precision.name}: {problem}; one of {names} runs"
        for problem in _unsupported_formats(precision, optimizer)
    )


def _unsupported_formats(precision: Precision, optimizer: str) -> Iterator[str]:
    """Yield what the engine does not support of a recipe with an optimizer, whatever the layout."""
    resting_formats = {
        precision.accumulated_gradients or precision.gradients, precision.master or precision.activations,
        precision.activations, precision.update_gradients or precision.activations,
        *({precision.gradients, precision.gradient_reduction, *precision.moment_dtypes} - {*SCALED_FORMATS}),
    }  # fmt: skip
    yield from (
        f"{name} at rest, which takes scales, is planned, not yet runnable"
        for name in sorted(resting_formats - set(ENGINE_FORMATS))
    )
    if precision.frozen:
        yield f"frozen weights in {precision.frozen}, which are dequantized for each product, are planned, not yet runnable"
    is_low_precision = precision.weights not in ENGINE_FORMATS
    if is_low_precision and (
        precision.weights != precision.matmul or precision.master is None or precision.scaling is None
    ):
        yield f"{precision.weights} at rest, which takes scales, is planned, not yet runnable"
    if precision.matmul and not precision.scaling:
        yield f"products in {precision.matmul} are planned, not yet runnable"
    if precision.accumulated_gradients and precision.gradients not in (precision.activations, *SCALED_FORMATS):
        yield f"gradients in {precision.gradients}, added up in another format, under {precision.activations}, are planned only"
    definition = get_optimizer(optimizer)
    if {*precision.moment_dtypes} & {*SCALED_FORMATS} and (
        definition.updates_whole_matrices or definition.reduces_means
    ):
        yield f"moments of {optimizer} with a scale for each parameter are planned, not yet runnable: --optimizer adamw runs"
    if definition.updates_whole_matrices and precision.activations == "fp16":
        # the loss's scale is taken off before: the square of an element below 2^-12.5 is 0 in fp16
        yield (
            f"{optimizer} takes whole matrices in the format of the activations, and fp16 has no room for the squares of "
            "small gradients"
        )


def _adapter_problems(architecture: Architecture, precision: Precision) -> Iterator[str]:
    if architecture.lora_rank and precision.weights not in ENGINE_FORMATS:
        yield f"precision {precision.name}: adapters of weights in {precision.weights} are planned, not yet runnable"
