"""The course prints what every rank holds; these are the values that the book prints, without the devices' names."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

COURSE = Path(__file__).parents[2] / "examples" / "collectives_course.py"
ZEROS, ONES, TWOS, THREES, SIXES = (f"tensor([{', '.join([f'{value}.'] * 5)}])" for value in (0, 1, 2, 3, 6))
COUNT = "tensor([1., 2., 3., 4., 5.])"
ALL = f"[{ONES}, {TWOS}, {THREES}]"

CLOCKED = ("Clock before barrier", "Clock past barrier")
EXPECTED = {
    "Before broadcast": [COUNT, ZEROS, ZEROS],
    "After broadcast": [COUNT] * 3,
    "Before reduce": [ONES, TWOS, THREES],
    "After reduce": [SIXES, TWOS, THREES],
    "Before all_reduce": [ONES, TWOS, THREES],
    "After all_reduce": [SIXES] * 3,
    "Before gather": [ONES, TWOS, THREES],
    "After gather": [ALL],
    "Before all_gather": [ONES, TWOS, THREES],
    "After all_gather": [ALL] * 3,
    "To scatter": [ALL],
    "Before scatter": [ZEROS] * 3,
    "After scatter": [ONES, TWOS, THREES],
    "Before reduce_scatter": [
        "[tensor([1., 2.]), tensor([1., 4.]), tensor([1., 8.])]",
        "[tensor([2., 4.]), tensor([4., 16.]), tensor([8., 64.])]",
        "[tensor([3., 6.]), tensor([9., 36.]), tensor([27., 216.])]",
    ],
    "After reduce_scatter": ["tensor([6., 12.])", "tensor([14., 56.])", "tensor([36., 288.])"],
    "Before all_to_all": ["tensor([0., 1., 2.])", "tensor([10., 11., 12.])", "tensor([20., 21., 22.])"],
    "After all_to_all": ["tensor([0., 10., 20.])", "tensor([1., 11., 21.])", "tensor([2., 12., 22.])"],
    "Sleep before barrier": ["0 s", "1 s", "2 s"],
    "Before ring all-reduce": [
        f"tensor([{', '.join(f'{rank * element}.' for element in range(1, 6))}])" for rank in range(1, 6)
    ],
    "After ring all-reduce": ["tensor([15., 30., 45., 60., 75.])"] * 5,
    # 5 ranks: 2(5 - 1) = 8 steps of one element each, 8/5 of an array of 5.
    "Sent in the ring": ["8 elements in 8 steps, 1.6 of the array"] * 5,
}


@cache
def run_verb() -> dict[str, list[str]]:
    """What the course prints, by moment, in the order of ranks; spaces that align numbers are dropped."""
    done = subprocess.run([sys.executable, str(COURSE)], capture_output=True, text=True, timeout=120, check=True)
    arrays: dict[str, list[str]] = {}
    for moment, rank, text in re.findall(r"^(.+) on rank (\d+): (.+)$", done.stdout, re.MULTILINE):
        assert int(rank) == len(arrays.setdefault(moment, []))
        arrays[moment].append(re.sub(r"([\[,]) +(?=\d)", r"\1", text).replace(",", ", ").replace(",  ", ", "))
    return arrays


@pytest.mark.parametrize("moment", EXPECTED)
def test_every_rank_holds_what_the_book_prints(moment: str) -> None:
    assert run_verb()[moment] == EXPECTED[moment]


def test_no_rank_passes_the_barrier_before_the_slowest_has_come() -> None:
    """On the clock that the processes of a host share."""
    came, passed = ([float(text.removesuffix(" s")) for text in run_verb()[moment]] for moment in CLOCKED)
    assert len(came) == len(passed) == 3
    assert max(came) <= min(passed)


def test_nothing_else_is_printed() -> None:
    assert set(run_verb()) == {*EXPECTED, *CLOCKED}
