"""A training step of the engine by Triton's kernels, in the interpreter, beside the same step by PyTorch's; and the passes over
memory that the planner prices for a fused norm."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_loss_scaling import RECIPE, engine_of, state_of
from test_narrow_products import DENSE, batches
from test_narrow_products import POSITIONS as LENGTH
from test_narrow_products import SEQS as BATCH
from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.kernels import device_dispatch
from shardwise.run.parallel.world import World
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.run.triton_kernels import norms
from shardwise.run.triton_kernels.traffic import norm_backward_traffic, norm_forward_traffic
from shardwise.step.kernel_fusion import list_kernels
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import PRECISIONS
from shardwise.values.symbolic import LocalDim

SEQS, POSITIONS = 1, 4
SMALL = replace(DENSE, num_layers=1, d_model=32, d_ff=48, num_heads=2, num_kv_heads=1)
LAYER_NORM = replace(SMALL, norm="layer", name="layer norm")


def train_step(architecture: Architecture, recompute: str) -> list[Tensor]:
    """Return weights and moments after a step."""
    instance = RankProgram(
        architecture=architecture, layout=Layout(micro_batch_seqs=SEQS, recompute=recompute),
        precision=PRECISIONS["fp32"], seq_len=POSITIONS,
    )  # fmt: skip
    engine = TrainingEngine(instance, RECIPE, World(instance.mesh))
    engine.initialize(0)
    ids = torch.randint(architecture.vocab_size, (SEQS, POSITIONS + 1), generator=torch.Generator().manual_seed(0))
    engine.step([MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())], SEQS * POSITIONS, 1, 0)
    return state_of(engine)


@pytest.mark.parametrize(("architecture", "recompute"), [(SMALL, "none"), (LAYER_NORM, "full")])
def test_a_step_by_fused_norms(architecture: Architecture, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has a norm of its input and one of a sum: the second takes the sum with it, and both gradients that of the
    residual stream. The norm before the head has no stream behind it."""
    expected, launches = train_step(architecture, recompute), Counter[tuple[str, bool]]()
    forward, backward = norms.norm_forward, norms.norm_backward

    def count_forward(x: Tensor, residual: Tensor | None, *arguments: object, **options: object) -> object:
        launches["forward", residual is not None] += 1
        return forward(x, residual, *arguments, **options)

    def count_backward(*arguments: object, **options: object) -> object:
        launches["backward", arguments[4] is not None] += 1
        return backward(*arguments, **options)

    monkeypatch.setattr(norms, "norm_forward", count_forward)
    monkeypatch.setattr(norms, "norm_backward", count_backward)
    monkeypatch.setattr(device_dispatch, "TRITON_DEVICES", {"cpu"})
    computed = train_step(architecture, recompute)
    passes, layers = 2 if recompute == "full" else 1, architecture.num_layers
    assert launches == Counter({
        ("forward", True): passes * layers, ("forward", False): passes * layers + 1,
        ("backward", True): 2 * layers, ("backward", False): 1,
    })  # fmt: skip
    for ours, theirs in zip(computed, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_an_update_in_one_pass_clips_and_writes_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16 with master copies and a scaled loss: the same gradients update by the kernel and by PyTorch's. The second step
    is not allowed."""
    engines = []
    for devices in ({"cpu"}, set[str]()):
        monkeypatch.setattr(device_dispatch, "TRITON_DEVICES", devices)
        engines.append(engine_of(replace(RECIPE, loss_scale=2.0**10, clip_norm=0.01), SMALL, "fp16"))
    update = engines[0].updater.step

    def update_by_triton(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(device_dispatch, "TRITON_DEVICES", {"cpu"})
            return update(*arguments, **options)

    monkeypatch.setattr(engines[0].updater, "step", update_by_triton)
    before = state_of(engines[0])
    for step, batch in enumerate(batches(2)):
        for engine in engines:
            engine.update_check = lambda loss, norm, step=step: loss * (step == 0) > 0.0
            engine.step([batch], BATCH * LENGTH, 1, step)
        for ours, theirs in zip(*map(state_of, engines), strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
        for group in engines[0].groups:
            assert torch.equal(group.shard, group.state.half())
    assert not any(map(torch.equal, before, state_of(engines[0])))


class Sizes(dict[Any, float]):
    """Sizes of dims on one device, by symbol."""

    def __missing__(self, symbol: LocalDim) -> float:
        return self[symbol.dim]


@pytest.mark.parametrize("architecture", [SMALL, LAYER_NORM], ids=lambda architecture: str(architecture.norm))
def test_the_planner_prices_the_passes_of_the_kernels(architecture: Architecture) -> None:
    """Elements that the plan's kernels read and write are those of the closed forms, which count the weight and its gradient
    once for each program."""
    rows, width, is_layer = BATCH * LENGTH, architecture.d_model, architecture.norm == "layer"
    sizes = Sizes(B=float(BATCH), T=float(LENGTH), D=float(width))
    unit = engine_of(RECIPE, architecture, "fp32").model.layers[1].unit.unit
    planned = {
        kernel.phase: sum(float(elements.evaluate(sizes)) for elements in kernel.elements.values())
        for kernel in list_kernels(unit) if {"mlp_norm.out", "d.x_mid"} & set(kernel.outputs)
    }  # fmt: skip
    kind = {"is_layer": is_layer, "has_residual": True}
    forward = norm_forward_traffic(rows, width, 4, **kind)
    backward = norm_backward_traffic(rows, width, 4, **kind, num_programs=1)
    assert planned == {
        "forward": (forward.loaded_bytes + forward.stored_bytes) / 4 - (rows - 1) * width,
        "backward": (backward.loaded_bytes + backward.stored_bytes) / 4,
    }
