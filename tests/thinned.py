"""Of many cases that are alike the suite runs a part; `make matrix` runs the others."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int) -> list[Any]:
    """One of each `step` cases that follow one another as it is; the others are marked to be run by `make matrix`.

    Which one is drawn, the same in each run: taking each `step`-th of a product would leave out whole values of a factor.
    """
    drawn = random.Random(0)
    listed, kept = list(cases), set()
    for first in range(0, len(listed), step):
        kept.add(first + drawn.randrange(min(step, len(listed) - first)))
    return [
        case if number in kept else pytest.param(*_values(case), marks=pytest.mark.matrix)
        for number, case in enumerate(listed)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)
