"""Check that a file can be written, before there is anything to write."""

import os
from pathlib import Path

from shardwise.values.errors import InputError


def require_writable(path: str | Path) -> None:
    """Raise `InputError` if a file cannot be written. Creates nothing."""
    target = Path(path)
    folder = target.parent
    problem = (
        "no such folder" if not folder.is_dir()
        else "it is a folder" if target.is_dir()
        else "" if os.access(target if target.exists() else folder, os.W_OK)
        else "permission denied"
    )  # fmt: skip
    if problem:
        raise InputError(f"cannot write {target}: {problem}; choose a writable path")
