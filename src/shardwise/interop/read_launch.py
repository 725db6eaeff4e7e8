"""Read the launch of a framework: its model, job and layout, and which options were not understood. Nothing of it is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.interop.frameworks.targets import TARGETS, get_target
from shardwise.interop.launches.launch import (
    COSTLESS_FIELDS,
    Launch,
    LaunchFields,
    Machines,
    launch_from_fields,
    with_numerics,
)
from shardwise.interop.launches.launch_scripts import process_count_notes
from shardwise.interop.launches.target import LaunchFiles, OptionReader, Target
from shardwise.interop.launches.translate_launch import from_options
from shardwise.interop.text_formats.option_tables import Options
from shardwise.model import Architecture, load_model, model_names
from shardwise.values import InputError, raise_problems

# Fields that every launch has, and the options of `shardwise read` that give them if the files do not.
USER_FIELDS: Mapping[str, str] = {
    "job.seq_len": "--seq-len", "job.global_batch_seqs": "--batch-seqs", "layout.micro_batch_seqs": "--micro-batch-seqs",
}  # fmt: skip
MAX_FILE_BYTES = 4_000_000  # far above any launch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedLaunch:
    """A launch as its files say it.

    `unknown` are options that the release does not have, `unread` those that no plan depends on, and `notes` say what is
    priced as something else.
    """

    target: Target
    options: Options
    launch: Launch
    unknown: tuple[str, ...]
    unread: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_files(paths: list[str]) -> LaunchFiles:
    """Return the texts of files by name. Raises `InputError` if one cannot be read."""
    texts: dict[str, str] = {}
    for path in map(Path, paths):
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InputError(
                    f"read: {path} has {path.stat().st_size:,} bytes; a launch of at most {MAX_FILE_BYTES:,} is required"
                )
            texts[path.name] = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"read: cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"read: {path} is not text: {error}") from None
    return texts


def parse_launch(
    files: LaunchFiles, machines: Machines, *, target: str | None = None, model: Architecture | None = None,
    user_fields: LaunchFields | None = None,
) -> ParsedLaunch:  # fmt: skip
    """Read a launch from its files. Unless named, the target is the one that knows most of the options.

    `user_fields` are fields that the files may leave out (`USER_FIELDS`). Raises `InputError` if no target knows an option, or if
    the options make no valid launch.
    """
    framework = get_target(target) if target else recognize_target(files)
    options = framework.read(files)
    if not any(name in framework.options for name in options):
        raise InputError(
            f"read: found no option of {framework.title} {framework.version} in {', '.join(files)}; its launch is required"
        )
    model = model or framework.find_model(options)
    if model is None and not framework.includes_model:
        raise InputError(f"read: a launch of {framework.title} does not say its model; give --model")
    release_options, reader = (
        framework.options,
        OptionReader(options, machines, user_fields, model, framework.value_problem),
    )
    process_notes = tuple(process_count_notes(files, machines))
    try:
        launch_fields = _with_user_fields(from_options(framework, reader, model), reader.user_fields, framework)
        launch = _build_launch(launch_fields, machines, model)
    except InputError as error:
        raise InputError(*error.problems, *process_notes) from None
    except (TypeError, AttributeError, KeyError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"read: {framework.title} with options that are missing or of another type: {error}") from None
    return ParsedLaunch(
        target=framework, options=options, launch=launch,
        unknown=tuple(name for name in options if name not in release_options),
        unread=tuple(name for name in reader.unread_names() if name in release_options),
        notes=(*reader.notes, *_vocabulary_note(launch_fields, launch, model), *process_notes),
    )  # fmt: skip


def _vocabulary_note(launch_fields: LaunchFields, launch: Launch, model: Architecture | None) -> Iterator[str]:
    """Yield a note if the vocabulary was taken from the catalogue's model with the same sizes."""
    if model is None and _lacks_vocabulary(launch_fields):
        yield (
            f"the launch says no vocabulary, which its tokenizer decides: taken to be {launch.model.name}, whose other sizes are "
            f"the same, with {launch.model.vocab_size:,} tokens; --model says another"
        )


def _lacks_vocabulary(launch_fields: LaunchFields) -> bool:
    return launch_fields.get("model.vocab_size") is None


def _with_user_fields(launch_fields: LaunchFields, user_fields: LaunchFields, target: Target) -> dict[str, Any]:
    """Return the fields that were read and those that the user gave. Raises `InputError` if some differ or are missing."""
    problems = [
        f"{USER_FIELDS[field]}: found {value}, and the launch says {launch_fields[field]}; leave it out"
        for field, value in user_fields.items() if launch_fields.get(field, value) != value
    ]  # fmt: skip
    combined = {**user_fields, **launch_fields}
    problems += [
        f"read: the files of {target.title} say no {field.partition('.')[2]}; give the script that starts it too, or {option}"
        for field, option in USER_FIELDS.items() if field not in combined
    ]  # fmt: skip
    raise_problems(problems)
    return combined


def recognize_target(files: LaunchFiles) -> Target:
    """Return the target that knows most of the options of the files. Raises `InputError` if none knows any."""
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


def _build_launch(launch_fields: Mapping[str, Any], machines: Machines, model: Architecture | None) -> Launch:
    """Build the launch, with the catalogue's model of the same sizes, if any, but the numerics that were read.

    If only the tokenizer knows the vocabulary, it is taken from the catalogue's model with all the other sizes. Raises
    `InputError` if there is none.
    """
    if model is not None:
        return launch_from_fields(launch_fields, machines, model)
    lacks_vocabulary = _lacks_vocabulary(launch_fields)
    complete = {**launch_fields, "model.vocab_size": 1} if lacks_vocabulary else launch_fields
    launch = launch_from_fields(complete, machines)
    catalog_model = find_catalog_model(launch.model, ignored=("vocab_size",) if lacks_vocabulary else ())
    if lacks_vocabulary and catalog_model is launch.model:
        raise InputError(
            "the vocabulary is missing, as the tokenizer decides it; --model is required, a name or a config.json"
        )
    return replace(launch, model=with_numerics(catalog_model, launch_fields))


def find_catalog_model(model: Architecture, ignored: Sequence[str] = ()) -> Architecture:
    """Return the catalogue's model with the same sizes (apart from the `ignored` fields), or the given model."""
    sizes = _priced_fields(model, ignored)
    catalog = map(load_model, model_names())
    return next((candidate for candidate in catalog if _priced_fields(candidate, ignored) == sizes), model)


def _priced_fields(model: Architecture, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the model's fields that affect its costs. Learned positions do: their rows are weights."""
    excluded = {*COSTLESS_FIELDS, *ignored} - ({"max_positions"} if model.structure.has_learned_positions else set())
    return {name: value for name, value in asdict(model).items() if name not in excluded}
