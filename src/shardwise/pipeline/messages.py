"""What ranks send one another in a step, in an order in which both ends can post it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, ActionList, Slot


class Message(NamedTuple):
    """What an action gives to the next rank: activations of a forward pass, their gradients of a backward pass."""

    action: Action
    source: int
    target: int


class Step(NamedTuple):
    """What a rank does around a slot: messages to take in before it, in this order, and to send behind it.

    `arrived` are messages that this rank has sent and that have come to their targets by then: these have sent in turn what the
    slot needs. What they carry can be freed; a transport may never say so by itself.
    """

    receives: tuple[Message, ...]
    slot: Slot
    sends: tuple[Message, ...]
    arrived: tuple[Message, ...] = ()


def sent(actions: ActionList, action: Action) -> Message | None:
    """The message behind an action; None where the next stage is on the same rank, or there is none."""
    kind, stage, micro_batch = action
    if kind == WEIGHT:
        return None
    after = stage + 1 if kind == FORWARD else stage - 1
    if not 0 <= after < actions.num_stages:
        return None
    source, target = actions.rank_of(stage, micro_batch), actions.rank_of(after, micro_batch)
    return Message(action, source, target) if source != target else None


def num_messages(actions: ActionList) -> Counter[tuple[int, int]]:
    """How many messages go from a rank to another in a step, by (source, target).

    >>> from shardwise.pipeline.registry import build
    >>> sorted(num_messages(build("1f1b", 3, 8)).items())
    [((0, 1), 8), ((1, 0), 8), ((1, 2), 8), ((2, 1), 8)]
    """
    found: Counter[tuple[int, int]] = Counter()
    for _, _, action in actions.actions():
        message = sent(actions, action)
        if message:
            found[message.source, message.target] += 1
    return found


def exchanges(actions: ActionList) -> tuple[tuple[Step, ...], ...]:
    """Each rank's slots with their receives and sends, for a transport that keeps the order of messages between two ranks.

    In front of a slot a rank takes in what the slot needs, and everything that the same rank sent before that: so both
    ends see the messages of a pair of ranks in the order in which they are sent, and no receive waits for a message that
    is sent behind the one that the slot needs. Sends must not wait for their receives. Assumes a list that passes
    `check`.
    """
    outbox = [[_sends(actions, slot) for slot in slots] for slots in actions.order]
    channels: dict[tuple[int, int], list[Message]] = {}
    for rank_sends in outbox:
        for messages in rank_sends:
            for message in messages:
                channels.setdefault((message.source, message.target), []).append(message)
    number = {message.action: i for channel in channels.values() for i, message in enumerate(channel)}
    producer = {message.action: message for channel in channels.values() for message in channel}
    found = [_steps(actions, rank, outbox[rank], channels, number, producer) for rank in range(actions.num_ranks)]
    taken = {one: place for steps in found for place, step in enumerate(steps) for one in step.receives}
    made = {one: place for steps in found for place, step in enumerate(steps) for one in step.sends}
    return tuple(tuple(_acknowledged(actions, steps, producer, taken, made)) for steps in found)


def _acknowledged(
    actions: ActionList, steps: Sequence[Step], producer: dict[Action, Message], taken: dict[Message, int],
    made: dict[Message, int],
) -> Iterator[Step]:  # fmt: skip
    """The steps with what has arrived: of messages to a rank those that it has taken before it sent what a slot needs."""
    on_way: dict[int, deque[Message]] = {}  # by target, in the order in which it takes them
    for step in steps:
        arrived = []
        for message in (producer[key] for action in step.slot for key in needs(actions, action) if key in producer):
            sent = on_way.get(message.source, deque())
            while sent and taken[sent[0]] <= made[message]:
                arrived.append(sent.popleft())
        for one in step.sends:
            on_way.setdefault(one.target, deque()).append(one)
        yield step._replace(arrived=tuple(arrived))


def posted(steps: Sequence[Step]) -> tuple[Step, ...]:
    """A rank's steps with each receive posted one slot earlier, so that it arrives beside what runs in front of it."""
    following = [*(step.receives for step in steps[1:]), ()]
    first = steps[0].receives if steps else ()
    ahead = [*((first + following[0]),), *following[1:]] if steps else []
    return tuple(step._replace(receives=receives) for step, receives in zip(steps, ahead, strict=True))


def _steps(
    actions: ActionList, rank: int, outbox: list[tuple[Message, ...]], channels: dict[tuple[int, int], list[Message]],
    number: dict[Action, int], producer: dict[Action, Message],
) -> list[Step]:  # fmt: skip
    taken = dict.fromkeys((source for source, target in channels if target == rank), 0)
    found = []
    for slot, sends in zip(actions.order[rank], outbox, strict=True):
        receives: list[Message] = []
        for action in slot:
            for needed in needs(actions, action):
                message = producer.get(needed)
                if message is not None and number[needed] >= taken[message.source]:
                    receives += channels[message.source, rank][taken[message.source] : number[needed] + 1]
                    taken[message.source] = number[needed] + 1
        found.append(Step(tuple(receives), slot, sends))
    return found


def needs(actions: ActionList, action: Action) -> tuple[Action, ...]:
    """What an action takes from another stage: of a backward pass either of the kinds that the stage behind may run."""
    kind, stage, micro_batch = action
    if kind == FORWARD:
        return (Action(FORWARD, stage - 1, micro_batch),) if stage else ()
    if kind == WEIGHT or stage == actions.num_stages - 1:
        return ()
    return (Action(BACKWARD, stage + 1, micro_batch), Action(INPUT, stage + 1, micro_batch))


def _sends(actions: ActionList, slot: Slot) -> tuple[Message, ...]:
    return tuple(message for action in slot if (message := sent(actions, action)))
