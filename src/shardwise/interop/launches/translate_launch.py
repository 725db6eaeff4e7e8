"""Translate a launch to the options of a target and back, and find what gets lost on the way.

`refusals` lists why a target cannot run a launch: what its stack or the target itself excludes, and every field that writing and
reading back does not restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

from shardwise.hardware.stacks import get_stack
from shardwise.interop.launches.launch import Launch, launch_from_fields, with_stages
from shardwise.interop.launches.target import OptionReader, Options, Target
from shardwise.layout.rules.stack_abilities import unsupported_choices
from shardwise.model.architecture import Architecture
from shardwise.model.optimizer_state import state_parts
from shardwise.model.optimizers.definition import Optimizer
from shardwise.model.optimizers.registry import get_optimizer
from shardwise.values.errors import InputError, raise_problems
from shardwise.values.precision import PRECISIONS, Precision, get_precision

# Parts that a run has with or without a target's word for them: said where they cannot be, and no reason to refuse.
LISTED_FIELDS = ("job.loss", "job.tokens", "job.document_tokens", "numerics.")


def to_options(target: Target, launch: Launch) -> dict[str, Any]:
    """The options of a launch, in the order of the target's fields. Raises `InputError` for one that its release lacks."""
    options: dict[str, Any] = {}
    for field in (*target.model_mappings, *target.mappings):
        options |= field.to_options(launch)
    problems = target.problems(options)
    if problems:
        raise InputError(*problems)
    return options


def from_options(target: Target, given: OptionReader, model: Architecture | None = None) -> dict[str, Any]:
    """The parts of a launch that options say, by dotted name. With a `model`, options that describe one count for nothing."""
    parts: dict[str, Any] = {}
    problems: list[str] = []
    for field in (*target.model_mappings, *target.mappings):
        try:
            parts |= field.from_options(given)
        except InputError as error:
            problems += () if model and field in target.model_mappings else error.problems
        except TypeError:
            if model is None or field not in target.model_mappings:
                raise
    raise_problems(list(dict.fromkeys(problems)))
    return parts


def refusals(launch: Launch, target: Target) -> list[str]:
    """Why a target cannot run a launch; empty where it can. What its options cannot hold, or could not be read from, is one."""
    stack = get_stack(target.stack)
    reasons = unsupported_choices(stack, launch.model, replace(launch.job, loss=None), launch.layout)
    reasons += [need.message(launch) for need in target.requirements if not need.holds(launch)]
    if reasons:
        return reasons
    try:
        return [
            text
            for part, text in lost_fields(target, launch, to_options(target, launch))
            if not part.startswith(LISTED_FIELDS)
        ]
    except InputError as error:
        return list(error.problems)


def lost_fields(target: Target, launch: Launch, options: Options) -> Iterator[tuple[str, str]]:
    """Parts of a launch that its options do not bring back."""
    model = None if target.includes_model else launch.model
    given = OptionReader(options, launch.machines, model=model)
    heard = launch_from_fields(from_options(target, given), launch.machines, model).fields()
    for part, value in launch.fields().items():
        own = heard.get(part)
        if own != value:
            yield (
                part,
                f"{part} is {_format_value(value)}, which {target.title} has no option for; there it is {_format_value(own)}",
            )


def _format_value(value: object) -> str:
    """A value as a sentence has it."""
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def choose_precision(launch: Launch, target: Target) -> Launch:
    """The launch in the precision recipe that a target takes for the plan's, where it has no words for that one: the nearest of
    those that multiply in the same format. Formats of gradients and of the optimizer's state are a framework's own choice."""
    if not refusals(launch, target):
        return launch
    own, optimizer = get_precision(launch.job.precision), get_optimizer(launch.job.optimizer)
    alike = [recipe for recipe in PRECISIONS.values() if recipe.matmul_format == own.matmul_format]
    for recipe in sorted(alike, key=partial(_precision_distance, own, optimizer)):
        other = replace(launch, job=replace(launch.job, precision=recipe.name))
        if not refusals(other, target):
            return other
    return launch


def _precision_distance(own: Precision, optimizer: Optimizer, other: Precision) -> tuple[float, int]:
    """How far a recipe is from a plan's: in bytes of state for a parameter, part by part, and then in choices that differ."""
    parts = zip(state_parts(own, optimizer), state_parts(other, optimizer), strict=True)
    choices = (getattr(own, one.name) != getattr(other, one.name) for one in fields(own))
    return sum(abs(ours - theirs) for ours, theirs in parts), sum(choices)


def use_target_stages(launch: Launch, target: Target) -> Launch:
    """A launch with its layers on the stages of a pipeline as the target deals them out, where it has no word for others."""
    try:
        stages = from_options(target, OptionReader(to_options(target, launch), launch.machines)).get("layout.stages")
        return launch if stages is None else replace(launch, layout=with_stages(launch.layout, launch.model, stages))
    except InputError:
        return launch
