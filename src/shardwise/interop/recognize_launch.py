"""Recognize the framework of a launch by its options, and say why the nearest one cannot read its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from shardwise.interop.frameworks.primus import target_of_experiment
from shardwise.interop.frameworks.targets import READERS
from shardwise.interop.launches.target import LaunchFiles, Target
from shardwise.interop.text_formats.option_tables import Options
from shardwise.values import InputError, argument_label

PLAIN_SCRIPT = "megatron"  # whose reader takes a script of any program with options
MIN_NAMES = 6  # of options in a file, below which it resembles no framework's


def read_options(target: Target, files: LaunchFiles, recipe: str | None) -> Options:
    """Return the options of files, or of one recipe in them. Raises `InputError` for a target whose files hold one launch."""
    if recipe is None:
        return target.read(files)
    if target.read_recipe is None:
        raise InputError(
            f"{argument_label('recipe')}: a launch of {target.title} has no recipes to choose from; leave it out"
        )
    return target.read_recipe(files, recipe)


def recognize_target(files: LaunchFiles, recipe: str | None = None) -> Target:
    """Return the target that knows most of the options of the files. Raises `InputError` if none knows any."""
    certain = next((target for target in READERS.values() if target.recognizes(files)), None)
    if certain is not None:
        return certain
    if (experiment := target_of_experiment(files)) is not None:
        return READERS[experiment]
    scores: dict[str, int] = {}
    problems: dict[str, tuple[str, ...]] = {}
    for name, target in READERS.items():
        if recipe is not None and target.read_recipe is None:
            continue
        try:
            options = read_options(target, files, recipe)
        except InputError as error:
            problems[name] = tuple(error.problems)
            continue
        scores[name] = sum(1 if option in target.options else -1 for option in options)
    best = max(scores, key=lambda name: scores[name], default=None)
    if best is None or scores[best] <= 0:
        raise InputError(
            f"read: found no launch that is known in {', '.join(files)}; one of {', '.join(READERS)} is required "
            "(--from names it)",
            *_nearest_problems(problems, files),
        )
    return READERS[best]


def _nearest_problems(problems: Mapping[str, Sequence[str]], files: LaunchFiles) -> Iterator[str]:
    """Yield why the target whose options' names occur most often in the files cannot read them."""
    text_names = {name for text in files.values() for name in re.findall(r"\w[\w-]*", text)}
    counts = {
        name: len(text_names & {option.rpartition(".")[2] for option in READERS[name].options}) for name in problems
    }
    # A launch that names a framework is one of it, however few of its options it has.
    named = [name for name in problems if name.lower() in {text_name.lower() for text_name in text_names}]
    nearest = max(named or counts, key=lambda name: counts[name], default=None)
    if nearest is not None and (named or counts[nearest] >= MIN_NAMES):
        yield from (f"as a launch of {READERS[nearest].title}: {problem}" for problem in problems[nearest])
    elif any(name.endswith(".sh") for name in files):
        yield from problems.get(PLAIN_SCRIPT, ())
