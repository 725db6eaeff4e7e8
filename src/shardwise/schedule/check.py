"""Whether an action list is one that ranks can run: complete, in order, without a deadlock."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.errors import InputError
from shardwise.schedule.action import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Action, ActionList, Slot
from shardwise.schedule.play import Clock

Place = tuple[int, int]  # rank, number of a slot


def check(actions: ActionList) -> None:
    """Refuse a broken list with its first offending action: its rank, its slot, and what it needs.

    Every micro-batch passes every stage once forward and once backward (B, or I and later W), on the rank on which the
    stage is; the ranks, each of them in its own order and blocked by what has not come, all get to the end. Messages
    between two ranks are then received in the order in which they are sent (`messages.exchanges`): what a rank waits for
    has been sent, and with it all that the other rank sent before. Raises `InputError`.

    >>> from shardwise.schedule.build import build
    >>> check(build("dualpipe", 4, 8))
    """
    if len(actions.order) != actions.placement.num_ranks:
        raise InputError(
            f"action list: found {len(actions.order)} ranks for stages on {actions.placement.num_ranks}; one row of "
            "actions for each rank is required"
        )
    places = _places(actions)
    for problem in _missing(actions, places):
        raise InputError(
            f"action list: {problem}; every micro-batch passes every stage once each way: F and B, or F, I and W"
        )
    clock = Clock(actions, [[0.0] * len(slots) for slots in actions.order])
    if not clock.run():
        raise InputError(f"action list: {_stuck(actions, clock, places)}")


def _places(actions: ActionList) -> dict[Action, Place]:
    """The place of each action. Raises `InputError` at the first one that cannot run where it is."""
    found: dict[Action, Place] = {}
    for rank, number, action in actions.actions():
        problem = _misplaced(actions, rank, actions.order[rank][number], action)
        if action in found:
            problem = f"it is there already, in slot {found[action][1]} of rank {found[action][0]}"
        if problem:
            raise InputError(f"action list: {_named(rank, number, action)}: {problem}")
        found[action] = (rank, number)
    return found


def _misplaced(actions: ActionList, rank: int, slot: Slot, action: Action) -> str:
    """What is wrong with an action by itself; "" if nothing."""
    kind, stage, micro_batch = action
    if kind not in KINDS:
        return f"found kind {kind!r}; one of {', '.join(KINDS)} is required"
    if not 0 <= stage < actions.num_stages:
        return f"stages are 0 to {actions.num_stages - 1}"
    if not 0 <= micro_batch < actions.num_micro_batches:
        return f"micro-batches are 0 to {actions.num_micro_batches - 1}"
    own = actions.rank_of(stage, micro_batch)
    if own != rank:
        return f"stage {stage} of micro-batch {micro_batch} is on rank {own}"
    kinds = [one.kind for one in slot]
    if len(kinds) > 1 and (kinds.count(FORWARD) != 1 or len(kinds) != 2 or WEIGHT in kinds):
        return f"it runs together with {', '.join(map(str, slot))}; a forward and a backward pass may run together"
    return ""


def _missing(actions: ActionList, places: dict[Action, Place]) -> Iterator[str]:
    """Passes that no rank runs, or runs in two ways."""
    for micro_batch in range(actions.num_micro_batches):
        for stage in range(actions.num_stages):
            kinds = "".join(kind for kind in KINDS if Action(kind, stage, micro_batch) in places)
            if kinds not in ("FB", "FIW"):
                rank, passes = actions.rank_of(stage, micro_batch), " and ".join(kinds) or "nothing"
                yield f"rank {rank} runs {passes} of micro-batch {micro_batch} on stage {stage}"


def _stuck(actions: ActionList, clock: Clock, places: dict[Action, Place]) -> str:
    """The first action that waits for ever, and what for: one that waits for its own rank before one that waits in a circle."""
    waiting = []
    for rank, slots in enumerate(actions.order):
        number = len(clock.ends[rank])
        if number < len(slots):
            needed = _needed(actions, clock, slots[number], places)
            waiting.append((places[needed][0] != rank, number, rank, needed))
    _, number, rank, needed = min(waiting)
    other, later = places[needed]
    where = "the same rank" if other == rank else f"rank {other}"
    why = "comes later" if other == rank else "waits in turn: a deadlock"
    return (
        f"{_named(rank, number, *actions.order[rank][number])} needs {needed}, which in slot {later} of {where} {why}"
    )


def _needed(actions: ActionList, clock: Clock, slot: Slot, places: dict[Action, Place]) -> Action:
    """What a blocked slot waits for."""
    last = actions.num_stages - 1
    for kind, stage, micro_batch in slot:
        if kind == WEIGHT:
            needed = [Action(INPUT, stage, micro_batch)]
        elif kind == FORWARD:
            needed = [Action(FORWARD, stage - 1, micro_batch)]
        elif stage == last:
            needed = [Action(FORWARD, stage, micro_batch)]
        else:
            needed = [Action(kind, stage + 1, micro_batch) for kind in (BACKWARD, INPUT)]
        for one in needed:
            if one in places and places[one][1] >= len(clock.ends[places[one][0]]):
                return one
    raise AssertionError(f"{slot} does not wait")


def _named(rank: int, number: int, *slot: Action) -> str:
    return f"rank {rank}, slot {number} ({';'.join(map(str, slot))})"
