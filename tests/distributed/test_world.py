"""The process groups of a mesh: their ranks are in the order of the axes that they are over."""

from __future__ import annotations

import torch
from harness import run_processes

from shardwise.run.parallel.world import World
from shardwise.sharding.spec import Mesh

AXES = (("a", "b"), ("b", "a"), ("c", "a"), ("c", "b", "a"))


def gathered() -> list[tuple[bool, list[int]]]:
    """For each of `AXES`: whether this process has its place on the axes in the group, and the ranks that an AllGather gives."""
    world = World(Mesh.of({"a": 2, "b": 2, "c": 2}))
    results = []
    for axes in AXES:
        group, ranks = world.group(axes), torch.empty(2 ** len(axes), dtype=torch.int64)
        group.all_gather(ranks, torch.tensor([world.rank])).wait()
        results.append((group.ranks[world.position(axes)] == world.rank, ranks.tolist()))
    return results


def test_a_group_has_its_ranks_in_the_order_of_its_axes() -> None:
    by_rank = run_processes(gathered, 8)
    assert by_rank[0] == [  # rank = 4a + 2b + c; the first axis is the major one
        (True, [0, 2, 4, 6]),
        (True, [0, 4, 2, 6]),
        (True, [0, 4, 1, 5]),
        (True, [0, 4, 2, 6, 1, 5, 3, 7]),
    ]
    assert all(in_place for rank in by_rank for in_place, _ in rank)
