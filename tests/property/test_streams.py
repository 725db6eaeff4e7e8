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
    found: list[TimedInstruction] = []
    moving: list[Transfer] = []
    for what in draw(st.lists(st.sampled_from(("kernel", "begin", "wait")), max_size=24)):
        if what == "kernel":
            found.append(TimedKernel(seconds=draw(SECONDS), unit="block", phase="forward", name="contract"))
        elif what == "begin":
            axis = draw(st.sampled_from(AXES))
            moving.append(Transfer(seconds=draw(SECONDS), axis=axis, unit="block", name="all_gather"))
            found.append(StartTransfer(moving[-1], axis))
        elif moving:
            found.append(WaitTransfer(moving.pop(draw(st.integers(0, len(moving) - 1)))))
    return found


def longest(given: list[TimedInstruction]) -> float:
    """The longest path to the end of a list: along its own order, on which kernels and waits are, and along each stream."""
    now, ends, free = 0.0, dict[Transfer, float](), dict[str, float]()
    for work in given:
        match work:
            case TimedKernel():
                now = now + work.seconds
            case StartTransfer():
                free[work.stream] = ends[work.transfer] = max(now, free.get(work.stream, 0.0)) + work.transfer.seconds
            case WaitTransfer():
                now = max(now, ends[work.transfer])
    return now


def check_streams(found: StreamTimeline) -> None:
    """No stream does two things at once, and each event starts at the beginning or as the one that it waited for ends."""
    for stream in {one.stream for one in found.events}:
        times = [(one.start, one.end) for one in found.events if one.stream == stream]
        assert all(before[1] <= after[0] for before, after in pairwise(times))
    for one in found.events:
        assert one.start == (0.0 if one.cause < 0 else found.events[one.cause].end)


@given(works())
def test_a_list_takes_as_long_as_its_longest_path(given: list[TimedInstruction]) -> None:
    found = play_streams([given])
    check_streams(found)
    assert found.seconds == longest(given) == sum(one.end - one.start for one in found.path())
    computed = sum(one.seconds for one in given if isinstance(one, TimedKernel))
    assert found.seconds == computed + sum(found.exposed.values())
    waited = {one.transfer for one in given if isinstance(one, WaitTransfer)}
    assert {found.events[number].work for number in found.trailing} == {
        one.transfer for one in given if isinstance(one, StartTransfer) and one.transfer not in waited
    }


@given(works(), works())
def test_two_lists_share_the_streams(one: list[TimedInstruction], other: list[TimedInstruction]) -> None:
    """They take no less than either of them alone, or than all of their kernels."""
    found = play_streams([one, other])
    check_streams(found)
    computed = sum(event.end - event.start for event in found.events if event.stream == COMPUTE)
    assert max(longest(one), longest(other), computed) <= found.seconds
    assert found.seconds == computed + sum(found.exposed.values())
    assert found.seconds == sum(event.end - event.start for event in found.path())


@given(works(), st.sampled_from((1.25, 1.5, 2.0)))
def test_contention_slows_by_what_moves_and_no_more(given: list[TimedInstruction], contention: float) -> None:
    free, slow = play_streams([given]), play_streams([given], contention)
    check_streams(slow)
    most = sum(one.seconds for one in given if isinstance(one, TimedKernel)) * contention
    assert sum(free.computed.values()) <= sum(slow.computed.values()) <= most
