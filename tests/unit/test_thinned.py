"""The selection of similar cases that the suite runs."""

from __future__ import annotations

import pytest
import thinned
from thinned import covering, drawn, part_of


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("number", [1, 6, 20])
def test_exactly_one_of_each_consecutive_step_is_drawn(number: int, step: int) -> None:
    selected = drawn(number, step, seed="a test")
    blocks = [set(range(first, min(first + step, number))) for first in range(0, number, step)]
    assert [len(selected & block) for block in blocks] == [1] * len(blocks)
    assert selected == drawn(number, step, seed="a test")


def test_every_value_of_a_factor_keeps_cases() -> None:
    """Every second case of a product with a factor of two values would always have the same value."""
    assert {case % 2 for case in drawn(40, 2, seed="a test")} == {0, 1}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("number", range(9))
def test_cases_not_drawn_are_marked_for_the_matrix(number: int, request: pytest.FixtureRequest) -> None:
    """Also in a run of all cases."""
    name = request.node.nodeid.partition("[")[0]
    is_single = len([item for item in request.session.items if item.nodeid.startswith(f"{name}[")]) == 1
    selected = drawn(9, 3, seed=name)
    assert is_single or (number not in selected) == ("matrix" in {mark.name for mark in request.node.iter_markers()})


def test_a_share_of_the_cases_covers_every_subject() -> None:
    subjects = [{f"page {number % 7}", f"verb {number % 5}"} for number in range(60)]
    selected = covering(subjects, 1 / 3)
    assert len(selected) == 20
    assert set().union(*(subjects[number] for number in selected)) == set().union(*subjects)
    assert covering(subjects, 1 / 3) == selected


def test_every_subject_is_covered_even_beyond_the_share() -> None:
    assert covering([{"a"}, {"b"}, {"c"}, set()], 0.25) == {0, 1, 2}


def test_the_suite_compares_a_part_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinned, "is_suite", True)
    assert list(part_of(range(7))) == [0, 3, 6]
    assert list(part_of(range(7), 4)) == [0, 4]
    monkeypatch.setattr(thinned, "is_suite", False)
    assert list(part_of(range(7))) == list(range(7))
