"""Which plans the engine runs: one rule for searches, for the checks before a run, and for the engine. No PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import require
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.legality import Rule, degrees_of
from shardwise.model.architecture import Architecture
from shardwise.optimizer.table import DEFAULT, optimizer_named
from shardwise.precision import PRECISIONS, Precision
from shardwise.schedule.schedule import schedule_of

RUNNABLE_FORMATS = ("fp64", "fp32", "bf16", "fp16")
LOSS = "in_place"  # the kind that the trained model has
# Required values of all other choices.
PINS: Mapping[str, Any] = {"offload": "none"}


def _router_problem(architecture: Architecture) -> str | None:
    chosen = architecture.numerics.gating, architecture.num_experts, architecture.experts_per_token
    return chosen[0].problem(*chosen[1:]) if architecture.num_experts else None


def rotary_problem(architecture: Architecture) -> str | None:
    """What is wrong with a model's rotary angles for the width of its heads."""
    width = architecture.rope_head_dim or architecture.head_dim
    return architecture.numerics.rotary.problem(width) if architecture.structure.rotates else None


# The engine's requirements on degrees, beyond legality.
RUNNABLE_RULES: tuple[Rule, ...] = (
    Rule(
        "groups_of_experts",
        lambda a, j, n, d: (d["tp"] > 0) & (_router_problem(a) is None),  # one truth value for each row of a search
        lambda a, j, n, d: f"of the router's groups, {_router_problem(a)}; plan again with numbers of experts that have them",
    ),
    Rule(
        "rotary_pairs",
        lambda a, j, n, d: (d["tp"] > 0) & (rotary_problem(a) is None),
        lambda a, j, n, d: f"{rotary_problem(a)}; plan again with another width of heads",
    ),
    Rule(
        "async_tp_by_schedule",
        lambda a, j, n, d: (d["async_tp"] == 0) | (not schedule_of(d["schedule"]).splits_backward),
        lambda a, j, n, d: (
            f"async_tp with schedule={d['schedule']}, which splits the backward pass, is planned, not yet runnable; plan again "
            "with --pin async_tp=false, or with --pin schedule=1f1b"
        ),
    ),
)  # fmt: skip


def runnable_job(job: Job) -> Job:
    """The job with the engine's loss."""
    return replace(job, loss=LOSS)


def require_runnable(
    architecture: Architecture, layout: Layout, precision: Precision, optimizer: str = DEFAULT
) -> None:
    """Raise `InputError` with everything in a layout, a precision recipe and the optimizer under them that the engine does not
    support, and the fix."""
    broken = (*_missing(layout), *_broken(architecture, layout), *_adapted(architecture, precision))
    require([*broken, *_unrunnable(precision, layout, optimizer)])


def _missing(layout: Layout) -> Iterator[str]:
    missing = {name: getattr(layout, name) for name, value in PINS.items() if getattr(layout, name) != value}
    if missing:
        named = ", ".join(f"{name}={_shown(value)}" for name, value in missing.items())
        yield (
            f"plan: {named} {'is' if len(missing) == 1 else 'are'} planned, not yet runnable; plan again with --runnable, or "
            f"{pins_text({name: PINS[name] for name in missing})}"
        )


def _broken(architecture: Architecture, layout: Layout) -> Iterator[str]:
    degrees, job = degrees_of(layout), Job(global_batch_tokens=1, seq_len=1)
    for rule in RUNNABLE_RULES:
        if not rule.legal(architecture, job, layout.num_devices, degrees):
            yield f"plan: {rule.explain(architecture, job, layout.num_devices, degrees)}"


def runnable_pins(pins: Mapping[str, Any]) -> dict[str, Any]:
    """Pins of a search, with those that leave only what the engine runs. Raises `InputError` for a pin that it does not run."""
    require(
        [
            f"--runnable: {name}={_shown(pins[name])} is planned, not yet runnable; {name}={_shown(value)} is required"
            for name, value in PINS.items()
            if pins.get(name, value) != value
        ]
    )
    return {**PINS, **pins}


def pins_text(changes: Mapping[str, object]) -> str:
    """Flags of `shardwise plan` for values of a layout."""
    return " ".join(f"--pin {name}={'all' if value is None else _shown(value)}" for name, value in changes.items())


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unrunnable(precision: Precision, layout: Layout, optimizer: str) -> Iterator[str]:
    runs = ", ".join(name for name, one in PRECISIONS.items() if not list(_problems(one, layout, optimizer)))
    yield from (
        f"precision {precision.name}: {problem}; one of {runs} runs"
        for problem in _problems(precision, layout, optimizer)
    )


def _problems(precision: Precision, layout: Layout, optimizer: str) -> Iterator[str]:
    """What the engine does not support of a recipe under a layout with an optimizer."""
    kept = {
        precision.gradients, precision.gradient_reduction, precision.master or precision.gradients,
        precision.accumulated_gradients or precision.gradients, precision.activations, precision.moments,
        precision.second_moment or precision.moments, precision.update_gradients or precision.gradients,
    }  # fmt: skip
    yield from (
        f"{name} at rest, which takes scales, is planned, not yet runnable"
        for name in sorted(kept - set(RUNNABLE_FORMATS))
    )
    yield from _narrow_weights(precision, layout)
    if precision.matmul and not precision.scaling:
        yield f"products in {precision.matmul} are planned, not yet runnable"
    if precision.accumulated_gradients and precision.gradients != precision.activations:
        yield f"gradients in {precision.gradients}, added up in another format, under {precision.activations}, are planned only"
    if precision.gathered not in (None, precision.weights) and layout.zero_stage == 3:
        yield f"weights in {precision.weights} that zero_stage=3 gathers in {precision.gathered} are planned, not yet runnable"
    if precision.scaling and layout.async_tp:
        yield f"products in {precision.matmul} in pieces (async_tp) are planned, not yet runnable"
    if optimizer_named(optimizer).takes_whole and precision.activations == "fp16":
        # the loss's scale is taken off before: the square of an element below 2^-12.5 is 0 in fp16
        yield (
            f"{optimizer} takes whole matrices in the format of the activations, and fp16 has no room for the squares of "
            "small gradients"
        )


def _narrow_weights(precision: Precision, layout: Layout) -> Iterator[str]:
    """Of weights that rest in the format of products: a process casts whole tiles of them, from a master copy that is whole."""
    if precision.weights in RUNNABLE_FORMATS:
        return
    if precision.weights != precision.matmul or precision.master is None or precision.weight_block is None:
        yield f"{precision.weights} at rest, which takes scales, is planned, not yet runnable"
    elif layout.zero_stage:
        yield (
            f"weights in {precision.weights} whose master copy zero_stage={layout.zero_stage} splits within tiles are planned, "
            f"not yet runnable: plan again with {pins_text({'zero_stage': 0})}"
        )


def _adapted(architecture: Architecture, precision: Precision) -> Iterator[str]:
    if architecture.lora_rank and precision.weights not in RUNNABLE_FORMATS:
        yield f"precision {precision.name}: adapters of weights in {precision.weights} are planned, not yet runnable"
