"""Record a step of a run: the timeline of each rank, and the offset of its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.records import RankTrace, StepRecord
from shardwise.run.faults.agreement import RankGroup, all_gather_ints
from shardwise.run.trainer.timeline_recorder import TimelineRecorder
from shardwise.run.trainer.training_engine import TrainingEngine

ROUNDS = 8  # exchanges of clocks, of which the closest bounds hold


@contextmanager
def record_step(engine: TrainingEngine) -> Iterator[TimelineRecorder]:
    """Record what an engine does within the context."""
    recorder = TimelineRecorder(engine.world.device, dict(engine.instance.units))
    engine.set_recorder(recorder)
    try:
        yield recorder
    finally:
        engine.set_recorder(None)


def profiled_step(engine: TrainingEngine, step: Callable[[], StepRecord]) -> tuple[StepRecord, RankTrace]:
    """Run the next step and record it."""
    world = engine.world
    offset_ns, error_ns = clock_offset(world)
    with record_step(engine) as recorder:
        record = step()
        end = recorder.timer.now()
    return record, RankTrace(
        rank=world.rank, step=record.step, device=world.device.type, coordinate=dict(world.coordinate),
        begin_ns=recorder.timer.origin.host_ns, step_ns=end.host_ns - recorder.timer.origin.host_ns,
        offset_ns=offset_ns, error_ns=error_ns, events=recorder.events(),
    )  # fmt: skip


def clock_offset(world: RankGroup) -> tuple[int, int]:
    """Return by how many nanoseconds this rank's clock is ahead of the first rank's, and the error bound.

    No rank leaves an exchange of all ranks before every rank has arrived. With a and d the times of arrival and
    departure on a rank's own clock, a_first + offset <= d_this and a_this - offset <= d_first: so a_this - d_first <=
    offset <= d_this - a_first for every exchange (as in Cristian's algorithm for one message there and back). F.
    Cristian, Probabilistic clock synchronization, 1989.
    """
    arrivals, departures = [], []
    for _ in range(ROUNDS):
        arrivals.append(time.perf_counter_ns())
        all_gather_ints(world, [world.rank], "the comparison of clocks")
        departures.append(time.perf_counter_ns())
    times = all_gather_ints(world, [*arrivals, *departures], "the comparison of clocks")
    if world.rank == 0:
        return 0, 0
    first_arrivals, first_departures = times[0][:ROUNDS], times[0][ROUNDS:]
    lowest = max(mine - its for mine, its in zip(arrivals, first_departures, strict=True))
    highest = min(mine - its for mine, its in zip(departures, first_arrivals, strict=True))
    return (lowest + highest) // 2, (highest - lowest) // 2
