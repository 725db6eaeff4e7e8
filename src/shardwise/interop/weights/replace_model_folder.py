"""A model's files in its folder: under their names when all of them are written, and not before.

They are written into a hidden folder. A folder without one of them, the mark, is not read as a model: the mark goes first and
comes last, so that a process that is killed at any moment leaves no mixture of two models that could be read as one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.run.checkpoints.step_folders import sync_folder
from shardwise.values.errors import InputError

DRAFT_FOLDER = ".model.writing"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The file without which a folder is not read as a model, and what the others are called (folders among them)."""

    mark: str
    files: re.Pattern[str]


@contextmanager
def replace_model(folder: Path, publication: ModelFiles) -> Iterator[Path]:
    """A folder whose files take the place of the model in `folder` when the block ends, and are gone when it fails.

    Raises `InputError` where it cannot be written.
    """
    part = folder / DRAFT_FOLDER
    try:
        if part.exists():  # of a writer that was killed
            shutil.rmtree(part)
        part.mkdir(parents=True)
        try:
            yield part
            _replace_files(part, folder, publication)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"model: cannot write to {folder}: {error.strerror}; a folder with room, and the permission to write in it, are "
            "required"
        ) from None


def _replace_files(part: Path, folder: Path, publication: ModelFiles) -> None:
    """Files that are on the disk in place of those of the model before; other files of the folder stay as they are."""
    for inner in [part, *(path for path in part.rglob("*") if path.is_dir())]:
        sync_folder(inner)
    (folder / publication.mark).unlink(missing_ok=True)
    sync_folder(folder)
    for old in [path for path in folder.iterdir() if publication.files.fullmatch(path.name)]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for new in sorted(part.iterdir(), key=lambda path: path.name == publication.mark):
        sync_folder(folder)
        new.rename(folder / new.name)
    sync_folder(folder)
