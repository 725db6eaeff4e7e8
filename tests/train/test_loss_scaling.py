"""Training in fp16: the scaled loss, skipped steps, and what a checkpoint keeps of the scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_narrow_products import DENSE, MOE, POSITIONS, SEQS, batches

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.run.mixed_precision import LossScaler
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS

RECIPE = TrainingRecipe(steps=20, learning_rate=3e-3, warmup_steps=5)


def engine_of(
    recipe: TrainingRecipe = RECIPE, architecture: Architecture = DENSE, precision: str = "fp16"
) -> TrainingEngine:
    instance = RankProgram(
        architecture=architecture,
        layout=Layout(micro_batch_seqs=SEQS),
        precision=PRECISIONS[precision],
        seq_len=POSITIONS,
    )
    engine = TrainingEngine(instance, recipe, World(instance.mesh))
    engine.initialize(0)
    return engine


def state_of(engine: TrainingEngine) -> list[torch.Tensor]:
    return [values.clone() for _, _, values in engine.checkpoint_tensors()]


def test_the_scale_follows_gradscaler() -> None:
    recipe = TrainingRecipe(steps=1, loss_scale=2.0**24, loss_scale_interval=3)
    scaler = LossScaler(recipe)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    random = torch.Generator().manual_seed(3)
    scales = set()
    for _ in range(60):
        is_finite = bool(torch.rand((), generator=random) > 0.15)
        grad_scaler.scale(weight.sum())
        weight.grad = torch.full((2,), 1.0 if is_finite else torch.inf)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        scaler.update(is_finite=is_finite)
        assert scaler.scale == grad_scaler.get_scale()
        scales.add(scaler.scale)
    assert len(scales) > 3


def test_no_scale_below_1_helps() -> None:
    scaler = LossScaler(TrainingRecipe(steps=1, loss_scale=2.0))
    scaler.update(is_finite=False)
    with pytest.raises(InputError, match="not finite at a scale of 1; finite ones are required"):
        scaler.update(is_finite=False)


@pytest.mark.parametrize(
    "architecture", [DENSE, MOE, replace(DENSE, num_predict_layers=1)], ids=["dense", "moe", "further"]
)
def test_the_scale_changes_no_step_in_fp32(architecture: Architecture) -> None:
    """A power of two leaves every bit of a float's mantissa: loss, norm and weights are the same."""
    plain, scaled = (engine_of(RECIPE, architecture, "fp32") for _ in range(2))
    scaled.scaler = LossScaler(replace(RECIPE, loss_scale=2.0**10))
    for step, batch in enumerate(batches(3)):
        results = [engine.step([batch], SEQS * POSITIONS, 1, step) for engine in (plain, scaled)]
        assert float(results[0].loss) == float(results[1].loss)
        assert float(results[0].norm) == pytest.approx(float(results[1].norm), rel=1e-6)
    for plain_tensor, scaled_tensor in zip(state_of(plain), state_of(scaled), strict=True):
        torch.testing.assert_close(plain_tensor, scaled_tensor, rtol=1e-5, atol=1e-7)


def test_small_gradients_are_lost_without_a_scale_and_kept_with_one() -> None:
    lost = []
    for scale in (1.0, 2.0**16):
        engine = engine_of(replace(RECIPE, loss_scale=scale))
        shards: list[torch.Tensor] = []
        engine.gradients_ended = lambda engine=engine, shards=shards: shards.extend(
            group.gradient_shard.clone() for group in engine.groups
        )
        engine.step(batches(1), SEQS * POSITIONS * 2**14, 1, 0)  # as of a global batch that is so much larger
        values = torch.cat([shard.flatten() for shard in shards])
        lost.append(float((values == 0).double().mean()))
    assert lost[0] > 0.5
    assert lost[1] < 0.2 * lost[0]


def test_a_step_that_overflows_is_left_out_and_the_scale_falls() -> None:
    engine = engine_of(replace(RECIPE, loss_scale=2.0**30))
    before, skipped = state_of(engine), []
    for step, batch in enumerate(batches(16)):
        result = engine.step([batch], SEQS * POSITIONS, 1, step)
        skipped.append(result.skipped)
        assert torch.isfinite(result.loss)
        if all(skipped):
            assert all(map(torch.equal, state_of(engine), before))
    assert engine.scaler is not None
    assert skipped[:2] == [True, True]
    assert not skipped[-1]
    assert engine.scaler.num_skipped == sum(skipped)
    assert engine.scaler.scale == 2.0 ** (30 - sum(skipped))
    assert not all(map(torch.equal, state_of(engine), before))
    updated = (updater for parts in engine.updater.by_element for updater in parts)
    steps = {float(state["step"]) for updater in updated for state in updater.optimizer.state.values()}
    assert steps == {float(len(skipped) - sum(skipped))}
