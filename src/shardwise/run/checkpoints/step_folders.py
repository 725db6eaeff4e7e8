"""Where the checkpoints of a run lie: `step-00000200` is complete, what begins with a dot is not.

A checkpoint is written into a hidden folder and renamed when every rank has written; one that is removed is hidden first.
So a process that is killed at any moment leaves what was complete, and litter that the next save removes. Only one that is
being replaced by another of its step counts under its hidden name too, as long as there is no other. One that is found damaged
when a run goes on is kept as `step-00000200.damaged`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from shardwise.run.checkpoints.manifest import MANIFEST

STEP = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
HIDDEN = re.compile(r"\.step-\d{8,}\.(writing|replaced|removed)")


def latest(folder: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, if there is any."""
    found = complete(Path(folder))
    return found[max(found)] if found else None


def newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Every checkpoint that a folder once had whole, with its step: those that are complete, and those that were."""
    found = dict(complete(folder))
    for path in folder.iterdir() if folder.is_dir() else ():
        match = STEP.fullmatch(path.name)
        if match and match[1] and path.is_dir():
            found.setdefault(int(match[1]), path)
    return sorted(found.items(), reverse=True)


def complete(folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a folder by their step."""
    if not folder.is_dir():
        return {}
    named = [(STEP.fullmatch(path.name), path) for path in sorted(folder.iterdir())]  # hidden ones first: they give way
    return {int(match[1] or match[2]): path for match, path in named if match and (path / MANIFEST).is_file()}


def place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def draft(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is complete."""
    return _hidden(place(folder, step), "writing")


def begin(folder: Path, step: int) -> None:
    """Remove the litter of writers that were killed, and make the draft's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in complete(folder).items():
        if path != place(folder, number):
            path.rename(place(folder, number))
    _remove_hidden(folder)
    draft(folder, step).mkdir()


def publish(folder: Path, step: int, keep: int, keep_every: int = 0) -> None:
    """Give the draft of a step its name, in place of an older one of that step, and leave the `keep` newest and those whose step
    is a multiple of `keep_every` (0: no others)."""
    target = place(folder, step)
    if target.exists():
        target.rename(_hidden(target, "replaced"))
    sync(draft(folder, step))
    draft(folder, step).rename(target)
    sync(folder)
    found = complete(folder)
    for old in sorted(found)[:-keep]:
        is_kept = keep_every and old % keep_every == 0
        if (
            old != step and not is_kept
        ):  # what was written just now stays, though there may be later ones of a run taken up before them
            found[old].rename(_hidden(found[old], "removed"))
    _remove_hidden(folder)


def give_up(folder: Path, step: int) -> None:
    """Remove the draft of a step, which takes room."""
    shutil.rmtree(draft(folder, step), ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Where a damaged checkpoint is kept from now on."""
    kept = path.with_name(f"{path.name.lstrip('.').partition('.')[0]}.damaged")
    if kept.exists():
        shutil.rmtree(kept)
    return path.rename(kept)


def sync(folder: Path) -> None:
    """Until the names in `folder` are on its disk, as fsync(2) requires beside the files' own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_hidden(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if HIDDEN.fullmatch(path.name):
            shutil.rmtree(path)


def _hidden(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}")
