"""Ticks are round numbers, as many as fit."""

from __future__ import annotations

from shardwise.present.charts.axis_ticks import even_ticks, log_ticks, padded_range, tick_sets
from shardwise.present.charts.chart import Axis


def test_ticks_are_round_numbers() -> None:
    assert log_ticks(1.0, 100.0) == (1, 2, 5, 10, 20, 50, 100)
    assert log_ticks(0.1, 1e4) == (0.1, 1, 10, 100, 1e3, 1e4)
    assert log_ticks(0.05, 0.5) == (0.05, 0.1, 0.2, 0.5)
    assert even_ticks(156e9) == tuple(i * 20e9 for i in range(8))
    assert even_ticks(80e9) == tuple(i * 10e9 for i in range(9))


def test_ticks_are_even_in_a_range_that_does_not_start_at_zero() -> None:
    assert even_ticks(44.0, 5, low=43.0) == (43.0, 43.2, 43.400000000000006, 43.6, 43.800000000000004, 44.0)
    assert even_ticks(10.0, 4, low=-6.0) == (-5.0, 0.0, 5.0, 10.0)


def test_narrower_plots_have_fewer_ticks() -> None:
    near, far = tick_sets(6.0, 80.0, 8, log=True), tick_sets(1e3, 1e9, 8, log=True)
    assert near[0] == (10, 20, 50)
    assert tuple(10.0**power for power in range(3, 10)) in far
    assert tick_sets(6e4, 8e7, 8, log=True)[-1] == (1e5, 1e6, 1e7)
    assert tick_sets(61.0, 69.0, 8, log=True)[0] == tuple(range(61, 70))  # within a decade
    for sets in (near, far, tick_sets(0.0, 7.0, 8, log=False)):
        assert all(len(ticks) > 1 for ticks in sets)
    texts = Axis(unit="s", log=True).fitted([0.2, 30.0]).tick_sets()
    assert [text for _, text in texts[0]] == ["200 ms", "500 ms", "1 s", "2 s", "5 s", "10 s", "20 s", "50 s"]
    assert [text for _, text in texts[-1]] == ["1 s", "10 s"]
    assert len({len(ticks) for ticks in texts}) == len(texts)
    assert Axis(ends=(0.0, 1.0), ticks=()).tick_sets() == ()


def test_a_range_has_room_at_both_ends() -> None:
    low, high = padded_range([10.0, 1000.0], log=True)
    assert low < 10.0
    assert high > 1000.0
    assert padded_range([5.0]) == (4.7, 5.3)
