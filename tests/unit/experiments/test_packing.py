"""Packing: the first job that does not fit is delayed by none behind it."""

from __future__ import annotations

import itertools
import random

import pytest

from shardwise.measure.experiments.job_packing import PackedJob, choose_jobs


def job(name: str, size: int, seconds: float) -> PackedJob:
    return PackedJob(name=name, size=size, seconds=seconds)


@pytest.mark.parametrize(
    ("queue", "running", "capacity", "names"),
    [
        ([job("a", 4, 1), job("b", 4, 1), job("c", 1, 1)], [], 8, ["a", "b"]),
        ([job("a", 8, 1), job("b", 2, 4), job("c", 2, 9)], [job("r", 4, 5)], 8, ["b"]),
        ([job("a", 6, 1), job("b", 2, 99), job("c", 2, 99)], [job("r", 4, 5)], 8, ["b"]),
        ([job("a", 9, 1), job("b", 2, 1)], [], 8, ["b"]),  # a job that never fits blocks no other
        ([job("a", 99, 1), job("b", 99, 1)], [], None, ["a", "b"]),
        ([job("a", 1, 1)], [job("r", 8, 1)], 8, []),
    ],
)
def test_chosen_jobs_of_small_cases(
    queue: list[PackedJob], running: list[PackedJob], capacity: int | None, names: list[str]
) -> None:
    assert [chosen.name for chosen in choose_jobs(queue, running, capacity)] == names


def play(jobs: list[PackedJob], capacity: int) -> dict[str, float]:
    """Start times of jobs on a pool, second by second."""
    starts: dict[str, float] = {}
    for now in itertools.count():
        active = [
            job(planned.name, planned.size, starts[planned.name] + planned.seconds - now)
            for planned in jobs if planned.name in starts and starts[planned.name] + planned.seconds > now
        ]  # fmt: skip
        waiting = [planned for planned in jobs if planned.name not in starts]
        if not waiting:
            return starts
        for chosen in choose_jobs(waiting, active, capacity):
            starts[chosen.name] = float(now)
    return starts


@pytest.mark.parametrize("seed", range(20))
def test_all_jobs_run_within_the_pool_and_the_first_never_waits_for_later_jobs(seed: int) -> None:
    chance = random.Random(seed)
    jobs = [job(str(n), chance.randint(1, 8), chance.randint(1, 9)) for n in range(30)]
    starts = play(jobs, 8)
    for second in range(400):
        assert (
            sum(
                planned.size
                for planned in jobs
                if starts[planned.name] <= second < starts[planned.name] + planned.seconds
            )
            <= 8
        )
    # The first job that has to wait starts no sooner without the jobs behind it.
    prefix: list[PackedJob] = []
    for planned in jobs:
        prefix.append(planned)
        if play(prefix, 8)[planned.name] > 0:
            break
    assert starts[prefix[-1].name] == play(prefix, 8)[prefix[-1].name]
