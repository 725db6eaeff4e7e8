"""Write files atomically: a reader has the old content or the new one, and an error names the path."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json_atomic(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a file whole: whoever reads it has the old one or the new one."""
    write_text_atomic(path, json.dumps(payload, indent=2) + "\n")


@contextmanager
def name_path_in_errors(place: Path) -> Iterator[None]:
    """Around what writes in a place: an `OSError` that says not where, such as that of a full disk, names it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(place)) from None


def write_text_atomic(path: Path, text: str) -> None:
    """Put a file in place of one that is there, whole; where that fails the old one stays, and nothing else."""
    whole = path.with_name(f"{path.name}.new")
    try:
        with name_path_in_errors(path):
            whole.write_text(text, encoding="utf-8")
            os.replace(whole, path)
    except OSError:
        whole.unlink(missing_ok=True)
        raise
