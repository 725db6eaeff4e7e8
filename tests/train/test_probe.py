"""The short look at the machine before and after a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from train.stand_in import World, small_plan

from shardwise.model.job import Job
from shardwise.run.trainer import machine_probe as module
from shardwise.run.trainer.machine_probe import time_machine_probe
from shardwise.run.transport.lone_rank import LoneRank
from shardwise.search.plan import plan_layout


def test_products_are_of_the_plans_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET_S", 0.0)
    world = World(0, 1, torch.device("cpu"), None, LoneRank())
    small = small_plan()
    wide = replace(small.model, d_model=1024, d_ff=4096, num_heads=16, num_kv_heads=16, head_dim=64)
    job = Job(global_batch_tokens=1024, seq_len=1024, precision="fp32")
    plans, runs = (small, plan_layout(wide, small.cluster, job, small.layout)), module.WARM_UPS + module.REPEATS
    for plan, (m, k, n) in zip(plans, ((256, 256, 256), (1024, 1024, 4096)), strict=True):
        with FlopCounterMode(display=False) as counter:
            seconds_by_kind = time_machine_probe(plan, world)
        assert seconds_by_kind.keys() == {"products", "memory"}
        assert all(seconds > 0 for seconds in seconds_by_kind.values())
        assert counter.get_total_flops() == runs * 2 * m * k * n


def test_work_is_repeated_for_its_time_or_as_often_as_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks run a collective as often, whatever time it takes on each."""
    cpu, calls = torch.device("cpu"), Counter[str]()
    monkeypatch.setattr(module, "BUDGET_S", 0.05)
    module._time_median(lambda: calls.update(["timed"]), cpu)
    module._time_median(lambda: calls.update(["counted"]), cpu, exactly=3)
    assert calls["counted"] == module.WARM_UPS + 3
    assert calls["timed"] > module.WARM_UPS + module.REPEATS
