"""Write files atomically: a reader has the old content or the new one, and an error names the path."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
