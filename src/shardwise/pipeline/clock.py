"""Event clock of an action list, and the check that ranks can run the list: complete, in order, without a deadlock.

A rank runs its slots in order, each as soon as the rank is free and the input has arrived: from the previous stage for
a forward pass, from the next one for a backward pass. Messages occupy neither the sending rank nor each other's link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.pipeline.actions import BACKWARD_WEIGHT, FORWARD, KINDS, Action, ActionList, Slot
from shardwise.values import InputError

SlotIndex = tuple[int, int]  # rank, number of a slot


def check_actions(actions: ActionList) -> None:
    """Refuse a broken list, naming its first offending action: its rank, its slot, and what it needs.

    Every micro-batch must pass every stage once forward and once backward (B, or I and later W), on the rank of the
    stage, and all ranks, each in its own order and blocked by missing inputs, must finish. Messages between two ranks
    are then received in the order in which they are sent (`messages.order_messages`): what a rank waits for has been
    sent, and with it all that the other rank sent before. Raises `InputError`.

    >>> from shardwise.pipeline.registry import build_actions
    >>> check_actions(build_actions("dualpipe", 4, 8))
    """
    if len(actions.order) != actions.placement.num_ranks:
        raise InputError(
            f"action list: found {len(actions.order)} ranks for stages on {actions.placement.num_ranks}; one row of "
            "actions for each rank is required"
        )
    places = _locate_actions(actions)
    for problem in _find_missing_passes(actions, places):
        raise InputError(
            f"action list: {problem}; every micro-batch passes every stage once each way: F and B, or F, I and W"
        )
    clock = ScheduleClock(actions, [[0.0] * len(slots) for slots in actions.order])
    if not clock.run():
        raise InputError(f"action list: {_describe_deadlock(actions, clock, places)}")


def _locate_actions(actions: ActionList) -> dict[Action, SlotIndex]:
    """Return the rank and slot of each action. Raises `InputError` at the first one that cannot run where it is."""
    locations: dict[Action, SlotIndex] = {}
    for rank, number, action in actions.actions():
        problem = _action_problem(actions, rank, actions.order[rank][number], action)
        if action in locations:
            problem = f"it is there already, in slot {locations[action][1]} of rank {locations[action][0]}"
        if problem:
            raise InputError(f"action list: {_describe_slot(rank, number, action)}: {problem}")
        locations[action] = (rank, number)
    return locations


def _action_problem(actions: ActionList, rank: int, slot: Slot, action: Action) -> str:
    """Describe what is wrong with an action by itself; "" if nothing is."""
    kind, stage, micro_batch = action
    if kind not in KINDS:
        return f"found kind {kind!r}; one of {', '.join(KINDS)} is required"
    if not 0 <= stage < actions.num_stages:
        return f"stages are 0 to {actions.num_stages - 1}"
    if not 0 <= micro_batch < actions.num_micro_batches:
        return f"micro-batches are 0 to {actions.num_micro_batches - 1}"
    expected_rank = actions.rank_of(stage, micro_batch)
    if expected_rank != rank:
        return f"stage {stage} of micro-batch {micro_batch} is on rank {expected_rank}"
    kinds = [paired.kind for paired in slot]
    if len(kinds) > 1 and (kinds.count(FORWARD) != 1 or len(kinds) != 2 or BACKWARD_WEIGHT in kinds):
        return f"it runs together with {', '.join(map(str, slot))}; a forward and a backward pass may run together"
    return ""


def _find_missing_passes(actions: ActionList, places: dict[Action, SlotIndex]) -> Iterator[str]:
    """Describe passes that no rank runs, or that are run both whole and split."""
    for micro_batch in range(actions.num_micro_batches):
        for stage in range(actions.num_stages):
            kinds = "".join(kind for kind in KINDS if Action(kind, stage, micro_batch) in places)
            if kinds not in ("FB", "FIW"):
                rank, passes = actions.rank_of(stage, micro_batch), " and ".join(kinds) or "nothing"
                yield f"rank {rank} runs {passes} of micro-batch {micro_batch} on stage {stage}"


def _describe_deadlock(actions: ActionList, clock: ScheduleClock, places: dict[Action, SlotIndex]) -> str:
    """Describe the first action that waits for ever; one that waits for its own rank comes before one in a cycle of ranks."""
    blocked = []
    for rank, slots in enumerate(actions.order):
        number = len(clock.ends[rank])
        if number < len(slots):
            awaited = _awaited_action(actions, clock, slots[number], places)
            blocked.append((places[awaited][0] != rank, number, rank, awaited))
    _, number, rank, awaited = min(blocked)
    awaited_rank, awaited_slot = places[awaited]
    where = "the same rank" if awaited_rank == rank else f"rank {awaited_rank}"
    why = "comes later" if awaited_rank == rank else "waits in turn: a deadlock"
    place = _describe_slot(rank, number, *actions.order[rank][number])
    return f"{place} needs {awaited}, which in slot {awaited_slot} of {where} {why}"


def _awaited_action(actions: ActionList, clock: ScheduleClock, slot: Slot, places: dict[Action, SlotIndex]) -> Action:
    """Return the action that a blocked slot waits for."""
    for dependency in (dependency for action in slot for dependency in actions.dependencies(action)):
        if dependency in places and places[dependency][1] >= len(clock.ends[places[dependency][0]]):
            return dependency
    raise AssertionError(f"{slot} does not wait")


def _describe_slot(rank: int, number: int, *slot: Action) -> str:
    return f"rank {rank}, slot {number} ({';'.join(map(str, slot))})"


NEVER = -1.0


def run_clock(actions: ActionList, seconds: Sequence[Sequence[float]], message: float) -> ScheduleClock:
    """Run a list to its end and return its clock. `seconds[rank][slot]`: of each slot; `message`: of one between two ranks.

    Raises `InputError` for a list that does not end, with its first offending action.
    """
    clock = ScheduleClock(actions, seconds, message)
    if not clock.run():
        check_actions(actions)
    return clock


class ScheduleClock:
    """Start and end of every slot: one pass over a list, in an order that its dependencies allow.

    A rank that has to wait is resumed by the end of the pass that it waits for, so each action is looked at twice at most.
    """

    def __init__(self, actions: ActionList, seconds: Sequence[Sequence[float]], message: float = 0.0) -> None:
        self.actions, self.seconds = actions, seconds
        self.starts: list[list[float]] = [[] for _ in actions.order]
        self.ends: list[list[float]] = [[] for _ in actions.order]
        size = actions.num_stages * actions.num_micro_batches
        self.forward_end, self.backward_end = [NEVER] * size, [NEVER] * size  # by stage * micro-batches + micro-batch
        self.blocked: dict[tuple[bool, int], int] = {}  # (backward?, place): the rank that waits for it
        self.delay = [message if hops else 0.0 for hops in (*actions.crosses_ranks(), False)]

    def run(self) -> bool:
        """Play all slots that can run; return True if those are all slots."""
        ready = list(range(self.actions.num_ranks - 1, -1, -1))
        while ready:
            self._play(ready.pop(), ready)
        return all(len(ends) == len(slots) for ends, slots in zip(self.ends, self.actions.order, strict=True))

    def _play(self, rank: int, ready: list[int]) -> None:
        """Run a rank's slots up to one that has to wait; ranks that waited for them become ready."""
        slots, starts, ends = self.actions.order[rank], self.starts[rank], self.ends[rank]
        now = ends[-1] if ends else 0.0
        seconds, m, blocked = self.seconds[rank], self.actions.num_micro_batches, self.blocked
        for number in range(len(ends), len(slots)):
            slot = slots[number]
            start = self._start(slot, now, rank)
            if start < 0.0:
                return
            now = start + seconds[number]
            starts.append(start)
            ends.append(now)
            for kind, stage, micro_batch in slot:
                if kind != BACKWARD_WEIGHT:
                    backward, index = kind != FORWARD, stage * m + micro_batch
                    (self.backward_end if backward else self.forward_end)[index] = now
                    blocked_rank = blocked.pop((backward, index), None) if blocked else None
                    if blocked_rank is not None:
                        ready.append(blocked_rank)

    def _start(self, slot: Slot, now: float, rank: int) -> float:
        """Return when a slot can begin; `NEVER`, with the rank noted as blocked, where an input has not arrived yet."""
        m, last = self.actions.num_micro_batches, self.actions.num_stages - 1
        for kind, stage, micro_batch in slot:
            if kind == FORWARD:  # dependencies are inlined: this is the inner loop of every played list
                if stage == 0:
                    continue
                backward, index, delay = False, (stage - 1) * m + micro_batch, self.delay[stage]
            elif kind == BACKWARD_WEIGHT:
                backward, index, delay = True, stage * m + micro_batch, 0.0
            elif stage == last:
                backward, index, delay = False, stage * m + micro_batch, 0.0
            else:
                backward, index, delay = True, (stage + 1) * m + micro_batch, self.delay[stage + 1]
            ready_s = (self.backward_end if backward else self.forward_end)[index]
            if ready_s < 0.0:
                self.blocked[backward, index] = rank
                return NEVER
            now = max(now, ready_s + delay)
        return now
