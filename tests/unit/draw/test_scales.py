"""Ticks: round numbers, as many as there is room for."""

from __future__ import annotations

from shardwise.present.charts.axis_ticks import even_ticks, log_ticks


def test_ticks() -> None:
    assert log_ticks(1.0, 100.0) == (1, 2, 5, 10, 20, 50, 100)
    assert log_ticks(0.1, 1e4) == (0.1, 1, 10, 100, 1e3, 1e4)
    assert log_ticks(0.05, 0.5) == (0.05, 0.1, 0.2, 0.5)
    assert even_ticks(156e9) == tuple(i * 20e9 for i in range(8))
    assert even_ticks(80e9) == tuple(i * 10e9 for i in range(9))
