"""Blocks of attention and an MLP that layers share (Zamba, Zamba2): their collectives, caches and limits of sharding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from schemes import scheme_of

from shardwise.book_formulas.kv_cache import KvCache
from shardwise.derive.sharded_program import CollectiveStep
from shardwise.derive.sharded_unit import ShardedUnit, derive_units
from shardwise.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.model import Job

from .linked_layers import MAMBA1, MAMBA2, PROMPT_TOKENS, SHARED_BLOCKS


def test_a_shared_weight_is_gathered_at_each_use_and_reduced_once() -> None:
    """Under ZeRO-3 each use gathers the block, forward and backward; only the layer that owns it scatters its gradients."""
    units = derive_units(scheme_of(SHARED_BLOCKS.architecture().structure, zero_stage=3))
    moved = {name: [*moves_of_weight(units[name], "w_down")] for name in ("first", "first_again")}
    gathers = ["all_gather"] * 2
    assert moved == {"first": [*gathers, "reduce_scatter", "all_reduce"], "first_again": gathers}
    assert "w_down" in units["first"].trained
    assert "w_down" not in units["first_again"].trained


def moves_of_weight(unit: ShardedUnit, weight: str) -> Iterator[str]:
    """Yield the kinds of the collectives on a weight and on its gradient, in order."""
    for step in (step for steps in unit.phases().values() for step in steps):
        if (
            isinstance(step, CollectiveStep)
            and step.tensor.name.removeprefix("d.").partition("#")[0].rstrip("'") == weight
        ):
            yield step.collective.kind.value


def test_groups_of_channels_bound_tensor_parallelism() -> None:
    job = Job(global_batch_tokens=128, seq_len=16)
    model = SHARED_BLOCKS.architecture(recurrence=MAMBA1, num_kv_heads=4)
    problems = violations(model, job, 4, Layout(tp=4))
    assert any("does not split the 2 groups of channels of mamba1 evenly" in problem for problem in problems)


def test_the_embedding_is_kept_by_its_own_unit() -> None:
    units = derive_units(scheme_of(SHARED_BLOCKS.architecture().structure, recompute="full"))
    assert "carried_embedding" in units["embedding"].saved_by_this_unit_only
    assert {*units["first_again"].saved_by_this_unit_only} == {"x"}


@pytest.mark.parametrize("mixer", [MAMBA2, MAMBA1])
def test_each_use_has_a_cache_of_its_own(mixer: dict[str, Any]) -> None:
    """Though its weights are loaded once."""
    _, served = SHARED_BLOCKS.serve_prompt((PROMPT_TOKENS,), 1, recurrence=mixer)
    has_keys = {path: any("k_cache" in name for name, _ in caches) for path, caches in served.caches.items()}
    assert has_keys == {"embedding": False, "head": False, **{f"layers.{i}": i > 0 for i in range(5)}}
    assert KvCache(architecture=SHARED_BLOCKS.architecture(recurrence=mixer)).bytes_per_token == 4 * 2 * 2 * 8 * 2
