"""A weight that a micro-batch does not use has a zero gradient, and its neighbours' gradients are unaffected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import PRECISIONS

SMALL = Architecture(
    name="small", num_layers=1, d_model=8, d_ff=12, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=11,
    num_experts=4, experts_per_token=2,
)  # fmt: skip
ALL_WORDS = torch.arange(24).reshape(2, 12) % 11
FEW_WORDS = torch.arange(24).reshape(2, 12) % 5
EXPERTS = ("layers.0.experts_gate", "layers.0.experts_up", "layers.0.experts_down")


def engine_of(precision: str) -> TrainingEngine:
    instance = RankProgram(architecture=SMALL, layout=Layout(micro_batch_seqs=2), precision=PRECISIONS[precision])
    engine = TrainingEngine(
        instance, TrainingRecipe(steps=3, clip_norm=None, balance="none", learning_rate=0.0), World(instance.mesh)
    )
    engine.initialize(0)
    return engine


def step_gradients(engine: TrainingEngine, micro_batches: Sequence[tuple[Tensor, Sequence[int]]]) -> dict[str, Tensor]:
    """The gradients of a step of micro-batches, each with its words and the experts that all of its tokens take."""
    (bias,) = engine.model.balance_biases.values()

    def chosen() -> Iterator[MicroBatch]:
        for words, experts in micro_batches:
            bias.zero_()
            bias[list(experts)] = 10.0
            yield MicroBatch(words[:, :-1], words[:, 1:])

    engine.step(chosen(), 2 * 22, len(micro_batches), 0)
    return {
        part.member.parameter.name: group.gradient_shard[part.start : part.start + part.size]
        .view(part.member.shape)
        .clone()
        for group in engine.groups
        for part in group.intervals()
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_fp32_main_gradients", "bf16_fp32_gradients"])
def test_an_unused_weight_has_no_gradient_and_its_neighbours_keep_theirs(precision: str) -> None:
    """Of a step before, which used it, nothing is left."""
    engine = engine_of(precision)
    used = step_gradients(engine, [(ALL_WORDS, (0, 1)), (ALL_WORDS, (2, 3))])
    assert all(
        gradient.flatten(1).any(dim=1).all() if gradient.dim() > 1 else gradient.any() for gradient in used.values()
    )
    gradients = step_gradients(engine, [(FEW_WORDS, (0, 1))])
    assert gradients["embedding.embedding"].any(dim=1).tolist() == [True] * 5 + [False] * 6
    for name in EXPERTS:
        assert gradients[name].flatten(1).any(dim=1).tolist() == [True, True, False, False]
    assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_fp32_main_gradients", "bf16_fp32_gradients"])
def test_a_weight_that_one_micro_batch_uses_keeps_its_gradient_through_the_next(precision: str) -> None:
    engine = engine_of(precision)
    first, second = (ALL_WORDS, (0, 3)), (FEW_WORDS, (0, 1))
    first_step, both_steps = step_gradients(engine, [first]), step_gradients(engine, [first, second])
    assert torch.equal(both_steps["embedding.embedding"][5:], first_step["embedding.embedding"][5:])
    for name in EXPERTS:
        assert torch.equal(both_steps[name][3], first_step[name][3])
        assert not both_steps[name][2].any()
        assert not torch.equal(both_steps[name][0], first_step[name][0])
