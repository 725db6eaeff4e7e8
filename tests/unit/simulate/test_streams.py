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


def times(timeline: StreamTimeline, stream: str) -> list[tuple[float, float]]:
    return [(event.start, event.end) for event in timeline.events if event.stream == stream]


def test_kernels_come_one_after_the_other() -> None:
    timeline = play_streams([[kernel(1.0), kernel(2.0, phase="backward")]])
    assert (timeline.seconds, timeline.exposed) == (3.0, {})
    assert timeline.computed == {"forward": 1.0, "backward": 2.0}


def test_a_wait_right_after_its_start_exposes_the_whole_transfer() -> None:
    moved = transfer(3.0)
    timeline = play_streams([[kernel(1.0), start_transfer(moved), WaitTransfer(moved), kernel(2.0)]])
    assert (timeline.seconds, timeline.exposed) == (6.0, {"tp": 3.0})


def test_a_transfer_is_hidden_where_compute_is_as_long() -> None:
    moved = transfer(3.0)
    timeline = play_streams([[start_transfer(moved), kernel(3.0), WaitTransfer(moved), kernel(2.0)]])
    assert (timeline.seconds, timeline.exposed) == (5.0, {})
    assert times(timeline, "tp") == [(0.0, 3.0)]


def test_the_remainder_of_a_transfer_is_exposed() -> None:
    moved = transfer(3.0)
    timeline = play_streams([[start_transfer(moved), kernel(1.0), WaitTransfer(moved), kernel(2.0)]])
    assert (timeline.seconds, timeline.exposed) == (5.0, {"tp": 2.0})


def test_transfers_of_a_stream_are_serial_and_streams_are_concurrent() -> None:
    first, second, third = transfer(2.0), transfer(2.0), transfer(3.0, "fsdp")
    timeline = play_streams(
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
    assert times(timeline, "tp") == [(0.0, 2.0), (2.0, 4.0)]
    assert times(timeline, "fsdp") == [(0.0, 3.0)]
    assert (timeline.seconds, timeline.exposed) == (5.0, {"tp": 4.0})


def test_each_wait_is_charged_to_its_own_axis() -> None:
    first, second = transfer(2.0), transfer(5.0, "fsdp")
    timeline = play_streams(
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
    assert (timeline.seconds, timeline.exposed) == (6.0, {"tp": 1.0, "fsdp": 3.0})


def test_a_wait_at_the_end_is_exposed() -> None:
    moved = transfer(4.0, "dp")
    timeline = play_streams([[start_transfer(moved), kernel(1.0), WaitTransfer(moved)]])
    assert (timeline.seconds, timeline.exposed) == (4.0, {"dp": 3.0})


def test_transfers_without_a_wait_are_trailing() -> None:
    moved = transfer(4.0, "dp")
    timeline = play_streams([[kernel(1.0), start_transfer(moved)]])
    assert (timeline.seconds, timeline.exposed) == (1.0, {})
    assert [timeline.events[number].end for number in timeline.trailing] == [5.0]


def test_the_critical_path_contains_awaited_transfers() -> None:
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
    timeline = play_streams([works])
    assert [event.work for event in timeline.path()] == [works[0], slow, works[-1]]
    assert timeline.seconds == 6.0


def test_each_of_two_passes_fills_the_waits_of_the_other() -> None:
    """The forward pass waits 3 s after its first kernel, in which backward kernels run; only the remainder is exposed."""
    tp_transfer, ep_transfer = transfer(3.0), transfer(4.0, "ep")
    forward: list[TimedInstruction] = [
        kernel(1.0, phase=FORWARD),
        start_transfer(tp_transfer),
        WaitTransfer(tp_transfer),
        kernel(1.0, phase=FORWARD),
    ]
    backward: list[TimedInstruction] = [
        kernel(2.0, phase=FULL_BACKWARD),
        start_transfer(ep_transfer),
        WaitTransfer(ep_transfer),
        kernel(1.0, phase=FULL_BACKWARD),
    ]
    timeline = play_streams([forward, backward])
    assert times(timeline, COMPUTE) == [(0.0, 1.0), (1.0, 3.0), (4.0, 5.0), (7.0, 8.0)]
    assert (timeline.seconds, timeline.exposed) == (8.0, {"tp": 1.0, "ep": 2.0})


@pytest.mark.parametrize(("moving", "seconds"), [(10.0, 3.0), (1.5, 2.5), (0.6, 2.2), (0.0, 2.0)])
def test_contention_slows_kernels_during_transfers(moving: float, seconds: float) -> None:
    """With a contention of 1.5, 1.5 s of traffic run beside one second of work, and the other second takes a second."""
    timeline = play_streams([[StartTransfer(transfer(moving), "tp"), kernel(2.0)]], 1.5)
    assert timeline.seconds == pytest.approx(seconds)
