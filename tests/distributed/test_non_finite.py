"""A non-finite tensor is named with its rank and unit; all ranks skip the step or go back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_resume import LAYOUTS, SEQ_LEN, SEQS, make_plan
from train.shard_files import write_shards
from training import gathered

from shardwise.run.checkpoints import Checkpointer
from shardwise.run.data.batches import Batches
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.parallel.world import World
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.anomaly_detector import StepAnomaly
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.trainer import Trainer
from shardwise.search.plan import Plan

OVER = ["dp=2", "zero-1 of 3", "zero-2 of 2", "hybrid zero-3 of 4", "tp=2 fsdp=2", "pp=2 zb_v"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    words = np.random.default_rng(0).integers(0, 281, (12, 60)).tolist()
    write_shards(folder, words, vocab_size=281)
    return folder


def trainer_of(plan: Plan, data: Path, policy: str) -> Trainer:
    recipe = TrainingRecipe(steps=8, learning_rate=1e-2, seed=3, non_finite=policy)
    batches = Batches(TokenShards(data), seq_len=SEQ_LEN, batch=SEQS, seed=recipe.seed)
    return Trainer(plan, recipe, batches, World(engine_instance(plan, recipe).mesh))


def spoil(trainer: Trainer, array: str) -> str:
    """Set one element of rank 1's last weight ("state") or reduced gradient to NaN; return the parameter's name."""
    parts = [(group, interval) for group in trainer.engine.groups for interval in group.intervals()]
    group, last = max(parts, key=lambda part: part[1].name)
    if trainer.world.rank == 1:
        getattr(group, array)[last.start] = float("nan")
    return last.name


def find_spoiled_weight(plan: Plan, data: Path) -> tuple[StepAnomaly | None, str]:
    """What is found, and what this rank would have spoiled."""
    trainer = trainer_of(plan, data, "stop")
    trainer.train_step()
    name = spoil(trainer, "state")
    trainer.engine.publish()
    trainer.train_step()
    return trainer.anomaly, name


@pytest.mark.parametrize("layout", OVER)
def test_a_weight_that_is_not_finite_is_named(layout: str, data: Path) -> None:
    plan = make_plan(LAYOUTS[layout], "dense")
    results = run_rank_threads(find_spoiled_weight, plan.layout.num_devices, plan, data)
    unit, _, weight = results[1][1].rpartition(".")
    for trouble, _ in results:
        assert trouble is not None
        assert (trouble.step, trouble.policy) == (2, "non_finite")
        assert f"rank 1: weight {weight} of unit {unit} has 1 of " in trouble.where


def skip_spoiled_step(plan: Plan, data: Path) -> tuple[StepAnomaly | None, str, bool, list[float], int]:
    """A gradient that is not finite in the second step: what is found, what was spoiled, whether the state is as it was, and what
    follows."""
    trainer = trainer_of(plan, data, "skip")
    trainer.train_step()
    before = [values.clone() for _, _, values in trainer.engine.checkpoint_tensors()]
    names: list[str] = []
    trainer.engine.gradients_ended = lambda: names.append(spoil(trainer, "gradient_shard"))
    trainer.train_step()
    trouble = trainer.anomaly
    same = all(map(torch.equal, before, [values for _, _, values in trainer.engine.checkpoint_tensors()]))
    trainer.engine.gradients_ended = lambda: None
    return trouble, names[0], same, [trainer.train_step().loss for _ in range(2)], trainer.num_left_out


def train_without_step(plan: Plan, data: Path) -> list[float]:
    """The same steps without the second one, which is passed over."""
    trainer = trainer_of(plan, data, "skip")
    trainer.train_step()
    trainer.skip_to(2)
    return [trainer.train_step().loss for _ in range(2)]


@pytest.mark.parametrize("layout", ["dp=2", "zero-2 of 2", "hybrid zero-3 of 4"])
def test_a_step_that_is_left_out_changes_no_weight_and_no_moment(layout: str, data: Path) -> None:
    plan = make_plan(LAYOUTS[layout], "dense")
    expected = run_rank_threads(train_without_step, plan.layout.num_devices, plan, data)[0]
    results = run_rank_threads(skip_spoiled_step, plan.layout.num_devices, plan, data)
    unit, _, weight = results[1][1].rpartition(".")
    for trouble, _, same, losses, num_left_out in results:
        assert trouble is not None
        assert trouble.action == "skip"
        assert f"rank 1: gradient {weight} of unit {unit} has 1 of " in trouble.where
        assert same
        assert (losses, num_left_out) == (expected, 1)


def rewind_run(plan: Plan, data: Path, folder: Path, spoiled: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps, a checkpoint, two more of which the last is spoiled, and back; or two steps, and the third and fourth passed
    over."""
    trainer = trainer_of(plan, data, "rewind")
    with Checkpointer(folder / str(spoiled), keep=1) as checkpoints:
        for _ in range(2):
            trainer.train_step()
        checkpoints.save(2, trainer.state())
        if spoiled:
            trainer.train_step()
            spoil(trainer, "state")
            trainer.engine.publish()
            trainer.train_step()
            assert trainer.anomaly is not None
            restored = checkpoints.restore(trainer.state())
            assert restored is not None
            trainer.restore(restored.values)
        trainer.skip_to(4)
        losses = [trainer.train_step().loss for _ in range(3)]
    return losses, gathered(trainer.engine, "state")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("layout", ["dp=2", "zero-2 of 2", "hybrid zero-3 of 4", "pp=2 zb_v"])
def test_after_going_back_the_run_is_one_that_passed_over_the_batches(layout: str, data: Path, tmp_path: Path) -> None:
    plan = make_plan(LAYOUTS[layout], "dense")
    back, expected = (
        run_rank_threads(rewind_run, plan.layout.num_devices, plan, data, tmp_path, spoiled)
        for spoiled in (True, False)
    )
    for (losses, weights), (wanted_losses, wanted_weights) in zip(back, expected, strict=True):
        assert losses == wanted_losses
        assert all(torch.equal(weights[name], wanted_weights[name]) for name in wanted_weights)
