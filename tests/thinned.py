"""Of many cases that are alike the suite runs a part; `make matrix` runs the others.

`@pytest.mark.thinned(3)` on a test: of each three of its cases that follow one another one is run as it is, and the others are
marked `matrix`. Which one is drawn, the same in each run: taking each third of a product would leave out whole values of a
factor. A case that is named on the command line by itself is run. Of the rows that one case compares, `part_of` gives the suite a
third.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

Row = TypeVar("Row")
is_suite = True  # `make matrix` asks for the cases that are marked


def part_of(rows: Sequence[Row], step: int = 3) -> Sequence[Row]:
    """One of each `step` rows in the suite, all in `make matrix`."""
    return rows[::step] if is_suite else rows


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that `make matrix` is to run."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for function, listed in cases.items():
        mark = listed[0].get_closest_marker("thinned")
        kept = drawn(len(listed), *mark.args, seed=function) if mark else range(len(listed))
        for item in (item for number, item in enumerate(listed) if number not in kept):
            item.add_marker("matrix")


def covering(subjects: Sequence[set[str]], share: float) -> set[int]:
    """A share of all cases by number, drawn, of which each subject of any case occurs in one at least."""
    order = random.Random(0).sample(range(len(subjects)), len(subjects))
    covered, kept = set[str](), list[int]()
    for number in order:
        if not subjects[number] <= covered:
            covered |= subjects[number]
            kept.append(number)
    remaining = [number for number in order if number not in kept]
    return {*kept, *remaining[: max(round(share * len(subjects)) - len(kept), 0)]}


def drawn(number: int, step: int, *, seed: str) -> set[int]:
    """One of each `step` numbers below `number` that follow one another."""
    of = random.Random(seed)
    return {first + of.randrange(min(step, number - first)) for first in range(0, number, step)}
