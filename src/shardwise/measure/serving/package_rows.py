"""Rows of the package's own tables of serving measurements."""

from __future__ import annotations

import csv
import io
from importlib import resources


def read_package_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of one of the package's tables by column.

    >>> read_package_rows("batch_rows.csv")[0]["model"]
    'bloom-176b'
    """
    text = resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))
