"""Orders of one forward and one backward pass in turn, behind forward passes to warm up: most schedules are one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.schedule.action import BACKWARD, FORWARD, INPUT, WEIGHT, Action, ActionList, Order, Placement, Slot


def one_then_one(
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
        forward = _slots(FORWARD, turns, range(rank, p * v, p))
        behind = range(rank + p * (v - 1), -1, -p)
        if late is None:
            found.append(_merged(forward, _slots(BACKWARD, turns, behind), ahead[rank]))
        else:
            split = (_slots(INPUT, turns, behind), _slots(WEIGHT, turns, behind))
            found.append(_merged(forward, split[0], ahead[rank], split[1], late[rank]))
    return tuple(found)


def forward_passes(placement: Placement, m: int) -> ActionList:
    """The forward passes of m micro-batches alone, one after the other: an evaluation."""
    every = [Action(FORWARD, stage, micro_batch) for micro_batch in range(m) for stage in range(len(placement.ranks))]
    found = ActionList(name="forward", order=((),) * placement.num_ranks, placement=placement, num_micro_batches=m)
    own = [
        [(one,) for one in every if found.rank_of(one.stage, one.micro_batch) == rank]
        for rank in range(found.num_ranks)
    ]
    return replace(found, order=tuple(map(tuple, own)))


def _slots(kind: str, turns: Sequence[tuple[int, int]], stages: Sequence[int]) -> list[Slot]:
    """A slot for each turn of the stages."""
    return [(Action(kind, stages[turn], micro_batch),) for turn, micro_batch in turns]


def _merged(
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
