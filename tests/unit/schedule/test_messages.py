"""Messages between ranks: their numbers, and an order in which both ends post them."""

from __future__ import annotations

from collections import deque

import pytest

from shardwise.pipeline.actions import Action, ActionList
from shardwise.pipeline.messages import StageMessage, count_messages, order_messages, remote_dependencies
from shardwise.pipeline.registry import ALL_SCHEDULES, build_actions


def replay(actions: ActionList) -> int:
    """Run a list with blocking receives and ordered channels; return the number of received messages."""
    steps = [deque(rank) for rank in order_messages(actions)]
    channels: dict[tuple[int, int], deque[StageMessage]] = {}
    available: list[set[Action]] = [set() for _ in steps]
    received = 0
    while any(steps):
        moved = False
        for rank, remaining in enumerate(steps):
            while remaining:
                step = remaining[0]
                channel = {
                    source: channels.get((source, rank), deque()) for source in {m.source for m in step.receives}
                }
                if any(len(waiting) < sum(m.source == s for m in step.receives) for s, waiting in channel.items()):
                    break
                for message in step.receives:
                    assert channel[message.source].popleft() == message, "the two ends have different orders"
                    available[rank].add(message.action)
                    received += 1
                for action in step.slot:
                    required = remote_dependencies(actions, action)
                    assert not required or available[rank] & set(required), f"{action} lacks its input"
                    available[rank].add(action)
                for message in step.sends:
                    channels.setdefault((rank, message.target), deque()).append(message)
                remaining.popleft()
                moved = True
        assert moved, "the list deadlocks"
    assert not any(channels.values())
    return received


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@pytest.mark.parametrize("p", [2, 4, 6])
def test_every_send_meets_its_receive(name: str, p: int) -> None:
    actions = build_actions(name, 1 if name == "none" else p, 12)
    boundaries = sum(actions.crosses_ranks())
    assert replay(actions) == sum(count_messages(actions).values()) == 2 * boundaries * 12


def test_interleaving_sends_once_per_boundary_of_virtual_stages() -> None:
    """S1: each micro-batch goes around the ranks once for each virtual stage: v p - 1 boundaries in place of p - 1."""
    counts = [sum(count_messages(build_actions("interleaved", 4, 8, v)).values()) for v in (2, 4)]
    assert counts == [2 * 8 * (2 * 4 - 1), 2 * 8 * (4 * 4 - 1)]
    assert sum(count_messages(build_actions("1f1b", 4, 8)).values()) == 2 * 8 * 3
    assert count_messages(build_actions("interleaved", 4, 8, 2))[3, 0] == 8
