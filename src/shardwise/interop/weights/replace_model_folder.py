"""Replace a model's files in its folder only when all of the new ones are written.

They are written into a hidden folder. A folder without one of the files, the mark, is not read as a model: the mark is removed
first and comes last, so that a process that is killed at any moment leaves no mixture of two models that could be read as one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.run.checkpoints.step_folders import sync_folder
from shardwise.values import InputError

DRAFT_FOLDER = ".model.writing"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The file without which a folder is not read as a model (`mark`), and the name pattern of all files of a model."""

    mark: str
    files: re.Pattern[str]


@contextmanager
def replace_model(folder: Path, model_files: ModelFiles) -> Iterator[Path]:
    """Yield a draft folder whose files replace the model in `folder` when the block ends, and are removed if it fails.

    Raises `InputError` if the folder cannot be written.
    """
    draft = folder / DRAFT_FOLDER
    try:
        if draft.exists():  # a writer was killed
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        try:
            yield draft
            _replace_files(draft, folder, model_files)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"model: cannot write to {folder}: {error.strerror}; a folder with room, and the permission to write in it, are "
            "required"
        ) from None


def _replace_files(draft: Path, folder: Path, model_files: ModelFiles) -> None:
    """Move the draft's files in place of the earlier model's; other files of the folder stay."""
    # Every step is synced before the next, so that a crash leaves the old model, the new one, or a folder without a mark.
    for inner in [draft, *(path for path in draft.rglob("*") if path.is_dir())]:
        sync_folder(inner)
    (folder / model_files.mark).unlink(missing_ok=True)
    sync_folder(folder)
    for old in [path for path in folder.iterdir() if model_files.files.fullmatch(path.name)]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for new in sorted(draft.iterdir(), key=lambda path: path.name == model_files.mark):
        sync_folder(folder)
        new.rename(folder / new.name)
    sync_folder(folder)
