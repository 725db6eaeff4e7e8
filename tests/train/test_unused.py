"""A weight that a micro-batch does not use has no gradient in it, and takes none from any other."""

from __future__ import annotations

import pytest
import torch

from shardwise.layout.layout import Layout
from shardwise.lowering.instance import Instance
from shardwise.model.architecture import Architecture
from shardwise.precision import PRECISIONS
from shardwise.train.engine import Engine, MicroBatch
from shardwise.train.recipe import Recipe
from shardwise.train.world import World

SMALL = Architecture(
    name="small", num_layers=1, d_model=8, d_ff=12, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=11
)
TOKENS = torch.arange(24).reshape(2, 12) % 11
BATCH = MicroBatch(TOKENS[:, :-1], TOKENS[:, 1:])


@pytest.mark.parametrize("precision", ["fp32", "bf16_fp32_main_gradients", "bf16_fp32_gradients"])
def test_an_unused_weight_has_no_gradient_and_its_neighbours_keep_theirs(precision: str) -> None:
    instance = Instance(architecture=SMALL, layout=Layout(micro_batch_seqs=2), precision=PRECISIONS[precision])
    engine = Engine(instance, Recipe(steps=2, clip_norm=None), World(instance.mesh))
    engine.initialise(0)
    engine.step([BATCH], BATCH.ids_BT.numel(), 1, 0)  # every weight has one, which the next step must not see
    used = gradients(engine)
    engine.model.head.norm = lambda x, name: x  # type: ignore[method-assign]
    engine.step([BATCH], BATCH.ids_BT.numel(), 1, 1)
    found = gradients(engine)
    assert all(gradient.any() for gradient in used.values())
    assert not found.pop("head.final_norm_weight").any()
    assert all(gradient.any() for gradient in found.values())


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        one.member.parameter.name: group.gradient_shard[one.start : one.start + one.size].clone()
        for group in engine.groups
        for one in group.intervals()
    }
