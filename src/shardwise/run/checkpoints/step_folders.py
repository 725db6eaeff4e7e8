"""The folders of a run's checkpoints: `step-00000200` is complete, a name that begins with a dot is not.

A checkpoint is written into a hidden folder and renamed when every rank has written; one that is removed is hidden
first. So a process that is killed at any moment leaves complete checkpoints, and litter that the next save removes. The
exception is a checkpoint that another one of its step replaces: it counts under its hidden name too, as long as there
is no other. A checkpoint that is damaged when a run goes on is kept as `step-00000200.damaged`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from shardwise.run.checkpoints.manifest import MANIFEST
from shardwise.values.input_texts import parse_integer

STEP_FOLDER = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
HIDDEN_FOLDER = re.compile(r"\.step-\d{8,}\.(writing|replaced|removed)")


def latest(folder: str | Path) -> Path | None:
    """Return the complete checkpoint of the highest step in `folder`, if there is any."""
    complete = list_complete(Path(folder))
    return complete[max(complete)] if complete else None


def list_newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Return every checkpoint, with its step, that is complete or once was."""
    checkpoints = dict(list_complete(folder))
    for path in folder.iterdir() if folder.is_dir() else ():
        match = STEP_FOLDER.fullmatch(path.name)
        if match and match[1] and path.is_dir():
            checkpoints.setdefault(parse_integer(match[1]), path)
    return sorted(checkpoints.items(), reverse=True)


def list_complete(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a folder by their step."""
    if not folder.is_dir():
        return {}
    # sorted: hidden folders come first, so that a named one of the same step wins
    matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
    return {int(match[1] or match[2]): path for match, path in matches if match and (path / MANIFEST).is_file()}


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def draft_folder(folder: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of a step is written before it is complete."""
    return _hidden_path(step_folder(folder, step), "writing")


def create_draft(folder: Path, step: int) -> None:
    """Remove the litter of killed writers, and create the draft's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in list_complete(folder).items():
        if path != step_folder(folder, number):
            path.rename(step_folder(folder, number))
    _remove_hidden(folder)
    draft_folder(folder, step).mkdir()


class Retention(NamedTuple):
    """Checkpoints to keep: the `keep` newest, and those whose step is a multiple of `keep_every` (0: no others)."""

    keep: int
    keep_every: int


def publish_draft(folder: Path, step: int, retention: Retention) -> None:
    """Give the draft of a step its final name, in place of an older one of that step, and remove old checkpoints."""
    # A kill at any point leaves a complete checkpoint: the old one is hidden, the draft flushed before its rename, the rename
    # flushed before anything is removed. Removal renames first, as rmtree is not atomic.
    target = step_folder(folder, step)
    if target.exists():
        target.rename(_hidden_path(target, "replaced"))
    sync_folder(draft_folder(folder, step))
    draft_folder(folder, step).rename(target)
    sync_folder(folder)
    complete = list_complete(folder)
    for old_step in sorted(complete)[: -retention.keep]:
        is_kept = retention.keep_every and old_step % retention.keep_every == 0
        # The new one stays even if it is not among the newest: a run may go on from before later checkpoints.
        if old_step != step and not is_kept:
            complete[old_step].rename(_hidden_path(complete[old_step], "removed"))
    _remove_hidden(folder)


def remove_draft(folder: Path, step: int) -> None:
    """Remove the draft of a step to free its space."""
    shutil.rmtree(draft_folder(folder, step), ignore_errors=True)


def set_damaged_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `step-N.damaged` and return its new path."""
    damaged_path = path.with_name(f"{path.name.lstrip('.').partition('.')[0]}.damaged")
    if damaged_path.exists():
        shutil.rmtree(damaged_path)
    return path.rename(damaged_path)


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to disk, as fsync(2) requires besides the files' own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_hidden(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if HIDDEN_FOLDER.fullmatch(path.name):
            shutil.rmtree(path)


def _hidden_path(path: Path, reason: str) -> Path:
    return path.with_name(f".{path.name}.{reason}")
