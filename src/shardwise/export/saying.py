"""A launch as a target's options, a target's options as a launch, and why a target would not run one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.cluster.stacks import stack_named
from shardwise.errors import InputError, require
from shardwise.export.field import Given, Options
from shardwise.export.launch import Launch, launch_from
from shardwise.export.target import Target
from shardwise.model.architecture import Architecture
from shardwise.planning.abilities import lacking

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
