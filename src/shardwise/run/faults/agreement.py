"""Decisions of all ranks together: whether a check holds everywhere, and the numbers and texts of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from shardwise.run.faults.rank_status import LostRankError, wait_for_ranks
from shardwise.run.faults.rendezvous import Rendezvous
from shardwise.run.transport.interface import Transport
from shardwise.values import ShardwiseError

Value = TypeVar("Value")


def require_on_all_ranks(world: RankGroup, check: Callable[[], Value]) -> Value:
    """Run a check on all ranks; return its value if it holds on every rank.

    Otherwise the first rank on which it fails raises its `ShardwiseError`, and all others raise `SystemExit` with the
    same code, so that one rank reports the error. `LostRankError` is raised at once: without a rank nothing can be
    agreed on.
    """
    problem: ShardwiseError | None = None
    try:
        value = check()
    except LostRankError:
        raise
    except ShardwiseError as error:
        problem = error
    codes = [code for (code,) in all_gather_ints(world, [problem.exit_code if problem else 0], "what each rank finds")]
    failing = next((rank for rank, code in enumerate(codes) if code), None)
    if failing is None:
        return value
    if problem is not None and failing == world.rank:
        raise problem
    raise SystemExit(codes[failing])


def all_gather_ints(world: RankGroup, numbers: Sequence[int], awaits: str) -> list[list[int]]:
    """Return the numbers of each rank; every rank gives equally many. `awaits` describes the wait in reports."""
    if world.size == 1:
        return [list(numbers)]
    local = torch.tensor(numbers, device=world.device)
    gathered = local.new_empty(world.size * len(local))
    with wait_for_ranks(awaits):
        world.transport.world.all_gather(gathered, local).wait()
        numbers_by_rank: list[list[int]] = gathered.view(world.size, len(local)).tolist()
        return numbers_by_rank


def all_reduce_max(world: RankGroup, number: int, awaits: str) -> int:
    """Return the largest of the ranks' numbers."""
    if world.size == 1:
        return number
    largest = torch.tensor([number], device=world.device)
    with wait_for_ranks(awaits):
        world.transport.world.all_reduce(largest, "max").wait()
        return int(largest)


def all_are_true(world: RankGroup, flag: torch.Tensor, awaits: str) -> torch.Tensor:
    """Return whether a scalar is true on every rank, a scalar on its device: a GPU's host does not wait for it."""
    if world.size == 1:
        return flag
    num_false = (~flag).to(torch.int64).reshape(1)
    with wait_for_ranks(awaits):
        world.transport.world.all_reduce(num_false, "max").wait()
    return num_false[0] == 0


def all_gather_texts(world: RankGroup, text: str) -> list[str]:
    """Return the text of each rank."""
    content = text.encode()
    max_length = all_reduce_max(world, len(content), "the lengths of what each rank says")
    rows = all_gather_ints(world, [len(content), *content.ljust(max_length, b"\0")], "what each rank says")
    return [bytes(numbers[:length]).decode() for length, *numbers in rows]


def broadcast_from_first(world: RankGroup, numbers: Sequence[float], awaits: str) -> list[float]:
    """Return the numbers of the first rank."""
    if world.size == 1:
        return list(numbers)
    count = all_reduce_max(world, len(numbers) if world.rank == 0 else 0, awaits)
    received = torch.zeros(count, dtype=torch.float64, device=world.device)
    if world.rank == 0:
        received.copy_(torch.tensor(numbers, dtype=torch.float64))
    with wait_for_ranks(awaits):
        world.transport.world.broadcast(received, 0).wait()
        return [float(number) for number in received.tolist()]


class RankGroup(Protocol):
    """The ranks of a run as seen by one: its rank, the number of ranks, its pipeline stage, device, transport and
    rendezvous. `rendezvous` is None in a run of one process."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def rendezvous(self) -> Rendezvous | None: ...
