"""The parts of each figure: panels, categories, and marks of each kind with their contents.

PYTHONPATH=tests python -m unit.books.test_contents    # print `contents.toml` again after figures have changed"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.present.charts.chart import Cells, Mark, Panel, Points, Spans, StackedBars
from shardwise.present.figures.figures_page import FIGURES

CONTENTS = Path(__file__).with_name("contents.toml")
NAMES = [name for name in FIGURES if name != "best-layouts"]  # that plans every model on every number of nodes


def count_members(mark: Mark) -> int:
    match mark:
        case Points():
            return len(mark.points)
        case Cells():
            return len(mark.cells)
        case Spans():
            return len(mark.spans)
        case StackedBars():
            return sum(map(len, mark.bars))
        case _:
            return 1


def describe(panel: Panel) -> str:
    counts: Counter[str] = Counter()
    for mark in panel.marks:
        counts[type(mark).__name__] += count_members(mark)
    categories = [f"{axis} {len(getattr(panel, axis).categories)}" for axis in "xy" if getattr(panel, axis).categories]
    return ", ".join([*categories, *(f"{kind} {count}" for kind, count in sorted(counts.items()))])


def contents(name: str) -> list[str]:
    """A line for each panel, of all charts of a figure."""
    return [describe(panel) for chart in FIGURES[name].charts() for panel in chart.panels]


@pytest.mark.parametrize("name", NAMES)
def test_figures_have_the_listed_parts(name: str) -> None:
    assert contents(name) == tomllib.loads(CONTENTS.read_text(encoding="utf-8"))[name]


def lines() -> Iterator[str]:
    for name in NAMES:
        yield f'"{name}" = ['
        yield from (f"  {json.dumps(line)}," for line in contents(name))
        yield "]"


if __name__ == "__main__":
    print(*lines(), sep="\n")
