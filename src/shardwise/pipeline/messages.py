"""Point-to-point messages of a step, in an order that both ends can post."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.pipeline.actions import BACKWARD_WEIGHT, FORWARD, Action, ActionList, Slot


class StageMessage(NamedTuple):
    """Output of an action for the next rank: activations after a forward pass, their gradients after a backward pass."""

    action: Action
    source: int
    target: int


class RankSlot(NamedTuple):
    """A slot of a rank, with the messages to receive before it, in this order, and to send after it.

    `acknowledged` are messages sent by this rank that must have arrived by then: their receivers have since sent what
    the slot needs. Their buffers can be freed; a transport may never report that itself.
    """

    receives: tuple[StageMessage, ...]
    slot: Slot
    sends: tuple[StageMessage, ...]
    acknowledged: tuple[StageMessage, ...] = ()


def message_after(actions: ActionList, action: Action) -> StageMessage | None:
    """Return the message after an action; None where the next stage is on the same rank, or there is none."""
    kind, stage, micro_batch = action
    if kind == BACKWARD_WEIGHT:
        return None
    after = stage + 1 if kind == FORWARD else stage - 1
    if not 0 <= after < actions.num_stages:
        return None
    source, target = actions.rank_of(stage, micro_batch), actions.rank_of(after, micro_batch)
    return StageMessage(action, source, target) if source != target else None


def count_messages(actions: ActionList) -> Counter[tuple[int, int]]:
    """Count the messages of a step by (source, target).

    >>> from shardwise.pipeline.registry import build_actions
    >>> sorted(count_messages(build_actions("1f1b", 3, 8)).items())
    [((0, 1), 8), ((1, 0), 8), ((1, 2), 8), ((2, 1), 8)]
    """
    counts: Counter[tuple[int, int]] = Counter()
    for _, _, action in actions.actions():
        message = message_after(actions, action)
        if message:
            counts[message.source, message.target] += 1
    return counts


def order_messages(actions: ActionList) -> tuple[tuple[RankSlot, ...], ...]:
    """Return each rank's slots with their receives and sends, for a transport that keeps the order of messages between
    two ranks.

    Before a slot a rank receives what the slot needs, and everything that the same rank sent before that: so both ends see
    the messages of a pair of ranks in the order in which they are sent, and no receive waits for a message that is sent after
    the one that the slot needs. Sends must not wait for their receives. Assumes a list that passes `clock.check_actions`.
    """
    outbox = [[_slot_messages(actions, slot) for slot in slots] for slots in actions.order]
    channels: dict[tuple[int, int], list[StageMessage]] = {}
    for rank_sends in outbox:
        for messages in rank_sends:
            for message in messages:
                channels.setdefault((message.source, message.target), []).append(message)
    position = {message.action: i for channel in channels.values() for i, message in enumerate(channel)}
    producer = {message.action: message for channel in channels.values() for message in channel}
    by_rank = [
        _rank_slots(actions, rank, outbox[rank], channels, position, producer) for rank in range(actions.num_ranks)
    ]
    received_at = {message: i for slots in by_rank for i, slot in enumerate(slots) for message in slot.receives}
    sent_at = {message: i for slots in by_rank for i, slot in enumerate(slots) for message in slot.sends}
    return tuple(tuple(_add_arrivals(actions, slots, producer, received_at, sent_at)) for slots in by_rank)


def _add_arrivals(
    actions: ActionList, slots: Sequence[RankSlot], producer: dict[Action, StageMessage], received_at: dict[StageMessage, int],
    sent_at: dict[StageMessage, int],
) -> Iterator[RankSlot]:  # fmt: skip
    """Yield a rank's slots with the messages that have arrived: received before the target sent what a slot needs."""
    in_transit_to: dict[int, deque[StageMessage]] = {}  # by target, in the order in which it takes them
    for slot in slots:
        arrived = []
        dependencies = (key for action in slot.slot for key in remote_dependencies(actions, action))
        for message in (producer[key] for key in dependencies if key in producer):
            in_transit = in_transit_to.get(message.source, deque())
            while in_transit and received_at[in_transit[0]] <= sent_at[message]:
                arrived.append(in_transit.popleft())
        for outgoing in slot.sends:
            in_transit_to.setdefault(outgoing.target, deque()).append(outgoing)
        yield slot._replace(acknowledged=tuple(arrived))


def post_receives_early(slots: Sequence[RankSlot]) -> tuple[RankSlot, ...]:
    """Return a rank's slots with each receive posted one slot earlier, so that it arrives during the slot before."""
    following = [*(slot.receives for slot in slots[1:]), ()]
    first = slots[0].receives if slots else ()
    ahead = [*((first + following[0]),), *following[1:]] if slots else []
    return tuple(slot._replace(receives=receives) for slot, receives in zip(slots, ahead, strict=True))


def _rank_slots(
    actions: ActionList, rank: int, outbox: list[tuple[StageMessage, ...]], channels: dict[tuple[int, int], list[StageMessage]],
    position: dict[Action, int], producer: dict[Action, StageMessage],
) -> list[RankSlot]:  # fmt: skip
    next_position = dict.fromkeys((source for source, target in channels if target == rank), 0)
    rank_slots = []
    for slot, sends in zip(actions.order[rank], outbox, strict=True):
        receives: list[StageMessage] = []
        for action in slot:
            for dependency in remote_dependencies(actions, action):
                message = producer.get(dependency)
                if message is not None and position[dependency] >= next_position[message.source]:
                    receives += channels[message.source, rank][next_position[message.source] : position[dependency] + 1]
                    next_position[message.source] = position[dependency] + 1
        rank_slots.append(RankSlot(tuple(receives), slot, sends))
    return rank_slots


def remote_dependencies(actions: ActionList, action: Action) -> tuple[Action, ...]:
    """Return the actions on neighbouring stages of which one must finish first."""
    return tuple(dependency for dependency in actions.dependencies(action) if dependency.stage != action.stage)


def _slot_messages(actions: ActionList, slot: Slot) -> tuple[StageMessage, ...]:
    return tuple(message for action in slot if (message := message_after(actions, action)))
