"""The short look at the machine before and after a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from train.stand_in import World, small_plan

from shardwise.job import Job
from shardwise.planning.plan import plan_layout
from shardwise.train import probe as module
from shardwise.train.probe import probe


def test_larger_products_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET_S", 0.0)
    world = World(0, 1, torch.device("cpu"))
    small = small_plan()
    wide = replace(small.model, d_model=1024, d_ff=4096, num_heads=16, num_kv_heads=16, head_dim=64)
    job = Job(global_batch_tokens=1024, seq_len=1024, precision="fp32")
    found = [probe(plan, world) for plan in (small, plan_layout(wide, small.cluster, job, small.layout))]
    assert [one.keys() for one in found] == [{"products", "memory"}] * 2
    assert found[1]["products"] > 4 * found[0]["products"]  # 64 times the FLOPs
    assert all(seconds > 0 for one in found for seconds in one.values())
