"""The order in which the ranks of a pipeline run passes of micro-batches, as data, and what builds such orders.

An `Action` is one pass of one micro-batch through one stage. An `ActionList` has the actions of every rank in order, and the
rank on which each of them runs. Nothing here knows how long a pass takes (`timeline.py`) or whether the order is legal
(`clock.py`). Most schedules alternate one forward and one backward pass behind some forward passes that warm up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

FORWARD, FULL_BACKWARD = "F", "B"  # B: the whole backward pass
BACKWARD_INPUT, BACKWARD_WEIGHT = (
    "I",
    "W",
)  # its parts: the gradients of activations, for which the stage before waits, and of weights
KINDS = (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class Action(NamedTuple):
    """A pass of a micro-batch through a virtual stage, which is counted in the model's order.

    >>> print(Action(FORWARD, 3, 5))
    3F5
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """As PyTorch's pipelining writes it: stage, kind, micro-batch."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


Slot = tuple[Action, ...]  # one action, or a forward and a backward pass that run together
Order = tuple[tuple[Slot, ...], ...]  # the slots of each rank


class StagePlacement(NamedTuple):
    """Where stages run: `ranks` has the rank of each virtual stage in the model's order.

    With `bidirectional` every rank holds a second copy of a stage, of the rank opposite: the second half of the micro-batches
    comes in at the last rank and goes the other way.
    """

    name: str
    ranks: tuple[int, ...]
    bidirectional: bool = False

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of which a rank holds the weights, in the model's order.

        >>> v_placement(3).stages_of_rank(0), bidirectional_placement(4).stages_of_rank(1)
        ((0, 5), (1, 2))
        """
        holders = {rank, self.num_ranks - 1 - rank} if self.bidirectional else {rank}
        return tuple(stage for stage, own in enumerate(self.ranks) if own in holders)

    def sum_by_rank(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """A quantity of the virtual stages, summed over those of each rank; second copies do not count.

        >>> v_placement(2).sum_by_rank((1, 2, 3, 4))
        (5, 5)
        """
        found = [0] * self.num_ranks
        for rank, number in zip(self.ranks, numbers, strict=True):
            found[rank] += number
        return tuple(found)


def loop_placement(num_ranks: int, num_virtual_stages: int) -> StagePlacement:
    """Stage s on rank s mod p: around the ranks once for each virtual stage of a rank.

    >>> loop_placement(2, 2).ranks
    (0, 1, 0, 1)
    """
    return StagePlacement("loop", tuple(range(num_ranks)) * num_virtual_stages)


def v_placement(num_ranks: int, num_virtual_stages: int = 2) -> StagePlacement:
    """Two virtual stages on each rank: down the ranks and up again, so that the first rank has both ends of the model.

    >>> v_placement(2).ranks
    (0, 1, 1, 0)
    """
    down = tuple(range(num_ranks))
    return StagePlacement("v", down + down[::-1])


def bidirectional_placement(num_ranks: int, num_virtual_stages: int = 1) -> StagePlacement:
    """Stage s on rank s, and a copy of it on rank p - 1 - s."""
    return StagePlacement("both_ends", tuple(range(num_ranks)), bidirectional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionList:
    """The work of every rank of a pipeline in a step, in order.

    `order[rank]` are the slots of a rank, `placement` says on which rank a stage of a micro-batch runs, `name` which schedule
    it is.
    """

    name: str
    order: Order
    placement: StagePlacement
    num_micro_batches: int

    @property
    def num_ranks(self) -> int:
        """p, the number of ranks."""
        return len(self.order)

    @property
    def num_stages(self) -> int:
        """Virtual stages of the model, all ranks' together."""
        return len(self.placement.ranks)

    @property
    def num_virtual_stages(self) -> float:
        """v: virtual stages that a micro-batch passes on each rank; the mean where ranks differ."""
        return self.num_stages / self.num_ranks

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank on which a stage of a micro-batch runs."""
        rank = self.placement.ranks[stage]
        turned = self.placement.bidirectional and 2 * micro_batch >= self.num_micro_batches
        return self.num_ranks - 1 - rank if turned else rank

    def crosses_ranks(self) -> tuple[bool, ...]:
        """For each stage, whether its input comes from another rank; False for the first."""
        ranks = self.placement.ranks
        return (False, *(before != after for before, after in pairwise(ranks)))

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Every action with its rank and the number of its slot."""
        for rank, slots in enumerate(self.order):
            for number, slot in enumerate(slots):
                for action in slot:
                    yield rank, number, action


def alternate_passes(
    p: int, m: int, v: int = 1, *, ahead: Sequence[int], late: Sequence[int] | None = None, round_size: int | None = None
) -> Order:  # fmt: skip
    """Rank i runs `ahead[i]` forward passes, then a backward and a forward pass in turn, then what is left.

    A rank's virtual stages take turns: each runs `round_size` micro-batches in a row (all of them if None), forward from
    the first, backward from the last. With `late` the backward pass is split, and weights' gradients come `late[i]`
    passes behind those of activations. m is a multiple of `round_size`, or the last round is shorter.
    """
    size = round_size or m
    turns = [
        (turn, micro_batch)
        for start in range(0, m, size)
        for turn in range(v)
        for micro_batch in range(start, min(start + size, m))
    ]
    found = []
    for rank in range(p):
        forward = _turn_slots(FORWARD, turns, range(rank, p * v, p))
        behind = range(rank + p * (v - 1), -1, -p)
        if late is None:
            found.append(_interleave_passes(forward, _turn_slots(FULL_BACKWARD, turns, behind), ahead[rank]))
        else:
            split = (_turn_slots(BACKWARD_INPUT, turns, behind), _turn_slots(BACKWARD_WEIGHT, turns, behind))
            found.append(_interleave_passes(forward, split[0], ahead[rank], split[1], late[rank]))
    return tuple(found)


def forward_only_actions(placement: StagePlacement, m: int) -> ActionList:
    """The forward passes of m micro-batches alone, one after the other: an evaluation."""
    every = [Action(FORWARD, stage, micro_batch) for micro_batch in range(m) for stage in range(len(placement.ranks))]
    found = ActionList(name="forward", order=((),) * placement.num_ranks, placement=placement, num_micro_batches=m)
    own = [
        [(one,) for one in every if found.rank_of(one.stage, one.micro_batch) == rank]
        for rank in range(found.num_ranks)
    ]
    return replace(found, order=tuple(map(tuple, own)))


def _turn_slots(kind: str, turns: Sequence[tuple[int, int]], stages: Sequence[int]) -> list[Slot]:
    """A slot for each turn of the stages."""
    return [(Action(kind, stages[turn], micro_batch),) for turn, micro_batch in turns]


def _interleave_passes(
    forward: list[Slot], backward: list[Slot], ahead: int, weights: Sequence[Slot] = (), late: int = 0
) -> tuple[Slot, ...]:
    """Forward passes to warm up, then one of each; weights' gradients `late` behind."""
    found = forward[:ahead]
    for number, slot in enumerate(backward):
        found.append(slot)
        if weights and number >= late:
            found.append(weights[number - late])
        found += forward[ahead + number : ahead + number + 1]
    return (*found, *weights[max(len(backward) - late, 0) :])


def slots_from_words(
    words: Iterable[str], *, stages: Sequence[int], first: Sequence[int], apart: bool = False
) -> Iterator[Slot]:
    """The slots of words: way w is stage `stages[w]`, whose micro-batches come in turn from `first[w]` on.

    A word W is the oldest input's gradient of either way whose weights' has not come; with `apart` it names its way (W0).
    """
    next_up: dict[tuple[str, int], int] = {}
    waiting: list[Action] = []
    for word in words:
        if word == BACKWARD_WEIGHT:
            yield (waiting.pop(0)._replace(kind=BACKWARD_WEIGHT),)
            continue
        slot = []
        for kind, way in zip(word[::2], map(int, word[1::2]), strict=True):
            key = (kind if kind in (FORWARD, BACKWARD_WEIGHT) else BACKWARD_INPUT, way)
            number = next_up[key] = next_up.get(key, first[way] - 1) + 1
            slot.append(Action(kind, stages[way], number))
        waiting += [action for action in slot if action.kind == BACKWARD_INPUT and not apart]
        yield tuple(slot)
