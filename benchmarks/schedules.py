"""How long it takes to build, check and play the action lists of large pipelines.

    python benchmarks/schedules.py [STAGES MICRO_BATCHES]     # default: 64 1024

Prints the actions and the seconds of each schedule, best of three, on one core in plain Python. The automatic scheduler
is timed on a pipeline that it is meant for, 8 stages and 64 micro-batches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from shardwise.pipeline.clock import check_actions
from shardwise.pipeline.registry import build_actions
from shardwise.pipeline.timeline import play_actions

Result = TypeVar("Result")
NAMES = ("afab", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe", "dualpipe_v")
REPEATS = 3


def timed(function: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of the fastest of some runs, and what it gives."""
    best = None
    for _ in range(REPEATS):
        begin = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - begin
        best = (seconds, result) if best is None or seconds < best[0] else best
    assert best is not None
    return best


def row(name: str, p: int, m: int) -> str:
    """What one schedule takes."""
    building, actions = timed(lambda: build_actions(name, p, m))
    playing, line = timed(lambda: play_actions(actions))
    checking, _ = timed(lambda: check_actions(actions))
    count = sum(len(slot) for slots in actions.order for slot in slots)
    return f"{name:<14}{p:>5} x {m:<6}{count:>9,}{building:>9.2f}{playing:>8.2f}{checking:>8.2f}{line.bubble:>9.2%}"


if __name__ == "__main__":
    stages, micro_batches = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (64, 1024)
    print(f"{'schedule':<14}{'sizes':>12}{'actions':>11}{'build s':>9}{'play s':>8}{'check s':>8}{'bubble':>9}")
    for name in NAMES:
        print(row(name, stages, micro_batches), flush=True)
    print(row("zb_auto", 8, 64))
