"""1F1B: as many forward passes as stages follow, then one forward and one backward pass in turn.

Sources: Narayanan et al. 2019, PipeDream, and 2021, section 2.2.1 ("PipeDream-Flush"); S1, "One forward, one backward".
"""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.closed_form import in_flight_1f1b, in_flight_interleaved
from shardwise.schedule.form import Passes, Schedule, alone
from shardwise.schedule.rounds import one_then_one
from shardwise.symbolic import Value, where


def actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Stage i runs p - i forward passes ahead."""
    order = one_then_one(p, m, ahead=range(p, 0, -1))
    return ActionList(name="1f1b", order=order, placement=loop(p, v), num_micro_batches=m)


def whole_passes_s(p: Value, v: Value, m: Value, passes: Passes) -> Value:
    """Seconds that a stage waits where backward passes are whole: for p - 1 virtual stages, forward and backward.

    Assumes stages and micro-batches that take alike, and messages that take nothing; where they do not the played list is right.
    """
    return (passes.forward_s + passes.backward_s) * ((p - 1) / v)


def in_flight(p: Value, v: Value, m: Value, stage: Value) -> Value:
    """Of 1F1B, interleaved where there are virtual stages; 1 without a pipeline."""
    return where(v > 1, in_flight_interleaved(p, m, v, stage), in_flight_1f1b(p, m, stage))


SCHEDULE = Schedule(
    goes_with=alone, actions=actions, natural=True, bubble_s=whole_passes_s, bubble="(p - 1) · (F + B) / v",
    in_flight=in_flight, aliases=("pipedream_flush", "one_forward_one_backward"),
)  # fmt: skip
