"""Bubbles and micro-batches in flight."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.pipeline.registry import NATURAL, SCHEDULES, get_schedule, natural_schedule, schedule_names
from shardwise.pipeline.schedule_definition import (
    PassSeconds,
    bubble_ratio,
    in_flight_1f1b,
    in_flight_afab,
    in_flight_interleaved,
)


def test_bubble_is_idle_over_ideal_time() -> None:
    assert bubble_ratio(4, 8) == 3 / 8
    assert bubble_ratio(4, 8, 2) == 3 / 16
    assert bubble_ratio(1, 8) == 0


def test_1f1b_keeps_a_micro_batch_in_flight_per_remaining_stage() -> None:
    assert [in_flight_1f1b(4, 100, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight_1f1b(8, 3, 0) == 3
    assert in_flight_afab(100) == 100


@pytest.mark.parametrize(("pp", "virtual"), [(8, 2), (4, 3), (16, 4)])
def test_interleaving_keeps_more_in_flight_on_the_first_stage(pp: int, virtual: int) -> None:
    """Korthikanti et al. 2022: 1 + (p - 1) / (p v) of 1F1B's memory."""
    ratio = in_flight_interleaved(pp, 10_000, virtual, 0) / in_flight_1f1b(pp, 10_000, 0)
    assert ratio == pytest.approx(1 + (pp - 1) / (pp * virtual))


def test_memory_of_8_stages_interleaved_twice() -> None:
    assert in_flight_interleaved(8, 10_000, 2, 0) / in_flight_1f1b(8, 10_000, 0) == 1.4375


@pytest.mark.parametrize(
    ("pp", "micro_batches", "virtual", "stage", "in_flight"),
    [(1, 5, 1, 0, 1), (4, 8, 1, 0, 4), (4, 8, 1, 3, 1), (4, 8, 2, 0, 5.5), (4, 4, 2, 0, 4), (4, 8, 2, 3, 2.5)],
)
def test_micro_batches_in_flight_by_schedule(
    pp: int, micro_batches: int, virtual: int, stage: int, in_flight: float
) -> None:
    assert get_schedule(natural_schedule(pp, virtual)).in_flight(pp, virtual, micro_batches, stage) == in_flight


def test_closed_forms_of_arrays_equal_those_of_numbers() -> None:
    pp, m, v = np.array([1, 4, 4, 8]), np.array([5, 8, 4, 64]), np.array([1, 1, 2, 2])
    natural = get_schedule(NATURAL)
    rows = [(int(a), int(b), int(c)) for a, b, c in zip(pp, m, v, strict=True)]
    schedules = [get_schedule(natural_schedule(a, c)) for a, _, c in rows]
    for stage in (0, 1):
        single = [schedule.in_flight(a, c, b, stage) for schedule, (a, b, c) in zip(schedules, rows, strict=True)]
        assert natural.in_flight(pp, v, m, stage).tolist() == single
    passes = PassSeconds(1.0, 2.0)
    assert natural.bubble_s(pp, v, m, passes).tolist() == [
        schedule.bubble_s(a, c, b, passes) for schedule, (a, b, c) in zip(schedules, rows, strict=True)
    ]
    counts, ranks = np.array([1, 3, 5, 7, 16]), np.full(5, 4)
    split = PassSeconds(1.0, 2.1, 0.7)
    for v_schedule in (get_schedule("zb_v"), get_schedule("interleaved_zb")):
        single = [v_schedule.bubble_s(4, 2, int(b), split) for b in counts]
        assert v_schedule.bubble_s(ranks, 2 * ranks // ranks, counts, split) * np.ones(5) == pytest.approx(single)
    assert natural.micro_batch_multiple(pp, v).tolist() == [
        schedule.micro_batch_multiple(a, c) for schedule, (a, _, c) in zip(schedules, rows, strict=True)
    ]
    assert bubble_ratio(pp, m, v).tolist() == [0, 3 / 8, 3 / 8, 7 / 128]


@pytest.mark.parametrize("pp", [1, 2, 7, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_exactly_one_schedule_is_natural_for_any_stages(pp: int, virtual: int) -> None:
    if pp == 1 and virtual > 1:
        return  # no layout has virtual stages without a pipeline
    names = [name for name, schedule in SCHEDULES.items() if schedule.natural and schedule.supports(pp, virtual)]
    assert names == [natural_schedule(pp, virtual)]
    assert all(not SCHEDULES[name].splits_backward and not SCHEDULES[name].bidirectional for name in names)


def test_every_name_stands_for_a_single_schedule() -> None:
    names = [name for schedule, values in SCHEDULES.items() for name in (schedule, *values.aliases)]
    assert len(names) == len(set(names))
    assert NATURAL not in schedule_names()
