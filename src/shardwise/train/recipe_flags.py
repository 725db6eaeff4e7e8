"""The recipe of a run, as its flags say it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch.ramp import parse_ramp
from shardwise.batch.schedule import parse_schedule
from shardwise.changes import convert, parse_changes, replaced
from shardwise.errors import InputError, collect
from shardwise.measurement.folder import RunFolder
from shardwise.optimizer.table import optimizer_fields
from shardwise.train.policy import POLICIES
from shardwise.train.recipe import Recipe, parse_recipe
from shardwise.train.sources import Source, parse_source, require_distinct
from shardwise.units import parse_count, parse_quantity

BATCH_RAMP = "--set recipe.batch_ramp"
MEASURED_EVERY = 10  # steps, where batches follow the noise scale: as many measurements for each decision


def recipe_of(arguments: argparse.Namespace, out: RunFolder, *, resume: bool) -> Recipe:
    """The recipe that flags give; of a run that goes on, what they leave out is as its folder has it. Raises `InputError`."""
    given, changes = collect(
        lambda: _given(arguments) | _policies(arguments.policy),
        lambda: parse_changes(arguments.set, rooms=("recipe",))["recipe"],
    )
    given |= {"batch_ramp": parse_ramp(changes.pop("batch_ramp"), BATCH_RAMP)} if "batch_ramp" in changes else {}
    if given.get("batch_schedule", "").startswith("noise") and "noise_scale_every" not in given:
        given["noise_scale_every"] = MEASURED_EVERY
    if resume:
        return replace(changed(parse_recipe(out.read().recipe, str(out.recipe)), changes), **given)
    if "steps" not in given:
        raise InputError("--steps: found none; the length of the run is required, such as --steps 200")
    return changed(Recipe(**given), changes)


def changed(recipe: Recipe, changes: Mapping[str, str]) -> Recipe:
    """The recipe with values of its own and of the optimizer's fields replaced by what their texts say."""
    fields = optimizer_fields()
    made: Recipe = replaced(recipe, changes, "recipe", fields)
    values = {name: convert(text, 0.0, f"--set recipe.{name}") for name, text in changes.items() if name in fields}
    return replace(made, optimizer={**recipe.optimizer, **values})


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of the recipe that flags of their own give."""
    parsers = {
        "data": (arguments.data, _sources),
        "steps": (arguments.steps, lambda text: parse_count(text, what="--steps")),
        "learning_rate": (arguments.learning_rate, lambda text: parse_quantity(text, what="--learning-rate", unit="")),
        "schedule": (arguments.schedule, str),
        "warmup_steps": (arguments.warmup, lambda text: whole(text, "--warmup")),
        "decay_steps": (arguments.decay, lambda text: whole(text, "--decay")),
        "seed": (arguments.seed, lambda text: whole(text, "--seed")),
        "to_loss": (arguments.to_loss, lambda text: parse_quantity(text, what="--to-loss", unit="")),
        "batch_schedule": (arguments.batch_schedule, _checked_schedule),
        "batch_lr": (arguments.batch_lr, str),
        "clip_norm": (
            arguments.clip,
            lambda text: None if text.strip() == "none" else parse_quantity(text, what="--clip", unit=""),
        ),
        "reduction": (arguments.reduce, str),
        "initial": (getattr(arguments, "from"), lambda text: str(Path(text).resolve())),
        "noise_scale_every": (arguments.noise_scale_every, lambda text: whole(text, "--noise-scale-every")),
        "validate_every": (arguments.validate_every, lambda text: whole(text, "--validate-every")),
        "checkpoint_every": (arguments.checkpoint_every, lambda text: whole(text, "--checkpoint-every")),
        "keep_checkpoints": (arguments.keep_last, lambda text: parse_count(text, what="--keep-last")),
        "keep_every": (arguments.keep_every, lambda text: whole(text, "--keep-every")),
        "compile": (arguments.compile or None, bool),
    }
    given = {name: (text, make) for name, (text, make) in parsers.items() if text is not None}
    made = collect(*((lambda make=make, text=text: make(text)) for text, make in given.values()))
    return dict(zip(given, made, strict=True))


def _checked_schedule(text: str) -> str:
    """A schedule's text that can be read; what it leaves open follows from the plan."""
    parse_schedule(text)
    return text.strip()


def _sources(texts: Sequence[str]) -> tuple[Source, ...]:
    sources = tuple(collect(*(partial(parse_source, text) for text in texts)))
    require_distinct(sources)
    return sources


def _policies(texts: Sequence[str]) -> dict[str, Any]:
    """What each policy does: "loss-spike=rewind"."""
    found = {}
    for text in texts:
        name, equals, action = text.partition("=")
        field = name.strip().replace("-", "_")
        if not equals or field not in POLICIES:
            names = ", ".join(one.replace("_", "-") for one in POLICIES)
            raise InputError(f"--policy: found {text!r}; NAME=ACTION is required, with one of {names}")
        found[field] = action.strip()
    return found


def whole(text: str, what: str) -> int:
    """A whole number of at least 0. Raises `InputError` for other text."""
    if text.strip().startswith("-"):
        raise InputError(f"{what}: found {text!r}; a whole number of at least 0 is required")
    return 0 if text.strip() == "0" else parse_count(text, what=what)
