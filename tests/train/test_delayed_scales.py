"""Scales from earlier steps: the rule by hand, tensors equal to the reference bit for bit, and runs with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_narrow_products import POSITIONS, SEQS, batches, engine_of

from shardwise.run.kernels import matmul, quantization
from shardwise.run.parallel.delayed_scaling import AmaxScaler
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.values.errors import InputError
from shardwise.values.precision import DelayedScaling
from shardwise.values.quantization import update_amax_history

MAX, LATEST, HALVED = (
    DelayedScaling(history=3),
    DelayedScaling(history=3, algorithm="most_recent"),
    DelayedScaling(history=3, margin=1),
)
# Of one tensor in E4M3 (448): what is seen step by step, and the factor that each next step has.
BY_HAND = {
    "the largest of three steps": (MAX, [7, 14, 1, 2, 3], [64, 32, 32, 32, 448 / 3]),
    "the last step": (LATEST, [7, 14, 1, 2, 4], [64, 32, 448, 224, 112]),
    "half of it": (HALVED, [7, 14, 1, 2, 4], [32, 16, 16, 16, 56]),
    "zeros leave it": (LATEST, [7, 0, 0, 14], [64, 64, 64, 32]),
    "infinity and NaN are not seen": (MAX, [7, np.inf, np.nan, 28], [64, 64, 64, 16]),
    "no factor overflows": (LATEST, [2.0**-140, 1], [np.finfo(np.float32).max, 448]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_factors_follow_from_the_amax_history(name: str) -> None:
    delayed, sizes, expected = BY_HAND[name]
    history, factors = np.zeros((1, delayed.history), np.float32), np.ones(1, np.float32)
    computed = []
    for size in sizes:
        history, factors = update_amax_history(np.float32([size]), history, factors, np.float32([448]), delayed)
        computed.append(float(factors[0]))
    assert computed == [float(np.float32(factor)) for factor in expected]


@pytest.mark.parametrize("delayed", [MAX, LATEST, HALVED], ids=str)
def test_tensors_have_the_factors_of_the_reference(delayed: DelayedScaling) -> None:
    random, count = np.random.default_rng(0), 50
    largest = np.where(np.arange(count) % 2, 448, 57344).astype(np.float32)
    scales = AmaxScaler({}, torch.from_numpy(largest), delayed)
    history, factors = np.zeros((count, delayed.history), np.float32), np.ones(count, np.float32)
    for _ in range(6):
        sizes = np.exp2(random.uniform(-140, 100, count)).astype(np.float32) * (random.random(count) < 0.7)
        history, factors = update_amax_history(sizes, history, factors, largest, delayed)
        scales.end_step(torch.from_numpy(sizes))
        assert scales.factors.numpy().tobytes() == factors.tobytes()
        assert scales.history.numpy().tobytes() == history.tobytes()


def engine_after(num_steps: int, recipe: TrainingRecipe) -> TrainingEngine:
    engine = engine_of("fp8_delayed", recipe=recipe)
    for step, batch in enumerate(batches(num_steps)):
        engine.step([batch], SEQS * POSITIONS, 1, step)
    return engine


def test_every_cast_of_a_step_has_the_scale_of_the_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes recorded at each cast are the history that the expected factors are computed from."""
    casts: list[tuple[float, float, float]] = []
    quantised = quantization.quantize_matrix

    def looked(matrix: torch.Tensor, to: object, block: object, kind: object, factor: torch.Tensor) -> object:
        casts.append((float(matrix.abs().max()), float(factor), to.max))  # type: ignore[attr-defined]
        return quantised(matrix, to, block, kind, factor)  # type: ignore[arg-type]

    monkeypatch.setattr(matmul, "quantize_matrix", looked)
    engine = engine_after(1, TrainingRecipe(steps=3, amax_history=2))
    assert {factor for _, factor, _ in casts} == {1.0}
    assert engine.scales.model is not None
    sizes = {size for size, _, _ in casts}
    assert set(engine.scales.model.history[:, 0].tolist()) == sizes
    expected = {float(np.float32(largest) / np.float32(size)) if size else 1.0 for size, _, largest in casts}
    casts.clear()
    engine.step(batches(1), SEQS * POSITIONS, 1, 1)
    assert {factor for _, factor, _ in casts} == expected


def test_evaluation_leaves_the_scales_of_training() -> None:
    engine = engine_after(2, TrainingRecipe(steps=9))
    scales = engine.scales.model
    assert scales is not None
    before = scales.factors.clone(), scales.history.clone()
    for layer in engine.model.layers:
        for weight in layer.weights.values():
            weight.mul_(64)
    engine.loss(list(batches(1)), SEQS * POSITIONS)
    for layer in engine.model.layers:
        for weight in layer.weights.values():
            weight.div_(64)
    assert torch.equal(before[0], scales.factors)
    expected = engine_after(3, TrainingRecipe(steps=9))
    engine.step(list(batches(3))[2:], SEQS * POSITIONS, 1, 2)
    assert expected.scales.model is not None
    assert torch.equal(scales.factors, expected.scales.model.factors)
    assert torch.equal(scales.history, expected.scales.model.history)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"amax_history": 0}, "amax_history is 0; a number of steps from 1 to 65,536 is required"),
        ({"amax_algorithm": "mean"}, "amax_algorithm is 'mean'; one of max, most_recent is required"),
        ({"amax_margin": -1}, "amax_margin is -1; a power of two from 0 to 16 is required"),
    ],
)
def test_invalid_scale_settings_of_a_recipe_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        replace(TrainingRecipe(steps=1), **changes)  # type: ignore[arg-type]
