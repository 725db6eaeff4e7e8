"""The parser of every command line, the verbs' and that of a rank of a run."""

from __future__ import annotations

import argparse
from typing import Any


class Parser(argparse.ArgumentParser):
    """A parser to which an empty text is no value: it is not taken for an argument that was left out."""

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As argparse has it; what takes a value takes one that is not empty, but for a layout: it has every default."""
        if settings.get("action", "store") in ("store", "append"):
            settings.setdefault("type", not_empty)
        return super().add_argument(*names, **settings)


def not_empty(text: str) -> str:
    """The text. Raises `ArgumentTypeError`, to which argparse adds the argument's name, for one of blanks alone."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"found {text!r}; a value is required")
    return text
