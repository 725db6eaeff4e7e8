"""Action lists: the order in which the ranks of a pipeline run passes of micro-batches, and functions that build such orders.

An `Action` is one pass of one micro-batch through one stage. An `ActionList` has the actions of every rank in order,
and the rank of each. How long a pass takes (`timeline.py`) and whether an order is legal (`clock.py`) are decided
elsewhere. Most schedules alternate one forward and one backward pass after some forward passes that warm up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

FORWARD, FULL_BACKWARD = "F", "B"  # B: the whole backward pass
# Parts of B: the gradients of activations, for which the stage before waits, and those of weights.
BACKWARD_INPUT, BACKWARD_WEIGHT = "I", "W"
KINDS = (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class Action(NamedTuple):
    """A pass of a micro-batch through a virtual stage; stages are numbered in the model's order.

    >>> print(Action(FORWARD, 3, 5))
    3F5
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Format as PyTorch's pipelining does: stage, kind, micro-batch."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


Slot = tuple[Action, ...]  # one action, or a forward and a backward pass that run together
Order = tuple[tuple[Slot, ...], ...]  # the slots of each rank


class StagePlacement(NamedTuple):
    """Rank of each virtual stage, in the model's order.

    With `bidirectional` every rank also holds a copy of the stage of its mirror rank p - 1 - i: the second half of the
    micro-batches enters at the last rank and runs the other way.
    """

    name: str
    ranks: tuple[int, ...]
    bidirectional: bool = False

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages whose weights a rank holds, in the model's order.

        >>> v_placement(3).stages_of_rank(0), bidirectional_placement(4).stages_of_rank(1)
        ((0, 5), (1, 2))
        """
        holders = {rank, self.num_ranks - 1 - rank} if self.bidirectional else {rank}
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner in holders)

    def sum_by_rank(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Sum a quantity of the virtual stages over those of each rank; second copies do not count.

        >>> v_placement(2).sum_by_rank((1, 2, 3, 4))
        (5, 5)
        """
        totals = [0] * self.num_ranks
        for rank, number in zip(self.ranks, numbers, strict=True):
            totals[rank] += number
        return tuple(totals)


def loop_placement(num_ranks: int, num_virtual_stages: int) -> StagePlacement:
    """Return the placement of stage s on rank s mod p: around the ranks once for each virtual stage of a rank.

    >>> loop_placement(2, 2).ranks
    (0, 1, 0, 1)
    """
    return StagePlacement("loop", tuple(range(num_ranks)) * num_virtual_stages)


def v_placement(num_ranks: int, num_virtual_stages: int = 2) -> StagePlacement:
    """Return the placement down the ranks and up again: two virtual stages each, and both ends of the model on the
    first rank.

    >>> v_placement(2).ranks
    (0, 1, 1, 0)
    """
    down = tuple(range(num_ranks))
    return StagePlacement("v", down + down[::-1])


