"""Translate a launch to the options of a target and back, and find what gets lost on the way.

`refusals` lists why a target cannot run a launch: what its stack or the target itself excludes, and every field that writing and
reading back does not restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

from shardwise.hardware.stacks import stack_named
from shardwise.interop.launches.launch import Launch, launch_from, with_stages
from shardwise.interop.launches.target import Given, Options, Target
from shardwise.layout.rules.stack_abilities import lacking
from shardwise.model.architecture import Architecture
from shardwise.model.optimizer_state import state_parts
from shardwise.model.optimizers.definition import Optimizer
from shardwise.model.optimizers.registry import optimizer_named
from shardwise.values.errors import InputError, require
from shardwise.values.precision import PRECISIONS, Precision, precision_named

# Parts that a run has with or without a target's word for them: said where they cannot be, and no reason to refuse.
LISTED = ("job.loss", "job.tokens", "job.document_tokens", "numerics.")


def say(target: Target, launch: Launch) -> dict[str, Any]:
    """The options of a launch, in the order of the target's fields. Raises `InputError` for one that its release lacks."""
    options: dict[str, Any] = {}
    for field in (*target.model_fields, *target.fields):
        options |= field.say(launch)
    problems = target.problems(options)
    if problems:
        raise InputError(*problems)
    return options


def hear(target: Target, given: Given, model: Architecture | None = None) -> dict[str, Any]:
    """The parts of a launch that options say, by dotted name. With a `model`, options that describe one count for nothing."""
    parts: dict[str, Any] = {}
    problems: list[str] = []
    for field in (*target.model_fields, *target.fields):
        try:
            parts |= field.hear(given)
        except InputError as error:
            problems += () if model and field in target.model_fields else error.problems
        except TypeError:
            if model is None or field not in target.model_fields:
                raise
    require(list(dict.fromkeys(problems)))
    return parts


def refusals(launch: Launch, target: Target) -> list[str]:
    """Why a target cannot run a launch; empty where it can. What its options cannot hold, or could not be read from, is one."""
    stack = stack_named(target.stack)
    reasons = lacking(stack, launch.model, replace(launch.job, loss=None), launch.layout)
    reasons += [need.says(launch) for need in target.needs if not need.holds(launch)]
    if reasons:
        return reasons
    try:
        return [text for part, text in unsaid(target, launch, say(target, launch)) if not part.startswith(LISTED)]
    except InputError as error:
        return list(error.problems)


def unsaid(target: Target, launch: Launch, options: Options) -> Iterator[tuple[str, str]]:
    """Parts of a launch that its options do not bring back."""
    model = None if target.says_model else launch.model
    given = Given(options, launch.machines, model=model)
    heard = launch_from(hear(target, given), launch.machines, model).parts()
    for part, value in launch.parts().items():
        own = heard.get(part)
        if own != value:
            yield (
                part,
                f"{part} is {_shown(value)}, which {target.title} has no option for; there it is {_shown(own)}",
            )


def _shown(value: object) -> str:
    """A value as a sentence has it."""
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def in_own_precision(launch: Launch, target: Target) -> Launch:
    """The launch in the precision recipe that a target takes for the plan's, where it has no words for that one: the nearest of
    those that multiply in the same format. Formats of gradients and of the optimizer's state are a framework's own choice."""
    if not refusals(launch, target):
        return launch
    own, optimizer = precision_named(launch.job.precision), optimizer_named(launch.job.optimizer)
    alike = [recipe for recipe in PRECISIONS.values() if recipe.product_format == own.product_format]
    for recipe in sorted(alike, key=partial(_distance, own, optimizer)):
        other = replace(launch, job=replace(launch.job, precision=recipe.name))
        if not refusals(other, target):
            return other
    return launch


def _distance(own: Precision, optimizer: Optimizer, other: Precision) -> tuple[float, int]:
    """How far a recipe is from a plan's: in bytes of state for a parameter, part by part, and then in choices that differ."""
    parts = zip(state_parts(own, optimizer), state_parts(other, optimizer), strict=True)
    choices = (getattr(own, one.name) != getattr(other, one.name) for one in fields(own))
    return sum(abs(ours - theirs) for ours, theirs in parts), sum(choices)


def as_taken(launch: Launch, target: Target) -> Launch:
    """A launch with its layers on the stages of a pipeline as the target deals them out, where it has no word for others."""
    try:
        stages = hear(target, Given(say(target, launch), launch.machines)).get("layout.stages")
        return launch if stages is None else replace(launch, layout=with_stages(launch.layout, launch.model, stages))
    except InputError:
        return launch
