"""One rank of a plan's world, however large, in this process alone: the unchanged engine on tensors without data.

Its collectives use a transport without other ranks (`run.transport.lone_rank`): they are issued and nothing arrives.
Experts get even shares where a router would decide (`run.kernels.device_dispatch.on_host`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.layout import layout_degrees, num_micro_batches
from shardwise.records.step_inspection import RehearsedRank
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.step_inspector import StorageRecorder, inspect_step
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.run.transport.lone_rank import LoneRank
from shardwise.search import Plan
from shardwise.sharding import Mesh
from shardwise.values import InputError

DEVICE = "meta"
# Three micro-batches differ: the first writes gradients, others add to them, and the last one reduces them.
MAX_MICRO_BATCHES = 3


def lone_rank_world(mesh: Mesh, rank: int) -> World:
    """Return a rank of a mesh without the others. Raises `InputError` for a rank that the mesh does not have."""
    if not 0 <= rank < mesh.num_devices:
        raise InputError(f"rank: found {rank}; the plan's ranks are 0 to {mesh.num_devices - 1}")
    return World(mesh, DEVICE, transport=LoneRank(rank, mesh.num_devices))


def rehearse_rank(plan: Plan, recipe: TrainingRecipe, rank: int) -> RehearsedRank:
    """Run a step of a rank, or its first micro-batches if it has many, and return its memory and collectives. Raises
    `InputError` for a rank that the plan does not have."""
    started, instance = time.perf_counter(), engine_instance(plan, recipe)
    # A stage never has more than 2·pp in flight.
    max_count = MAX_MICRO_BATCHES if plan.layout.pp == 1 else 2 * plan.layout.pp
    count = min(int(num_micro_batches(plan.job, layout_degrees(plan.layout))), max_count)
    world = lone_rank_world(instance.mesh, rank)
    with StorageRecorder() as constructed:
        engine = TrainingEngine(instance, recipe, world)
    with inspect_step(engine, constructed) as inspector:
        engine.step(_micro_batches(engine, plan, recipe, count), plan.job.global_batch_tokens, count, 0)
    return RehearsedRank(
        rank=rank, coordinate=world.coordinate,
        groups={axes: world.group(axes).ranks for axes in sorted(instance.axes)},
        num_micro_batches=count, seconds=time.perf_counter() - started, inspection=inspector.inspection,
    )  # fmt: skip


def _micro_batches(engine: TrainingEngine, plan: Plan, recipe: TrainingRecipe, count: int) -> Iterator[MicroBatch]:
    """Yield `count` micro-batches of a rank without data: ids and targets of the positions that it reads."""
    num_seqs, length = plan.layout.micro_batch_seqs, plan.job.seq_len
    runs = engine.places_read(length)
    width = sum(num_positions for _, num_positions in runs or ((0, length),))

    def empty(num_positions: int) -> Tensor:
        return torch.empty((num_seqs, num_positions), dtype=torch.int64, device=DEVICE)

    for _ in range(count):
        yield MicroBatch(empty(width), empty(width), empty(length) if recipe.respect_documents else None, runs, length)
