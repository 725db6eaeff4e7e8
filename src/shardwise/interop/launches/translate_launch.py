"""Translate a launch to the options of a target and back, and find what gets lost.

`refusals` lists why a target cannot run a launch: what its stack or the target itself excludes, and every field that writing
and reading back does not restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from shardwise.hardware import get_stack
from shardwise.interop.launches.launch import Launch, launch_from_fields, with_stages
from shardwise.interop.launches.target import OptionReader, Target
from shardwise.interop.text_formats.option_tables import Options
from shardwise.layout import unsupported_choices
from shardwise.model import Architecture, get_optimizer
from shardwise.model.optimizer_program import precision_distance
from shardwise.values import PRECISIONS, InputError, get_precision, raise_problems

# Fields that every run has, even if no option is written for them: listed as not expressible, but no reason to refuse.
UNREAD_FIELD = "numerics.unread"  # settings of a model's config that no field here has
LISTED_FIELDS = ("job.loss", "job.tokens", "job.document_tokens", "numerics.")


def to_options(target: Target, launch: Launch) -> dict[str, Any]:
    """Return a launch's options, in the order of the target's mappings. Raises `InputError` for one that its release lacks."""
    options: dict[str, Any] = {}
    for mapping in (*target.model_mappings, *target.mappings):
        options |= mapping.to_options(launch)
    problems = target.problems(options)
    if problems:
        raise InputError(*problems)
    return options


def from_options(target: Target, reader: OptionReader, model: Architecture | None = None) -> dict[str, Any]:
    """Return the fields of a launch that options set, by dotted name. With a `model`, options that describe one are ignored."""
    launch_fields: dict[str, Any] = {}
    problems: list[str] = []
    for mapping in (*target.model_mappings, *target.mappings):
        try:
            launch_fields |= mapping.from_options(reader)
        except InputError as error:
            problems += () if model and mapping in target.model_mappings else error.problems
        except TypeError:
            if model is None or mapping not in target.model_mappings:
                raise
    raise_problems(list(dict.fromkeys(problems)))
    return launch_fields


def refusals(launch: Launch, target: Target) -> list[str]:
    """List why a target cannot run a launch: abilities, requirements, and fields that its options cannot hold or restore."""
    stack = get_stack(target.stack)
    reasons = unsupported_choices(stack, launch.model, replace(launch.job, loss=None), launch.layout)
    reasons += [requirement.message(launch) for requirement in target.requirements if not requirement.holds(launch)]
    if reasons:
        return reasons
    # Writing a launch, reading it back and comparing is the only test of what a target can express: no table lists that.
    try:
        lost = lost_fields(target, launch, to_options(target, launch))
        return [text for field, text in lost if not field.startswith(LISTED_FIELDS)]
    except InputError as error:
        return list(error.problems)


def model_refusals(launch: Launch, target: Target) -> list[str]:
    """List why a target cannot run the model of a launch, whatever its layout."""
    reasons = [need.message(launch) for need in target.requirements if need.reads_model and not need.holds(launch)]
    if reasons:
        return reasons
    try:
        lost = lost_fields(target, launch, to_options(target, launch))
        return [text for field, text in lost if field.startswith("model.")]
    except InputError as error:
        return list(error.problems)


def lost_fields(target: Target, launch: Launch, options: Options) -> Iterator[tuple[str, str]]:
    """Yield each field that writing and reading back does not restore, with a sentence about it."""
    model = None if target.includes_model else launch.model
    reader = OptionReader(options, launch.machines, model=model)
    restored_fields = launch_from_fields(from_options(target, reader), launch.machines, model).fields()
    for field, original in launch.fields().items():
        restored = restored_fields.get(field)
        if field == UNREAD_FIELD and original:
            yield field, f"the model's config sets {', '.join(original)}, which is not known here and not written"
        elif restored != original:
            text = f"{field} is {_format_value(original)}, which no option written for {target.title} says"
            yield field, f"{text}; there it is {_format_value(restored)}"


def _format_value(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def choose_precision(launch: Launch, target: Target) -> Launch:
    """Return the launch in the precision that the target runs: the plan's, or the nearest that multiplies in the same format.

    Dtypes of gradients and of the optimizer's state are the framework's own choice. The launch is returned unchanged if none
    works.
    """
    if not refusals(launch, target):
        return launch
    planned, optimizer = get_precision(launch.job.precision), get_optimizer(launch.job.optimizer)
    # Frameworks combine a matmul format with gradient and state dtypes of their own, so every recipe with that format is tried.
    candidates = [recipe for recipe in PRECISIONS.values() if recipe.matmul_format == planned.matmul_format]
    for recipe in sorted(candidates, key=partial(precision_distance, planned, optimizer)):
        candidate = replace(launch, job=replace(launch.job, precision=recipe.name))
        if not refusals(candidate, target):
            return candidate
    return launch


def use_target_stages(launch: Launch, target: Target) -> Launch:
    """Return the launch with its layers split over the stages as the target splits them, if it can express no other split."""
    # Without stages of its own in the options, reading them back gives the target's default split.
    try:
        stages = from_options(target, OptionReader(to_options(target, launch), launch.machines)).get("layout.stages")
        return launch if stages is None else replace(launch, layout=with_stages(launch.layout, launch.model, stages))
    except InputError:
        return launch
