"""The launch of a framework, read: its model, job and layout, and what of it nobody understood. Nothing of it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import InputError, require
from shardwise.export.exporting import hear
from shardwise.export.field import Given, Options
from shardwise.export.launch import Launch, Machines, launch_from
from shardwise.export.target import Files, Target
from shardwise.export.targets import TARGETS, target_named
from shardwise.model.architecture import Architecture
from shardwise.model.load import load_model, model_names

MOST_BYTES = 4_000_000  # of a file: far above any launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a launch says. `unknown`: options that its release does not have; `unread`: those that no plan depends on."""

    target: Target
    options: Options
    launch: Launch
    unknown: tuple[str, ...]
    unread: tuple[str, ...]


def read_files(paths: list[str]) -> Files:
    """Texts of files by name. Raises `InputError` for what cannot be read."""
    found: dict[str, str] = {}
    for path in map(Path, paths):
        try:
            if path.stat().st_size > MOST_BYTES:
                raise InputError(
                    f"read: {path} has {path.stat().st_size:,} bytes; a launch of at most {MOST_BYTES:,} is required"
                )
            found[path.name] = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"read: cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"read: {path} is no text: {error}") from None
    return found


def read(files: Files, machines: Machines, *, target: str | None = None, model: Architecture | None = None) -> Heard:
    """A launch from its files. The target is the one that knows most of the options, unless it is named.

    Raises `InputError` where no target knows any, and where what they say is no launch.
    """
    chosen = target_named(target) if target else recognised(files)
    options = chosen.read(files)
    known, given = chosen.options, Given(options, machines)
    try:
        launch = launch_from(hear(chosen, given), machines, model)
    except InputError as error:
        raise InputError(*_mistyped(chosen, given), *error.problems) from None
    except (TypeError, AttributeError, KeyError, ValueError, ZeroDivisionError) as error:
        usual = f"read: {chosen.title} with options that are missing or of another type: {error}"
        raise InputError(*(_mistyped(chosen, given) or [usual])) from None
    require(_mistyped(chosen, given))
    return Heard(
        target=chosen, options=options, launch=replace(launch, model=model or catalogued(launch.model)),
        unknown=tuple(name for name in options if name not in known),
        unread=tuple(name for name in given.unheard() if name in known),
    )  # fmt: skip


def _mistyped(target: Target, given: Given) -> list[str]:
    """What is wrong with options that were asked for and have a value of another type than their release says."""
    asked = {name: value for name, value in given.options.items() if name in given.heard and name in target.options}
    return target.problems(asked)


def recognised(files: Files) -> Target:
    """The target that knows most of the options of some files. Raises `InputError` where none knows one."""
    scores: dict[str, int] = {}
    reasons: list[str] = []
    for name, target in TARGETS.items():
        try:
            options = target.read(files)
        except InputError as error:
            reasons += error.problems
            continue
        scores[name] = sum(1 if option in target.options else -1 for option in options)
    best = max(scores, key=lambda name: scores[name], default=None)
    if best is None or scores[best] <= 0:
        raise InputError(
            f"read: found no launch that is known in {', '.join(files)}; one of {', '.join(TARGETS)} is required",
            *dict.fromkeys(reasons),
        )
    return TARGETS[best]


def catalogued(model: Architecture) -> Architecture:
    """The model of the catalogue with the same sizes, or the model as it is."""
    sizes = _sizes(model)
    for name in model_names():
        known = load_model(name)
        if _sizes(known) == sizes:
            return known
    return model


def _sizes(model: Architecture) -> Mapping[str, object] | Architecture:
    """What of a model decides its costs."""
    return (
        replace(model, name="", source="", nominal_num_params=None, numerics=type(model.numerics)(), max_positions=None)
        if model.positions != "learned"
        else replace(model, name="", source="", nominal_num_params=None, numerics=type(model.numerics)())
    )
