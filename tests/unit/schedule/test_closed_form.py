"""Bubbles and micro-batches in flight."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.schedule.closed_form import (
    bubble_ratio,
    in_flight,
    in_flight_1f1b,
    in_flight_afab,
    in_flight_interleaved,
)


def test_bubble_is_idle_over_ideal_time() -> None:
    assert bubble_ratio(4, 8) == 3 / 8
    assert bubble_ratio(4, 8, 2) == 3 / 16
    assert bubble_ratio(1, 8) == 0


def test_1f1b_holds_as_many_micro_batches_as_stages_behind() -> None:
    assert [in_flight_1f1b(4, 100, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight_1f1b(8, 3, 0) == 3
    assert in_flight_afab(100) == 100


@pytest.mark.parametrize(("pp", "virtual"), [(8, 2), (4, 3), (16, 4)])
def test_interleaving_holds_more_on_the_first_stage(pp: int, virtual: int) -> None:
    """Korthikanti et al. 2022: 1 + (p - 1) / (p v) of 1F1B's memory."""
    ratio = in_flight_interleaved(pp, 10_000, virtual, 0) / in_flight_1f1b(pp, 10_000, 0)
    assert ratio == pytest.approx(1 + (pp - 1) / (pp * virtual))


def test_interleaving_8_stages_twice() -> None:
    assert in_flight_interleaved(8, 10_000, 2, 0) / in_flight_1f1b(8, 10_000, 0) == 1.4375


@pytest.mark.parametrize(
    ("pp", "micro_batches", "virtual", "stage", "held"),
    [(1, 5, 1, 0, 1), (4, 8, 1, 0, 4), (4, 8, 1, 3, 1), (4, 8, 2, 0, 5.5), (4, 4, 2, 0, 4), (4, 8, 2, 3, 2.5)],
)
def test_in_flight_by_schedule(pp: int, micro_batches: int, virtual: int, stage: int, held: float) -> None:
    assert in_flight(pp, micro_batches, virtual, stage) == held


def test_arrays_give_the_numbers_of_each() -> None:
    pp, m, v = np.array([1, 4, 4, 8]), np.array([5, 8, 4, 64]), np.array([1, 1, 2, 2])
    for stage in (0, 1):
        alone = [in_flight(int(a), int(b), int(c), stage) for a, b, c in zip(pp, m, v, strict=True)]
        assert in_flight(pp, m, v, stage).tolist() == alone
    assert bubble_ratio(pp, m, v).tolist() == [0, 3 / 8, 3 / 8, 7 / 128]
