"""Examples of docstrings (`>>>`) as blocks of code: without this they would be quotations and links."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Puts a fence around each example."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object that is read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """A docstring whose examples are blocks of code."""
    return EXAMPLE.sub(lambda example: f"```pycon\n{example.group()}\n```", docstring)
