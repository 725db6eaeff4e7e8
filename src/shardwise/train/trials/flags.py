"""What the flags of runs that are made side by side say."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from shardwise.errors import require
from shardwise.search.sweep.values import parse_sweep


def require_given(arguments: argparse.Namespace, required: Mapping[str, str]) -> None:
    """Raise `InputError` that names every flag that is missing; `required` has what each of them takes."""
    missing = [name for name in required if not getattr(arguments, name)]
    require([f"--{name.replace('_', '-')}: found none; {required[name]}, is required" for name in missing])


def batches_of(text: str) -> tuple[int, ...]:
    """The batches in tokens that `--batches` names, in the order given. Raises `InputError`.

    >>> batches_of("1Ki:4Ki:x2"), batches_of("512,4Ki")
    ((1024, 2048, 4096), (512, 4096))
    """
    return tuple(int(value) for value in parse_sweep(f"batch={text}", "--batches").values)
