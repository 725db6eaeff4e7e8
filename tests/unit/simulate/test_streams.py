"""Lists of work on streams, by hand."""

from __future__ import annotations

import pytest

from shardwise.pipeline.actions import FORWARD, FULL_BACKWARD
from shardwise.price.simulation.streams import (
    StartTransfer,
    StreamTimeline,
    TimedInstruction,
    TimedKernel,
    Transfer,
    WaitTransfer,
    play_streams,
    start_transfer,
)
from shardwise.step.instructions import COMPUTE


def kernel(seconds: float, unit: str = "block", phase: str = "forward") -> TimedKernel:
    return TimedKernel(seconds=seconds, unit=unit, phase=phase, name="contract y")


def transfer(seconds: float, axis: str = "tp") -> Transfer:
    return Transfer(seconds=seconds, axis=axis, unit="block", name="all_gather x")


def times(found: StreamTimeline, stream: str) -> list[tuple[float, float]]:
    return [(one.start, one.end) for one in found.events if one.stream == stream]


def test_kernels_come_one_after_the_other() -> None:
    found = play_streams([[kernel(1.0), kernel(2.0, phase="backward")]])
    assert (found.seconds, found.exposed) == (3.0, {})
    assert found.computed == {"forward": 1.0, "backward": 2.0}


def test_a_wait_behind_its_start_exposes_all_of_it() -> None:
    one = transfer(3.0)
    found = play_streams([[kernel(1.0), start_transfer(one), WaitTransfer(one), kernel(2.0)]])
    assert (found.seconds, found.exposed) == (6.0, {"tp": 3.0})


def test_a_transfer_is_hidden_where_compute_is_as_long() -> None:
    one = transfer(3.0)
    found = play_streams([[start_transfer(one), kernel(3.0), WaitTransfer(one), kernel(2.0)]])
    assert (found.seconds, found.exposed) == (5.0, {})
    assert times(found, "tp") == [(0.0, 3.0)]


def test_what_is_left_is_exposed() -> None:
    one = transfer(3.0)
    found = play_streams([[start_transfer(one), kernel(1.0), WaitTransfer(one), kernel(2.0)]])
    assert (found.seconds, found.exposed) == (5.0, {"tp": 2.0})


def test_a_stream_takes_one_at_a_time_and_two_streams_two() -> None:
    first, second, third = transfer(2.0), transfer(2.0), transfer(3.0, "fsdp")
    found = play_streams(
        [
            [
                start_transfer(first),
                start_transfer(second),
                start_transfer(third),
                WaitTransfer(second),
                WaitTransfer(third),
                kernel(1.0),
            ]
        ]
    )
    assert times(found, "tp") == [(0.0, 2.0), (2.0, 4.0)]
    assert times(found, "fsdp") == [(0.0, 3.0)]
    assert (found.seconds, found.exposed) == (5.0, {"tp": 4.0})


def test_each_wait_is_charged_to_its_own_axis() -> None:
    first, second = transfer(2.0), transfer(5.0, "fsdp")
    found = play_streams(
        [
            [
                start_transfer(first),
                start_transfer(second),
                kernel(1.0),
                WaitTransfer(first),
                WaitTransfer(second),
                kernel(1.0),
            ]
        ]
    )
    assert (found.seconds, found.exposed) == (6.0, {"tp": 1.0, "fsdp": 3.0})


def test_a_wait_at_the_end_counts() -> None:
    one = transfer(4.0, "dp")
    found = play_streams([[start_transfer(one), kernel(1.0), WaitTransfer(one)]])
    assert (found.seconds, found.exposed) == (4.0, {"dp": 3.0})


def test_what_nobody_waits_for_is_left() -> None:
    one = transfer(4.0, "dp")
    found = play_streams([[kernel(1.0), start_transfer(one)]])
    assert (found.seconds, found.exposed) == (1.0, {})
    assert [found.events[number].end for number in found.trailing] == [5.0]


def test_the_path_goes_through_what_is_waited_for() -> None:
    slow, quick = transfer(4.0), transfer(1.0, "fsdp")
    works: list[TimedInstruction] = [
        kernel(1.0),
        start_transfer(slow),
        start_transfer(quick),
        kernel(2.0),
        WaitTransfer(slow),
        WaitTransfer(quick),
        kernel(1.0),
    ]
    found = play_streams([works])
    assert [one.work for one in found.path()] == [works[0], slow, works[-1]]
    assert found.seconds == 6.0


def test_two_passes_fill_what_the_other_one_waits() -> None:
    """One waits 3 s behind its first kernel, in which the other's kernels run; only what they leave is exposed."""
    one, other = transfer(3.0), transfer(4.0, "ep")
    forward: list[TimedInstruction] = [
        kernel(1.0, phase=FORWARD),
        start_transfer(one),
        WaitTransfer(one),
        kernel(1.0, phase=FORWARD),
    ]
    backward: list[TimedInstruction] = [
        kernel(2.0, phase=FULL_BACKWARD),
        start_transfer(other),
        WaitTransfer(other),
        kernel(1.0, phase=FULL_BACKWARD),
    ]
    found = play_streams([forward, backward])
    assert times(found, COMPUTE) == [(0.0, 1.0), (1.0, 3.0), (4.0, 5.0), (7.0, 8.0)]
    assert (found.seconds, found.exposed) == (8.0, {"tp": 1.0, "ep": 2.0})


@pytest.mark.parametrize(("moving", "seconds"), [(10.0, 3.0), (1.5, 2.5), (0.6, 2.2), (0.0, 2.0)])
def test_contention_slows_kernels_as_long_as_something_moves(moving: float, seconds: float) -> None:
    """By half: 1.5 s of traffic run beside a second of work, and the other second takes a second."""
    found = play_streams([[StartTransfer(transfer(moving), "tp"), kernel(2.0)]], 1.5)
    assert found.seconds == pytest.approx(seconds)
