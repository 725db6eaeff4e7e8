"""When a run measures the noise scale, which of its sequences are a part, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.shard_files import write_shards
from train.stand_in import small_plan

from shardwise.layout.layout import Layout
from shardwise.run.data.batches import Batches
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.batch_schedule import require_batches
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.noise_scale import targets_of_parts
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.issued_collectives import count_collectives
from shardwise.values.errors import InputError


def test_every_nth_step_measures_and_issues_what_that_takes() -> None:
    recipe = TrainingRecipe(steps=9, noise_scale_every=3)
    assert [step for step in range(9) if recipe.measures_noise_at(step)] == [2, 5, 8]
    assert not any(TrainingRecipe(steps=9).measures_noise_at(step) for step in range(9))
    plan = small_plan(2)
    usual, measuring = (count_collectives(engine_instance(plan, recipe.for_step(step)), 4) for step in (1, 2))
    more = measuring - usual
    assert not usual - measuring
    assert [(collective.kind, collective.axes, collective.num_bytes, count) for collective, count in more.items()] == [
        (CollectiveKind.ALL_REDUCE, ("dp",), 4, 1)
    ]


def test_a_batch_in_one_part_is_refused() -> None:
    recipe = TrainingRecipe(steps=1, noise_scale_every=1)
    require_batches(small_plan(batch_seqs=2, micro_batch_seqs=1), recipe)
    with pytest.raises(InputError, match="2 sequences in one part"):
        require_batches(small_plan(batch_seqs=2, micro_batch_seqs=2), recipe)
    with pytest.raises(InputError, match="at least 0"):
        TrainingRecipe(steps=1, noise_scale_every=-1)


def test_parts_have_the_targets_of_their_sequences(tmp_path: Path) -> None:
    """Documents of 7 tokens: sequences of 8 have one boundary or two, which are no targets here."""
    write_shards(tmp_path, [[1, 2, 3, 4, 5, 6, 7]] * 40, (), vocab_size=32)
    batches = Batches(TokenShards(tmp_path), seq_len=8, batch=10, seed=2, ignore_boundaries=True)
    layout = Layout(dp=4, micro_batch_seqs=1)
    by_replica = [
        [micro_batch.num_targets for micro_batch in batches.sequences(3, replica, 4, 1)] for replica in range(4)
    ]  # of each replica, by micro-batch
    assert list(targets_of_parts(batches, 3, layout, 4)) == [by_replica[r][m] for m in range(3) for r in range(4)]
    together = list(targets_of_parts(batches, 3, layout, 2))
    assert together == [by_replica[r][m] + by_replica[r + 1][m] for m in range(3) for r in (0, 2)]
    assert sum(together) == batches.num_targets(3)
