"""Write files atomically, with errors that name the path; check beforehand that a file can be written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.values.errors import InputError


def write_json_atomic(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a payload as JSON, so that readers see either the old file or the new one."""
    write_text_atomic(path, json.dumps(payload, indent=2) + "\n")


@contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an `OSError` that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file by a new text, so that readers see either the old file or the new one; a failure leaves the old one."""
    new_file = path.with_name(f"{path.name}.new")
    try:
        with name_path_in_errors(path):
            new_file.write_text(text, encoding="utf-8")
            os.replace(new_file, path)
    except OSError:
        new_file.unlink(missing_ok=True)
        raise


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