def bidirectional_placement(num_ranks: int, num_virtual_stages: int = 1) -> StagePlacement:
    """Return the placement of stage s on rank s, and of a copy of it on rank p - 1 - s."""
    return StagePlacement("both_ends", tuple(range(num_ranks)), bidirectional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionList:
    """The work of every rank of a pipeline in a step, in order.

    `order[rank]` are the slots of a rank, `placement` the rank of each stage, `name` the schedule.
    """

    name: str
    order: Order
    placement: StagePlacement
    num_micro_batches: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks, p."""
        return len(self.order)

    @property
    def num_stages(self) -> int:
        """Virtual stages of the model, over all ranks."""
        return len(self.placement.ranks)

    @property
    def num_virtual_stages(self) -> float:
        """Virtual stages that a micro-batch passes on each rank, v; the mean where ranks differ."""
        return self.num_stages / self.num_ranks

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Return the rank on which a stage of a micro-batch runs."""
        rank = self.placement.ranks[stage]
        turned = self.placement.bidirectional and 2 * micro_batch >= self.num_micro_batches
        return self.num_ranks - 1 - rank if turned else rank

    def crosses_ranks(self) -> tuple[bool, ...]:
        """Return for each stage whether its input comes from another rank; False for the first stage."""
        ranks = self.placement.ranks
        return (False, *(before != after for before, after in pairwise(ranks)))

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Return the actions of which one must finish first: of a backward pass both kinds that the next stage may run."""
        kind, stage, micro_batch = action
        if kind == FORWARD:
            return (Action(FORWARD, stage - 1, micro_batch),) if stage else ()
        if kind == BACKWARD_WEIGHT:
            return (Action(BACKWARD_INPUT, stage, micro_batch),)
        if stage == self.num_stages - 1:
            return (Action(FORWARD, stage, micro_batch),)
        return Action(FULL_BACKWARD, stage + 1, micro_batch), Action(BACKWARD_INPUT, stage + 1, micro_batch)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield every action with its rank and the number of its slot."""
        for rank, slots in enumerate(self.order):
            for number, slot in enumerate(slots):
                for action in slot:
                    yield rank, number, action


def alternate_passes(
    p: int, m: int, v: int = 1, *, ahead: Sequence[int], late: Sequence[int] | None = None, round_size: int | None = None
) -> Order:  # fmt: skip
    """Return the order in which rank i runs `ahead[i]` forward passes, then alternates backward and forward, then drains.

    A rank's virtual stages take turns: each runs `round_size` micro-batches in a row (all of them if None), forward
    from the first stage, backward from the last. With `late` the backward pass is split, and weight gradients come
    `late[i]` passes after those of activations. m is a multiple of `round_size`, or the last round is shorter.
    """
    size = round_size or m
    turns = [
        (turn, micro_batch)
        for start in range(0, m, size)
        for turn in range(v)
        for micro_batch in range(start, min(start + size, m))
    ]
    order = []
    for rank in range(p):
        forward = _turn_slots(FORWARD, turns, range(rank, p * v, p))
        backward_stages = range(rank + p * (v - 1), -1, -p)
        if late is None:
            order.append(_interleave_passes(forward, _turn_slots(FULL_BACKWARD, turns, backward_stages), ahead[rank]))
        else:
            split = (
                _turn_slots(BACKWARD_INPUT, turns, backward_stages),
                _turn_slots(BACKWARD_WEIGHT, turns, backward_stages),
            )
            order.append(_interleave_passes(forward, split[0], ahead[rank], split[1], late[rank]))
    return tuple(order)


def forward_only_actions(placement: StagePlacement, m: int) -> ActionList:
    """Return the forward passes of m micro-batches, one after the other: an evaluation."""
    passes = [Action(FORWARD, stage, micro_batch) for micro_batch in range(m) for stage in range(len(placement.ranks))]
    actions = ActionList(name="forward", order=((),) * placement.num_ranks, placement=placement, num_micro_batches=m)
    slots_by_rank = [
        [(action,) for action in passes if actions.rank_of(action.stage, action.micro_batch) == rank]
        for rank in range(actions.num_ranks)
    ]
    return replace(actions, order=tuple(map(tuple, slots_by_rank)))


def _turn_slots(kind: str, turns: Sequence[tuple[int, int]], stages: Sequence[int]) -> list[Slot]:
    return [(Action(kind, stages[turn], micro_batch),) for turn, micro_batch in turns]


def _interleave_passes(
    forward: list[Slot], backward: list[Slot], ahead: int, weights: Sequence[Slot] = (), late: int = 0
) -> tuple[Slot, ...]:
    """Return forward passes to warm up, then one of each in turn; weight gradients come `late` passes later."""
    slots = forward[:ahead]
    for number, slot in enumerate(backward):
        slots.append(slot)
        if weights and number >= late:
            slots.append(weights[number - late])
        slots += forward[ahead + number : ahead + number + 1]
    return (*slots, *weights[max(len(backward) - late, 0) :])


def slots_from_words(
    slot_words: Iterable[str], *, stages: Sequence[int], first: Sequence[int], apart: bool = False
) -> Iterator[Slot]:
    """Yield the slots of DualPipe's words: way w is stage `stages[w]`, whose micro-batches are numbered from `first[w]` on.

    The word W takes the oldest pending weight gradient of either way; with `apart` it names its way (W0).
    """
    next_up: dict[tuple[str, int], int] = {}
    awaiting_weight_grads: list[Action] = []
    for word in slot_words:
        if word == BACKWARD_WEIGHT:
            yield (awaiting_weight_grads.pop(0)._replace(kind=BACKWARD_WEIGHT),)
            continue
        slot = []
        for kind, way in zip(word[::2], map(int, word[1::2]), strict=True):
            key = (kind if kind in (FORWARD, BACKWARD_WEIGHT) else BACKWARD_INPUT, way)
            number = next_up[key] = next_up.get(key, first[way] - 1) + 1
            slot.append(Action(kind, stages[way], number))
        awaiting_weight_grads += [action for action in slot if action.kind == BACKWARD_INPUT and not apart]
        yield tuple(slot)
