"""Interleaved 1F1B whose virtual stages take all micro-batches in one turn: the other end of `interleaved`'s `round_size`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.schedule import interleaved
from shardwise.schedule.action import ActionList
from shardwise.schedule.form import Schedule, several
from shardwise.schedule.one_f_one_b import whole_passes_s
from shardwise.symbolic import minimum


def actions(
    p: int, m: int, v: int, durations: Any = None, memory_limit: float | None = None, *, round_size: int | None = None
) -> ActionList:  # fmt: skip
    """Interleaved 1F1B with a round of m micro-batches; see `interleaved.actions`."""
    found = interleaved.actions(p, m, v, round_size=m if round_size is None else round_size)
    return replace(found, name="interleaved_breadth_first")


SCHEDULE = Schedule(
    goes_with=several, actions=actions, takes_round_size=True, fewest=lambda p, v: p, bubble_s=whole_passes_s,
    bubble="((p - 1) / v + u) · (F + B)",
    in_flight=lambda p, v, m, stage: minimum(m, ((v - 1) * m + 2 * (p - 1 - stage) + 1) / v), aliases=("breadth_first",),
)  # fmt: skip
