"""The clock of an action list: starts and ends, idle time, micro-batches in flight over time."""

from __future__ import annotations

import pytest

from shardwise.pipeline.actions import Action, ActionList, loop_placement
from shardwise.pipeline.registry import build_actions
from shardwise.pipeline.timeline import Durations, PassTimes, play_actions
from shardwise.values.errors import InputError


def test_times_of_two_stages_by_hand() -> None:
    """F 1, B 2, a message 0.5: the second stage waits for F, the first one for B."""
    line = play_actions(build_actions("1f1b", 2, 2), Durations.even(2, times=PassTimes(message_s=0.5)))
    assert line.starts == [[0.0, 1.0, 5.0, 8.0], [1.5, 2.5, 4.5, 5.5]]
    assert line.ends == [[1.0, 2.0, 7.0, 10.0], [2.5, 4.5, 5.5, 7.5]]
    assert line.makespan == 10.0
    assert line.busy() == (6.0, 6.0)
    assert line.idle() == (4.0, 4.0)
    assert line.waits() == (4.0, 0.0)
    assert (line.bubble, line.local_bubble, line.idle_fraction) == (4 / 6, 4 / 6, 0.4)


def test_micro_batches_in_flight_over_time() -> None:
    line = play_actions(build_actions("zb_h1", 2, 2))
    assert line.memory(0) == [(0.0, 1.0), (1.0, 2.0), (5.0, 1.0), (7.0, 0.0)]
    assert [slot[0].kind for slot in line.actions.order[0]] == ["F", "F", "I", "W", "I", "W"]


def test_stages_of_different_length_wait_for_the_busiest() -> None:
    """The busiest stage is the ideal; a stage of half the work waits besides."""
    durations = Durations(forward=(1.0, 2.0), input=(1.0, 2.0), weight=(1.0, 2.0))
    line = play_actions(build_actions("1f1b", 2, 4), durations)
    assert line.busy() == (12.0, 24.0)
    assert line.makespan == 1.0 + 24.0 + 2.0
    assert line.bubble == 3.0 / 24.0


def test_a_pair_takes_its_stated_time_or_the_sum_of_its_parts() -> None:
    pair = ((Action("F", 0, 0),), (Action("F", 0, 1), Action("B", 0, 0)), (Action("B", 0, 1),))
    actions = ActionList(name="own", order=(pair,), placement=loop_placement(1, 1), num_micro_batches=2)
    assert play_actions(actions).ends == [[1.0, 4.0, 6.0]]
    assert play_actions(actions, Durations.even(1, times=PassTimes(overlapped_s=2.5))).ends == [[1.0, 3.5, 5.5]]
    assert play_actions(actions, Durations(forward=(1.0,), input=(1.0,), weight=(1.0,), backward=(4.0,))).ends == [
        [1.0, 6.0, 10.0]
    ]


def test_passes_of_zero_length_take_no_time() -> None:
    zero = (0.0, 0.0)
    line = play_actions(build_actions("1f1b", 2, 2), Durations(forward=zero, input=zero, weight=zero))
    assert (line.makespan, line.bubble, line.idle_fraction) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"forward": (1.0, -1.0)}, "durations: forward is -1.0; a finite number"),
        ({"message": float("inf")}, "durations: message is inf; a finite number"),
        ({"weight": (1.0,)}, "durations: each of the passes needs a value for every stage"),
    ],
)
def test_invalid_durations_are_refused(changes: dict[str, object], problem: str) -> None:
    even = {"forward": (1.0, 1.0), "input": (1.0, 1.0), "weight": (1.0, 1.0)}
    with pytest.raises(InputError, match=problem):
        Durations(**{**even, **changes})  # type: ignore[arg-type]


def test_durations_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(InputError, match="durations: found those of 3 stages; 2 are required"):
        play_actions(build_actions("1f1b", 2, 2), Durations.even(3))


def test_a_list_that_deadlocks_is_refused_with_the_error_of_its_check() -> None:
    wrong = (((Action("B", 0, 0),), (Action("F", 0, 0),)),)
    actions = ActionList(name="own", order=wrong, placement=loop_placement(1, 1), num_micro_batches=1)
    with pytest.raises(
        InputError, match=r"rank 0, slot 0 \(0B0\) needs 0F0, which in slot 1 of the same rank comes later"
    ):
        play_actions(actions)


def test_unequal_virtual_stages_wait_for_each_other() -> None:
    """Llama-3-405B: 126 layers, embedding and head on 16 ranks of 7 virtual stages, eight on each: the closed form has 6.7%."""
    layers = (2.0,) * 15 + (1.0,) * 96 + (2.0,)
    line = play_actions(build_actions("interleaved", 16, 32, 7), Durations(forward=layers, input=layers, weight=layers))
    assert set(line.busy()) == {32 * 24.0}
    assert line.bubble == pytest.approx(0.2265625)
