"""Action lists of random sizes and durations: what holds for every one of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.pipeline.actions import ActionList
from shardwise.pipeline.clock import check_actions
from shardwise.pipeline.messages import count_messages, remote_dependencies
from shardwise.pipeline.registry import ALL_SCHEDULES, OrderOptions, build_actions, find_problems
from shardwise.pipeline.timeline import Durations, PassTimes, play_actions
from shardwise.pipeline.torch_csv import from_csv, to_csv

SECONDS = st.integers(1, 16).map(lambda quarters: quarters / 4)


SIZES = {
    name: [
        (p, m, v) for p in range(1, 7) for m in range(1, 13) for v in range(1, 5) if not find_problems(name, p, m, v)
    ]
    for name in ALL_SCHEDULES
}  # fmt: skip


@st.composite
def lists(draw: st.DrawFn) -> ActionList:
    """A list of any schedule on stages and micro-batches that it takes."""
    name = draw(st.sampled_from(tuple(ALL_SCHEDULES)))
    return build_actions(name, *draw(st.sampled_from(SIZES[name])))


@st.composite
def durations_of(draw: st.DrawFn, actions: ActionList) -> Durations:
    forward, input_, weight = (tuple(draw(SECONDS) for _ in range(actions.num_stages)) for _ in range(3))
    return Durations(forward=forward, input=input_, weight=weight, message=draw(st.sampled_from((0.0, 0.25, 2.0))))


@given(lists(), st.data())
def test_a_played_list_keeps_to_its_order_and_its_dependencies(actions: ActionList, data: st.DataObject) -> None:
    durations = data.draw(durations_of(actions))
    check_actions(actions)
    line = play_actions(actions, durations)
    begun = {action: (rank, start) for rank, slot, start, _ in line.slots() for action in slot}
    ended = {action: (rank, end) for rank, slot, _, end in line.slots() for action in slot}
    for starts, ends in zip(line.starts, line.ends, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    for action, (rank, start) in begun.items():
        for needed in remote_dependencies(actions, action):
            if needed in ended:
                needed_rank, end = ended[needed]
                assert start >= end + (durations.message if needed_rank != rank else 0.0)


@given(lists(), st.data())
def test_makespan_lies_within_its_bounds(actions: ActionList, data: st.DataObject) -> None:
    """No rank waits less than nothing; a step is no shorter than its busiest rank, or than one micro-batch's way."""
    durations = data.draw(durations_of(actions))
    line = play_actions(actions, durations)
    way = sum(durations.forward) + sum(durations.input) + 2 * durations.message * sum(actions.crosses_ranks())
    assert line.makespan >= max(*line.busy(), way) - 1e-9
    assert min(line.idle()) >= -1e-9
    assert line.longest_wait <= max(line.idle()) + 1e-9


@given(lists(), st.sampled_from((0.5, 2.0, 8.0)))
def test_a_step_scales_with_its_durations(actions: ActionList, factor: float) -> None:
    even = Durations.even(actions.num_stages, times=PassTimes(message_s=0.25))
    scaled = Durations.even(actions.num_stages, times=PassTimes(factor, factor, factor, message_s=0.25 * factor))
    assert play_actions(actions, scaled).makespan == factor * play_actions(actions, even).makespan


@given(lists())
def test_every_activation_is_freed_and_every_boundary_crossed(actions: ActionList) -> None:
    line = play_actions(actions)
    for rank in range(actions.num_ranks):
        curve = line.memory(rank)
        assert curve[-1][1] == 0.0
        assert max(num_activations for _, num_activations in curve) <= line.peak_activations[rank]
    assert sum(count_messages(actions).values()) == 2 * sum(actions.crosses_ranks()) * actions.num_micro_batches
    assert from_csv(to_csv(actions), actions.name) == actions


@given(st.integers(2, 6), st.integers(1, 12), st.data())
def test_the_automatic_scheduler_keeps_to_its_memory_and_is_no_worse(p: int, m: int, data: st.DataObject) -> None:
    h1 = build_actions("zb_h1", p, m)
    durations = data.draw(durations_of(h1))
    max_activations = data.draw(st.integers(1, 2 * p))
    actions = build_actions("zb_auto", p, m, 1, durations, OrderOptions(max_activations / p))
    check_actions(actions)
    line = play_actions(actions, durations)
    assert max(line.peak_activations) <= max_activations
    if max_activations >= min(m, p):
        assert line.makespan <= play_actions(h1, durations).makespan
