"""How the layout of a stored tensor is written: our dims in the order that it has them, with commas between its own dims.

    layout = group {"," group}        a dim of the tensor, of what stands in it, outer first
    group  = factor {" " factor}
    factor = part {"+" part}          one behind the other; the part in brackets is the parameter's own
    part   = letters | "1" | "{name}" our dims by their letters, a dim of size 1, or the number of a layer or an expert

A "~" behind a letter: the two halves of that dim lie interleaved in the tensor, as pairs (0, n/2), (1, n/2 + 1), ...
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

_PART = re.compile(r"(?:[A-Za-z]~?)+|1|\{\w+\}")
_LETTER = re.compile(r"([A-Za-z])(~?)")


class Letter(NamedTuple):
    """One of our dims, and whether its halves are interleaved."""

    dim: str
    interleaved: bool


class Factor(NamedTuple):
    """Parts one behind the other, each a product of dims, of which the parameter has the part `own`."""

    parts: tuple[tuple[Letter, ...], ...]
    own: int
    number: str  # what it counts ("layer", "expert"), or ""


Group = tuple[Factor, ...]


@cache
def parsed(layout: str) -> tuple[Group, ...]:
    """The groups of a layout. Raises `ValueError` for one that is not as above.

    >>> (rows,), columns = parsed("[F]+F, D")
    >>> rows.own, len(rows.parts), columns[0].parts
    (0, 2, ((Letter(dim='D', interleaved=False),),))
    """
    return tuple(tuple(_factor(word) for word in group.split()) for group in layout.split(","))


def _factor(word: str) -> Factor:
    parts = word.split("+")
    own = [number for number, part in enumerate(parts) if part.startswith("[") and part.endswith("]")]
    bare = [part.strip("[]") for part in parts]
    if len(own) != (len(parts) > 1) or not all(_PART.fullmatch(part) for part in bare):
        raise ValueError(f"found {word!r} in a layout; parts such as [GH]+H, of which one is in brackets, are required")
    number = bare[0][1:-1] if bare[0].startswith("{") else ""
    return Factor(tuple(() if number else _letters(part) for part in bare), own[0] if own else 0, number)


def _letters(part: str) -> tuple[Letter, ...]:
    return tuple(Letter(dim, bool(mark)) for dim, mark in _LETTER.findall(part))
