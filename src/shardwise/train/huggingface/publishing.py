"""The files of a model of `transformers` in its folder: under their names when all of them are written, and not before.

They are written into a hidden folder. Without config.json nobody reads a folder as a model: it goes first and comes last, so that
a process that is killed at any moment leaves no mixture of two models that could be read as one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.train.checkpoint.folders import sync

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
DRAFT = ".model.writing"


def file_of(number: int, count: int) -> str:
    """The name of the file of that number, from 1, of so many."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """A folder whose files take the place of the model in `folder` when the block ends, and are gone when it fails."""
    part = folder / DRAFT
    if part.exists():  # of a writer that was killed
        shutil.rmtree(part)
    part.mkdir(parents=True)
    try:
        yield part
        _publish(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _publish(part: Path, folder: Path) -> None:
    """Files that are on the disk in place of those of the model before; other files of the folder stay as they are."""
    sync(part)
    (folder / CONFIG).unlink(missing_ok=True)
    sync(folder)
    for old in [path for path in folder.iterdir() if WEIGHTS.fullmatch(path.name)]:
        old.unlink()
    for new in sorted(part.iterdir(), key=lambda path: path.name == CONFIG):
        sync(folder)
        new.rename(folder / new.name)
    sync(folder)
