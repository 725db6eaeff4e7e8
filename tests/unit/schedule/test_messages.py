"""What ranks send: numbers, and an order in which both ends post it."""

from __future__ import annotations

from collections import deque

import pytest

from shardwise.pipeline.actions import Action, ActionList
from shardwise.pipeline.messages import StageMessage, count_messages, order_messages, remote_dependencies
from shardwise.pipeline.registry import ALL_SCHEDULES, build_actions


def replayed(actions: ActionList) -> int:
    """Run a list with receives that block and channels that keep their order; how many messages came."""
    steps = [deque(rank) for rank in order_messages(actions)]
    channels: dict[tuple[int, int], deque[StageMessage]] = {}
    there: list[set[Action]] = [set() for _ in steps]
    received = 0
    while any(steps):
        moved = False
        for rank, left in enumerate(steps):
            while left:
                step = left[0]
                channel = {
                    source: channels.get((source, rank), deque()) for source in {m.source for m in step.receives}
                }
                if any(len(waiting) < sum(m.source == s for m in step.receives) for s, waiting in channel.items()):
                    break
                for message in step.receives:
                    assert channel[message.source].popleft() == message, "both ends have another order"
                    there[rank].add(message.action)
                    received += 1
                for action in step.slot:
                    needed = remote_dependencies(actions, action)
                    assert not needed or there[rank] & set(needed), f"{action} has not what it needs"
                    there[rank].add(action)
                for message in step.sends:
                    channels.setdefault((rank, message.target), deque()).append(message)
                left.popleft()
                moved = True
        assert moved, "a deadlock"
    assert not any(channels.values())
    return received


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@pytest.mark.parametrize("p", [2, 4, 6])
def test_sends_meet_receives(name: str, p: int) -> None:
    actions = build_actions(name, 1 if name == "none" else p, 12)
    boundaries = sum(actions.crosses_ranks())
    assert replayed(actions) == sum(count_messages(actions).values()) == 2 * boundaries * 12


def test_interleaving_sends_as_often_as_it_has_virtual_stages() -> None:
    """S1: each micro-batch goes around the ranks once for each virtual stage: v p - 1 boundaries in place of p - 1."""
    counts = [sum(count_messages(build_actions("interleaved", 4, 8, v)).values()) for v in (2, 4)]
    assert counts == [2 * 8 * (2 * 4 - 1), 2 * 8 * (4 * 4 - 1)]
    assert sum(count_messages(build_actions("1f1b", 4, 8)).values()) == 2 * 8 * 3
    assert count_messages(build_actions("interleaved", 4, 8, 2))[3, 0] == 8
