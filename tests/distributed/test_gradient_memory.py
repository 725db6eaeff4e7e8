"""Scattered gradients are written to uninitialised memory, whose old contents do not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_equality import error
from training import Case, engine_of, gathered, run_step

from shardwise.layout.layout import Layout
from shardwise.run.parallel.flat_parameters import FlatParameterGroup
from shardwise.run.rank_threads import run_rank_threads

CASES = {
    "zero 2, sizes that three ranks do not divide": Case("uneven", Layout(fsdp=3, zero_stage=2), num_seqs=6),
    "zero 3": Case("dense", Layout(fsdp=2, zero_stage=3), num_seqs=8),
    "experts": Case("routed", Layout(ep=2, fsdp=2, zero_stage=2), num_seqs=8),
    "modules of prediction": Case("predicting", Layout(fsdp=2, zero_stage=2), num_seqs=8),
    "the norm of each micro-batch": Case("dense", Layout(fsdp=2, zero_stage=1), 8, {"noise_scale_every": 1}),
}


def two_steps(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_of(case)
    losses = [float(run_step(engine, case, step).loss) for step in range(2)]
    return losses, gathered(engine, "gradient_shard")


@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_what_their_memory_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes = CASES[name], []
    (losses, expected), *_ = run_rank_threads(two_steps, case.layout.num_devices, case)

    def fill(group: FlatParameterGroup, size: int, dtype: torch.dtype) -> Any:
        sizes.append(size)
        return torch.full((size,), torch.nan, dtype=dtype)

    monkeypatch.setattr(FlatParameterGroup, "empty", fill)
    (found_losses, gradients), *_ = run_rank_threads(two_steps, case.layout.num_devices, case)
    assert sizes
    assert found_losses == losses
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert error(gradient, expected[parameter]) == 0.0, parameter
