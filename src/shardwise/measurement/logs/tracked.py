"""The files that a tracker of experiments keeps in a folder."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import InputError
from shardwise.measurement.logs.datastore import SUFFIX
from shardwise.measurement.logs.events import NAMED

PATTERNS = (f"*{NAMED}*", f"*{SUFFIX}")  # of TensorBoard, of W&B


def tracked_files(folder: Path) -> list[Path]:
    """The event files of a run, in the order of their names, which is that of their beginnings; without any those of W&B.

    Raises `InputError` for a folder without any, and for one of several runs.
    """
    each = (sorted(path for path in folder.rglob(pattern) if path.is_file()) for pattern in PATTERNS)
    found = next((files for files in each if files), [])
    if not found:
        raise InputError(
            f"log: {folder} is a folder without log.jsonl, event files or files of W&B; the folder of a run is required"
        )
    folders = sorted({path.parent for path in found})
    if len(folders) > 1:
        named = ", ".join(map(str, folders[:3])) + (", ..." if len(folders) > 3 else "")
        raise InputError(
            f"log: {folder} has the files of runs in {len(folders)} folders ({named}); one of them is required"
        )
    return found
