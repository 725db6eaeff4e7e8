"""Verbs on mutated files and command lines: an answer or an error of a line, never a traceback, and never for long.

`python -m fuzzing.fuzz` runs thousands of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fuzzing.fuzz import fuzz

COUNT = 300


@pytest.mark.filterwarnings("ignore")
def test_no_mutated_input_ends_in_a_traceback(tmp_path: Path) -> None:
    outcomes = list(fuzz(tmp_path, 0, range(COUNT), complete=False))
    problems = [(outcome.case.number, outcome.case.words, outcome.problem) for outcome in outcomes if outcome.problem]
    assert problems == []
    assert len(outcomes) == COUNT
    codes = Counter(outcome.code for outcome in outcomes)
    assert codes[0] > COUNT / 20, "hardly any input is read to its end"
    assert codes[2] > COUNT / 4
