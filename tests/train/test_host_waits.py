"""A step never makes the host wait for a tensor's value before its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from test_loss_scaling import RECIPE, engine_of, state_of
from test_narrow_products import DENSE, MOE, POSITIONS, SEQS, batches
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.layout.layout import Layout
from shardwise.run.kernels import device_dispatch, experts
from shardwise.run.parallel.world import World
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import PRECISIONS

# Operations whose result, or its shape, the host has to know: `float`, `bool` and `item` of a tensor, masks as indices.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero", "equal")


class OperationLog(TorchDispatchMode):
    """Lists the operations that PyTorch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def list_operations(engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the operations of a step of two micro-batches before it ends, when the host reads one tensor."""
    log = OperationLog()
    read_outcome, names = engine._read_outcome, list[str]()

    def end(*arguments: Any) -> Any:
        names.extend(log.names)
        return read_outcome(*arguments)

    monkeypatch.setattr(engine, "_read_outcome", end)
    for module in (device_dispatch, experts):
        monkeypatch.setattr(module, "on_host", lambda *arguments: pytest.fail("counts were copied to the host"))
    with log:
        engine.step(batches(2), 2 * SEQS * POSITIONS, 2, 0)
    return names


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "mxfp8", "fp8_delayed"])
def test_no_value_is_read_before_the_end_of_a_step(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With clipping, and in fp16 with a scaled loss."""
    names = list_operations(engine_of(RECIPE, DENSE, precision), monkeypatch)
    assert len(names) > 100
    assert [name for name in names if name in WAITS] == []


def test_experts_of_one_device_wait_for_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grouped product of PyTorch, as on a GPU in bf16, makes the host wait for nothing."""
    monkeypatch.setattr(experts, "has_grouped_kernel", lambda rows, weight: True)
    names = list_operations(engine_of(RECIPE, MOE, "bf16"), monkeypatch)
    assert "_grouped_mm" in names
    assert [name for name in names if name in WAITS] == []


def optimizer_engine(optimizer: str) -> TrainingEngine:
    instance = RankProgram(
        architecture=DENSE, layout=Layout(micro_batch_seqs=SEQS), precision=PRECISIONS["bf16"], seq_len=POSITIONS,
        optimizer=optimizer,
    )  # fmt: skip
    engine = TrainingEngine(instance, RECIPE, World(instance.mesh))
    engine.initialize(0)
    return engine


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adamw_8bit", "muon", "adafactor"])
def test_a_step_that_is_not_allowed_changes_nothing(optimizer: str) -> None:
    """The device decides; weights, moments and counts of steps are those of a run without the step."""
    engine, expected = optimizer_engine(optimizer), optimizer_engine(optimizer)
    first, spoiled, last = batches(3)
    for step, batch in enumerate((first, spoiled, last)):
        engine.update_check = lambda loss, norm, step=step: loss * (step != 1) > 0.0
        result = engine.step([batch], SEQS * POSITIONS, 1, step)
        assert result.is_update == (step != 1)
        if step != 1:
            expected.step([batch], SEQS * POSITIONS, 1, step)
        assert all(map(torch.equal, state_of(engine), state_of(expected)))
