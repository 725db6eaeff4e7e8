"""What ranks send one another in a step, in an order in which both ends can post it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.pipeline.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action, ActionList, Slot


class StageMessage(NamedTuple):
    """What an action gives to the next rank: activations of a forward pass, their gradients of a backward pass."""

    action: Action
    source: int
    target: int


class RankSlot(NamedTuple):
    """What a rank does around a slot: messages to take in before it, in this order, and to send behind it.

    `acknowledged` are messages that this rank has sent and that have come to their targets by then: these have sent in turn what
    the slot needs. What they carry can be freed; a transport may never say so by itself.
    """

    receives: tuple[StageMessage, ...]
    slot: Slot
    sends: tuple[StageMessage, ...]
    acknowledged: tuple[StageMessage, ...] = ()


def message_after(actions: ActionList, action: Action) -> StageMessage | None:
    """The message behind an action; None where the next stage is on the same rank, or there is none."""
    kind, stage, micro_batch = action
    if kind == BACKWARD_WEIGHT:
        return None
    after = stage + 1 if kind == FORWARD else stage - 1
    if not 0 <= after < actions.num_stages:
        return None
    source, target = actions.rank_of(stage, micro_batch), actions.rank_of(after, micro_batch)
    return StageMessage(action, source, target) if source != target else None


def count_messages(actions: ActionList) -> Counter[tuple[int, int]]:
    """How many messages go from a rank to another in a step, by (source, target).

    >>> from shardwise.pipeline.registry import build_actions
    >>> sorted(count_messages(build_actions("1f1b", 3, 8)).items())
    [((0, 1), 8), ((1, 0), 8), ((1, 2), 8), ((2, 1), 8)]
    """
    found: Counter[tuple[int, int]] = Counter()
    for _, _, action in actions.actions():
        message = message_after(actions, action)
        if message:
            found[message.source, message.target] += 1
    return found


def order_messages(actions: ActionList) -> tuple[tuple[RankSlot, ...], ...]:
    """Each rank's slots with their receives and sends, for a transport that keeps the order of messages between two ranks.

    In front of a slot a rank takes in what the slot needs, and everything that the same rank sent before that: so both
    ends see the messages of a pair of ranks in the order in which they are sent, and no receive waits for a message that
    is sent behind the one that the slot needs. Sends must not wait for their receives. Assumes a list that passes
    `check`.
    """
    outbox = [[_slot_messages(actions, slot) for slot in slots] for slots in actions.order]
    channels: dict[tuple[int, int], list[StageMessage]] = {}
    for rank_sends in outbox:
        for messages in rank_sends:
            for message in messages:
                channels.setdefault((message.source, message.target), []).append(message)
    number = {message.action: i for channel in channels.values() for i, message in enumerate(channel)}
    producer = {message.action: message for channel in channels.values() for message in channel}
    found = [_rank_slots(actions, rank, outbox[rank], channels, number, producer) for rank in range(actions.num_ranks)]
    taken = {one: place for steps in found for place, step in enumerate(steps) for one in step.receives}
    made = {one: place for steps in found for place, step in enumerate(steps) for one in step.sends}
    return tuple(tuple(_add_arrivals(actions, steps, producer, taken, made)) for steps in found)


def _add_arrivals(
    actions: ActionList, steps: Sequence[RankSlot], producer: dict[Action, StageMessage], taken: dict[StageMessage, int],
    made: dict[StageMessage, int],
) -> Iterator[RankSlot]:  # fmt: skip
    """The steps with what has arrived: of messages to a rank those that it has taken before it sent what a slot needs."""
    on_way: dict[int, deque[StageMessage]] = {}  # by target, in the order in which it takes them
    for step in steps:
        arrived = []
        for message in (
            producer[key] for action in step.slot for key in remote_dependencies(actions, action) if key in producer
        ):
            sent = on_way.get(message.source, deque())
            while sent and taken[sent[0]] <= made[message]:
                arrived.append(sent.popleft())
        for one in step.sends:
            on_way.setdefault(one.target, deque()).append(one)
        yield step._replace(acknowledged=tuple(arrived))


def post_receives_early(steps: Sequence[RankSlot]) -> tuple[RankSlot, ...]:
    """A rank's steps with each receive posted one slot earlier, so that it arrives beside what runs in front of it."""
    following = [*(step.receives for step in steps[1:]), ()]
    first = steps[0].receives if steps else ()
    ahead = [*((first + following[0]),), *following[1:]] if steps else []
    return tuple(step._replace(receives=receives) for step, receives in zip(steps, ahead, strict=True))


def _rank_slots(
    actions: ActionList, rank: int, outbox: list[tuple[StageMessage, ...]], channels: dict[tuple[int, int], list[StageMessage]],
    number: dict[Action, int], producer: dict[Action, StageMessage],
) -> list[RankSlot]:  # fmt: skip
    taken = dict.fromkeys((source for source, target in channels if target == rank), 0)
    found = []
    for slot, sends in zip(actions.order[rank], outbox, strict=True):
        receives: list[StageMessage] = []
        for action in slot:
            for needed in remote_dependencies(actions, action):
                message = producer.get(needed)
                if message is not None and number[needed] >= taken[message.source]:
                    receives += channels[message.source, rank][taken[message.source] : number[needed] + 1]
                    taken[message.source] = number[needed] + 1
        found.append(RankSlot(tuple(receives), slot, sends))
    return found


def remote_dependencies(actions: ActionList, action: Action) -> tuple[Action, ...]:
    """What an action takes from another stage: of a backward pass either of the kinds that the stage behind may run."""
    kind, stage, micro_batch = action
    if kind == FORWARD:
        return (Action(FORWARD, stage - 1, micro_batch),) if stage else ()
    if kind == BACKWARD_WEIGHT or stage == actions.num_stages - 1:
        return ()
    return (Action(FULL_BACKWARD, stage + 1, micro_batch), Action(BACKWARD_INPUT, stage + 1, micro_batch))


def _slot_messages(actions: ActionList, slot: Slot) -> tuple[StageMessage, ...]:
    return tuple(message for action in slot if (message := message_after(actions, action)))
