"""Random lists of work on streams: what holds for every one of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.price.simulation.streams import (
    StartTransfer,
    StreamTimeline,
    TimedInstruction,
    TimedKernel,
    Transfer,
    WaitTransfer,
    play_streams,
)
from shardwise.step.instructions import COMPUTE

SECONDS = st.integers(1, 16).map(lambda quarters: quarters / 4)
AXES = ("tp", "fsdp", "dp")


@st.composite
def works(draw: st.DrawFn) -> list[TimedInstruction]:
    """Kernels, and transfers that are waited for later; some are not."""
    instructions: list[TimedInstruction] = []
    moving: list[Transfer] = []
    for kind in draw(st.lists(st.sampled_from(("kernel", "begin", "wait")), max_size=24)):
        if kind == "kernel":
            instructions.append(TimedKernel(seconds=draw(SECONDS), unit="block", phase="forward", name="contract"))
        elif kind == "begin":
            axis = draw(st.sampled_from(AXES))
            moving.append(Transfer(seconds=draw(SECONDS), axis=axis, unit="block", name="all_gather"))
            instructions.append(StartTransfer(moving[-1], axis))
        elif moving:
            instructions.append(WaitTransfer(moving.pop(draw(st.integers(0, len(moving) - 1)))))
    return instructions


def longest(instructions: list[TimedInstruction]) -> float:
    """The longest path to the end of a list: along its own order, on which kernels and waits are, and along each stream."""
    now, ends, free = 0.0, dict[Transfer, float](), dict[str, float]()
    for work in instructions:
        match work:
            case TimedKernel():
                now = now + work.seconds
            case StartTransfer():
                free[work.stream] = ends[work.transfer] = max(now, free.get(work.stream, 0.0)) + work.transfer.seconds
            case WaitTransfer():
                now = max(now, ends[work.transfer])
    return now


def check_streams(timeline: StreamTimeline) -> None:
    """No stream does two things at once, and each event starts at the beginning or as the one that it waited for ends."""
    for stream in {event.stream for event in timeline.events}:
        times = [(event.start, event.end) for event in timeline.events if event.stream == stream]
        assert all(before[1] <= after[0] for before, after in pairwise(times))
    for event in timeline.events:
        assert event.start == (0.0 if event.cause < 0 else timeline.events[event.cause].end)


@given(works())
def test_a_list_takes_as_long_as_its_longest_path(instructions: list[TimedInstruction]) -> None:
    timeline = play_streams([instructions])
    check_streams(timeline)
    assert timeline.seconds == longest(instructions) == sum(event.end - event.start for event in timeline.path())
    computed = sum(work.seconds for work in instructions if isinstance(work, TimedKernel))
    assert timeline.seconds == computed + sum(timeline.exposed.values())
    waited = {work.transfer for work in instructions if isinstance(work, WaitTransfer)}
    assert {timeline.events[number].work for number in timeline.trailing} == {
        work.transfer for work in instructions if isinstance(work, StartTransfer) and work.transfer not in waited
    }


@given(works(), works())
def test_two_lists_share_the_streams(first: list[TimedInstruction], second: list[TimedInstruction]) -> None:
    """They take no less than either of them alone, or than all of their kernels."""
    timeline = play_streams([first, second])
    check_streams(timeline)
    computed = sum(event.end - event.start for event in timeline.events if event.stream == COMPUTE)
    assert max(longest(first), longest(second), computed) <= timeline.seconds
    assert timeline.seconds == computed + sum(timeline.exposed.values())
    assert timeline.seconds == sum(event.end - event.start for event in timeline.path())


@given(works(), st.sampled_from((1.25, 1.5, 2.0)))
def test_contention_slows_by_what_moves_and_no_more(instructions: list[TimedInstruction], contention: float) -> None:
    free, slow = play_streams([instructions]), play_streams([instructions], contention)
    check_streams(slow)
    longest_computed = sum(work.seconds for work in instructions if isinstance(work, TimedKernel)) * contention
    assert sum(free.computed.values()) <= sum(slow.computed.values()) <= longest_computed
