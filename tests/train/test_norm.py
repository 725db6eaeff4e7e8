"""The gradient norm of any number of elements is exact to the format of its result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.parallel.sharded_optimizer import NORM_BLOCK, ShardedOptimizer, sum_of_squares
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.step_clock import StepClock


def norm_of(*shards: torch.Tensor) -> torch.Tensor:
    """Return the norm that the optimizer clips with, of gradient shards on one process."""
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    updater = ShardedOptimizer([], MeshCollectives(world, StepClock(world.device)), TrainingRecipe(steps=1), ())
    groups: Any = [
        SimpleNamespace(
            gradient_shard=shard, local_runs=lambda: [(frozenset(), slice(None))], copies=lambda axes, among: 1
        )
        for shard in shards
    ]  # fmt: skip
    updater.groups = groups
    return updater.norm()


def test_the_norm_of_many_equal_elements_is_exact() -> None:
    """PyTorch's norm of these in float32, on a CPU, is 0.35% low, and of 10^8 of them 5.6% high."""
    gradients = torch.full((10**7,), 0.01)
    expected = 0.01 * (10**7) ** 0.5
    norm = norm_of(gradients, gradients[:1])
    assert norm.item() == pytest.approx(expected, rel=2e-7)
    assert norm.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_block_and_the_rest_are_counted_once(dtype: torch.dtype) -> None:
    values = torch.randn(4096 * NORM_BLOCK + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = 1e-12 if dtype == torch.float64 else 1e-7
    assert sum_of_squares(values).item() == pytest.approx(values.double().square().sum().item(), rel=exact)
    assert norm_of(values).dtype == torch.promote_types(dtype, torch.float32)
