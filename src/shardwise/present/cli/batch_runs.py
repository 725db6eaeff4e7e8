"""The flags of the kinds of `shardwise batch` that train: several runs side by side, with batches of their own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from shardwise.values import InputError

FLAGS: Mapping[str, Mapping[str, Any]] = {
    "--batches": {"metavar": "RANGE", "help": "tokens of the batches, such as 4Ki:256Ki:x2 or 4Ki,16Ki,64Ki"},
    "--data": {
        "action": "append", "default": [], "metavar": "DIR[=WEIGHT]",
        "help": "token shards, as `train` takes them (default of branch: those of the run)",
    },
    "--out": {"metavar": "DIR", "help": "the folder of these runs; those that are in it go on"},
    "--processes": {"metavar": "N", "help": "runs side by side (default: as many as the host has cores for)"},
}  # fmt: skip


def require_torch(verb: str) -> None:
    """Raise `InputError` where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"{verb}: PyTorch is not installed; pip install shardwise[train]")


def say(text: str) -> None:
    """Show a line of progress."""
    print(text, file=sys.stderr, flush=True)
