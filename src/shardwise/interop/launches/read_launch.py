"""The launch of a framework, read: its model, job and layout, and what of it was not understood. Nothing of it is run."""

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
from shardwise.interop.launches.target import LaunchFiles, OptionReader, Options, Target
from shardwise.interop.launches.translate_launch import from_options
from shardwise.model.architecture import Architecture
from shardwise.model.load import load_model, model_names
from shardwise.values.errors import InputError, raise_problems

# Parts that every launch has, and the options of `shardwise read` that say them where its files do not.
USER_FIELDS: Mapping[str, str] = {
    "job.seq_len": "--seq-len", "job.global_batch_seqs": "--batch-seqs", "layout.micro_batch_seqs": "--micro-batch-seqs",
}  # fmt: skip
MAX_FILE_BYTES = 4_000_000  # of a file: far above any launch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedLaunch:
    """What a launch says. `unknown`: options that its release does not have; `unread`: those that no plan depends on; `notes`:
    what is priced as something else."""

    target: Target
    options: Options
    launch: Launch
    unknown: tuple[str, ...]
    unread: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_files(paths: list[str]) -> LaunchFiles:
    """Texts of files by name. Raises `InputError` for what cannot be read."""
    found: dict[str, str] = {}
    for path in map(Path, paths):
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InputError(
                    f"read: {path} has {path.stat().st_size:,} bytes; a launch of at most {MAX_FILE_BYTES:,} is required"
                )
            found[path.name] = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"read: cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"read: {path} is not text: {error}") from None
    return found


def parse_launch(
    files: LaunchFiles, machines: Machines, *, target: str | None = None, model: Architecture | None = None,
    beside: LaunchFields | None = None,
) -> ParsedLaunch:  # fmt: skip
    """A launch from its files. The target is the one that knows most of the options, unless it is named.

    `beside` are fields that the files may leave out (`USER_FIELDS`). Raises `InputError` where no target knows any option, and
    where what they say is no launch.
    """
    chosen = get_target(target) if target else recognize_target(files)
    options = chosen.read(files)
    if not any(name in chosen.options for name in options):
        raise InputError(
            f"read: found no option of {chosen.title} {chosen.version} in {', '.join(files)}; its launch is required"
        )
    model = model or chosen.find_model(options)
    if model is None and not chosen.includes_model:
        raise InputError(f"read: a launch of {chosen.title} does not say its model; give --model")
    known, given = chosen.options, OptionReader(options, machines, beside, model, chosen.value_problem)
    differing = tuple(process_count_notes(files, machines))
    try:
        parts = _with_user_fields(from_options(chosen, given, model), given.user_fields, chosen)
        launch = _build_launch(parts, machines, model)
    except InputError as error:
        raise InputError(*error.problems, *differing) from None
    except (TypeError, AttributeError, KeyError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"read: {chosen.title} with options that are missing or of another type: {error}") from None
    return ParsedLaunch(
        target=chosen, options=options, launch=launch,
        unknown=tuple(name for name in options if name not in known),
        unread=tuple(name for name in given.unread_names() if name in known),
        notes=(*given.notes, *_vocabulary_note(parts, launch, model), *differing),
    )  # fmt: skip


def _vocabulary_note(parts: LaunchFields, launch: Launch, model: Architecture | None) -> Iterator[str]:
    """A note that the model is that of the catalogue with the same sizes, where the launch does not say its vocabulary."""
    if model is None and _lacks_vocabulary(parts):
        yield (
            f"the launch says no vocabulary, which its tokenizer decides: taken to be {launch.model.name}, whose other sizes are "
            f"the same, with {launch.model.vocab_size:,} tokens; --model says another"
        )


def _lacks_vocabulary(parts: LaunchFields) -> bool:
    return parts.get("model.vocab_size") is None


def _with_user_fields(parts: LaunchFields, beside: LaunchFields, target: Target) -> dict[str, Any]:
    """What was read, with the values given beside it. Raises `InputError` where they differ, and for values that are missing."""
    problems = [
        f"{USER_FIELDS[part]}: found {value}, and the launch says {parts[part]}; leave it out"
        for part, value in beside.items() if parts.get(part, value) != value
    ]  # fmt: skip
    found = {**beside, **parts}
    problems += [
        f"read: the files of {target.title} say no {part.partition('.')[2]}; give the script that starts it too, or {option}"
        for part, option in USER_FIELDS.items() if part not in found
    ]  # fmt: skip
    raise_problems(problems)
    return found


def recognize_target(files: LaunchFiles) -> Target:
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


def _build_launch(parts: Mapping[str, Any], machines: Machines, model: Architecture | None) -> Launch:
    """A launch of its parts, with the model of the catalogue that its sizes are those of; numerics among
    the parts take precedence over the catalogue's.

    Where only the tokenizer knows the vocabulary, a model of the catalogue with all the other sizes says it. Raises `InputError`
    where there is none.
    """
    if model is not None:
        return launch_from_fields(parts, machines, model)
    unknown = _lacks_vocabulary(parts)
    launch = launch_from_fields({**parts, "model.vocab_size": 1} if unknown else parts, machines)
    found = find_catalog_model(launch.model, but=("vocab_size",) if unknown else ())
    if unknown and found is launch.model:
        raise InputError(
            "the vocabulary is missing, as the tokenizer decides it; --model is required, a name or a config.json"
        )
    return replace(launch, model=with_numerics(found, parts))


def find_catalog_model(model: Architecture, but: Sequence[str] = ()) -> Architecture:
    """The model of the catalogue with the same sizes (`but` for some), or the model as it is."""
    sizes = _priced_fields(model, but)
    return next((known for known in map(load_model, model_names()) if _priced_fields(known, but) == sizes), model)


def _priced_fields(model: Architecture, but: Sequence[str]) -> dict[str, Any]:
    """What of a model decides its costs; rows of learned positions are weights."""
    unsaid = {*COSTLESS_FIELDS, *but} - ({"max_positions"} if model.structure.has_learned_positions else set())
    return {name: value for name, value in asdict(model).items() if name not in unsaid}
