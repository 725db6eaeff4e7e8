"""One rank of a plan's world, however large, in this process alone: the engine as it is, on tensors without data.

Its collectives go over process groups whose other ranks are not there (PyTorch's fake backend), so that they are issued and
nothing comes. Where a router says how many rows go to an expert, even shares go (`engine.torch.devices.on_host`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg

from shardwise.errors import InputError
from shardwise.layout.legality import degrees_of, num_micro_batches
from shardwise.measurement.inspection import Rehearsed
from shardwise.planning.plan import Plan
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes
from shardwise.train.engine import Engine, MicroBatch
from shardwise.train.inspect import watched
from shardwise.train.issued import instance_of
from shardwise.train.recipe import Recipe
from shardwise.train.world import World

DEVICE, BACKEND = "meta", "alone"
# Micro-batches that do something else: the first gives gradients their first values, others add to them, the last sends them.
MOST_MICRO_BATCHES = 3


class RankAlone(World):
    """A world of which one rank is there, and makes its own process groups only."""

    def _members(self, axes: Axes) -> list[list[int]]:
        return [ranks for ranks in super()._members(axes) if self.rank in ranks]


@contextmanager
def rank_alone(mesh: Mesh, rank: int) -> Iterator[World]:
    """A rank of a mesh without the others. Raises `InputError` for one that the mesh does not have."""
    if not 0 <= rank < mesh.num_devices:
        raise InputError(f"rank: found {rank}; the plan's ranks are 0 to {mesh.num_devices - 1}")
    if BACKEND not in dist.Backend.backend_list:
        # as fake_pg registers it, which leaves out the device of tensors without data
        dist.Backend.register_backend(BACKEND, fake_pg._create_fake_pg, extended_api=True, devices=[DEVICE])
    dist.init_process_group(BACKEND, store=fake_pg.FakeStore(), rank=rank, world_size=mesh.num_devices)
    try:
        yield RankAlone(mesh, DEVICE)
    finally:
        dist.destroy_process_group()


def rehearse(plan: Plan, recipe: Recipe, rank: int) -> Rehearsed:
    """Run a step of a rank, or the first micro-batches of one that has many, and see what it holds and issues.

    Raises `InputError` for a rank that the plan does not have.
    """
    started, instance = time.perf_counter(), instance_of(plan, recipe)
    most = MOST_MICRO_BATCHES if plan.layout.pp == 1 else 2 * plan.layout.pp  # all that a stage ever has in flight
    count = min(int(num_micro_batches(plan.job, degrees_of(plan.layout))), most)
    with rank_alone(instance.mesh, rank) as world:
        engine = Engine(instance, recipe, world)
        with watched(engine) as watch:
            engine.step(_micro_batches(engine, plan, recipe, count), plan.job.global_batch_tokens, count, 0)
        return Rehearsed(
            rank=rank, coordinate=world.coordinate,
            groups={axes: tuple(dist.get_process_group_ranks(world.group(axes))) for axes in sorted(instance.axes)},
            num_micro_batches=count, seconds=time.perf_counter() - started, inspection=watch.found,
        )  # fmt: skip


def _micro_batches(engine: Engine, plan: Plan, recipe: Recipe, count: int) -> Iterator[MicroBatch]:
    """So many of a rank, of a length and of nothing else: ids and targets of the places that it reads."""
    num_seqs, length = plan.layout.micro_batch_seqs, plan.job.seq_len
    runs = engine.places_read(length)
    width = sum(places for _, places in runs or ((0, length),))

    def empty(places: int) -> Tensor:
        return torch.empty((num_seqs, places), dtype=torch.int64, device=DEVICE)

    for _ in range(count):
        yield MicroBatch(empty(width), empty(width), empty(length) if recipe.respect_documents else None, runs, length)
