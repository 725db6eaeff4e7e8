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
from shardwise.precision import PRECISIONS, Precision
from shardwise.schedule.schedule import schedule_of

RUNNABLE_FORMATS = ("fp64", "fp32", "bf16")
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


def require_runnable(architecture: Architecture, layout: Layout, precision: Precision) -> None:
    """Raise `InputError` with everything in a layout and a precision recipe that the engine does not support, and the fix."""
    require([*_missing(layout), *_broken(architecture, layout), *_unrunnable(precision)])


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


def _unrunnable(precision: Precision) -> Iterator[str]:
    runs = ", ".join(name for name, one in PRECISIONS.items() if not list(_problems(one)))
    yield from (f"precision {precision.name}: {problem}; one of {runs} runs" for problem in _problems(precision))


def _problems(precision: Precision) -> Iterator[str]:
    """What the engine does not support in a recipe."""
    state = precision.master or precision.weights
    formats = {
        precision.weights, precision.gradients, precision.gradient_reduction, state,
        precision.accumulated_gradients or precision.gradients, precision.activations,
    }  # fmt: skip
    yield from (f"{name} is planned, not yet runnable" for name in sorted(formats - set(RUNNABLE_FORMATS)))
    if precision.matmul:
        yield f"products in {precision.matmul} are planned, not yet runnable"
    if precision.activations != precision.weights:
        yield f"weights in {precision.weights} under activations in {precision.activations} are not yet runnable"
    if precision.moments != state or precision.second_moment not in (None, state):
        yield f"moments in another format than the {state} of what is updated are not yet runnable"
    if precision.update_gradients:
        yield "a copy of the gradients that rests with the moments is not yet runnable"
