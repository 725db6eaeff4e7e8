"""The memory of a plan against the memory of each rank over its simulated step."""

from __future__ import annotations

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.pipeline.actions import BACKWARD_INPUT, FORWARD, FULL_BACKWARD
from shardwise.pipeline.registry import build_actions, get_schedule, min_virtual_stages, pipeline_schedule_names
from shardwise.price import Problem
from shardwise.price.estimate_terms import MEMORY
from shardwise.price.layout_pricer import Pricing
from shardwise.price.simulation.result import memory_over_time
from shardwise.price.simulation.simulated_step import simulate_step

EIGHT, DEEP = ("llama-3-8b", "h100:16", 32), ("deepseek-v3", "h100:1024", 32)
ALL = "fsdp=64 ep=64 pp=16 zero_stage=1 recompute=full num_virtual_stages=2"


def planned_and_simulated(
    model: str, cluster: str, num_micro_batches: int, layout: str
) -> tuple[list[float], list[float]]:
    """The memory of each rank of a plan, and the peak of its simulated step."""
    chosen = Layout.parse(layout)
    job = Job(global_batch_tokens=num_micro_batches * chosen.num_replicas * 4096, seq_len=4096)
    pricing = Pricing(Problem(load_model(model), load_cluster(cluster), job), chosen)
    planned = [sum(MEMORY.values(memory).values()) for memory in pricing.memories(pricing.stages())]
    return planned, [rank.peak_bytes for rank in memory_over_time(simulate_step(pricing))]


def relative_errors(model: str, cluster: str, num_micro_batches: int, layout: str) -> list[float]:
    """Relative excess of a plan's memory over the peak of each rank."""
    bytes_and_peaks = planned_and_simulated(model, cluster, num_micro_batches, layout)
    return [planned / peak - 1 for planned, peak in zip(*bytes_and_peaks, strict=True)]


@pytest.mark.parametrize("layout", ["pp=16 schedule=afab", "pp=16 num_virtual_stages=2 schedule=looped_bfs"])
def test_the_head_keeps_all_micro_batches_under_all_forward_all_backward(layout: str) -> None:
    """Regression: its saved tensors were counted once, 3% to 5% too little on the last rank."""
    assert relative_errors(*EIGHT, layout) == pytest.approx([0.0] * 16, abs=1e-6)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3-70b", "tp=8 pp=8 num_virtual_stages=3 sequence_parallel=true"),
        ("llama-3-70b", "tp=8 pp=8 num_virtual_stages=3 sequence_parallel=true schedule=interleaved_zb"),
        ("llama-3-405b", "tp=8 pp=16 num_virtual_stages=7 sequence_parallel=true"),
    ],
)
def test_uneven_virtual_stages_keep_more_of_their_earliest_layers(model: str, layout: str) -> None:
    """The fullest rank was planned 5% too small in all."""
    devices = Layout.parse(layout).num_devices
    worst = max(map(abs, relative_errors(model, f"h100:{devices}", 32, layout)[1:-1]))
    assert worst < 0.001


@pytest.mark.parametrize(("layout", "limit"), [(ALL, 0.03), (f"{ALL} schedule=zb_v", 0.002)])
def test_a_module_of_multi_token_prediction_keeps_the_micro_batches_of_the_last_virtual_stage(
    layout: str, limit: float
) -> None:
    """Regression: it was counted for all virtual stages of its rank, 43% and 98% too much."""
    assert max(map(abs, relative_errors(*DEEP, layout))) < limit


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3-70b", "tp=8 pp=8 sequence_parallel=true schedule=dualpipe"),
        ("llama-3-405b", "tp=8 pp=16 sequence_parallel=true schedule=dualpipe"),
        ("llama-3-70b", "tp=8 pp=8 sequence_parallel=true num_virtual_stages=2 schedule=dualpipe_v"),
        ("llama-3-70b", "tp=8 pp=8 sequence_parallel=true num_virtual_stages=2 schedule=zb_v"),
        ("llama-3-70b", "tp=8 pp=8 sequence_parallel=true num_virtual_stages=2 recompute=full schedule=zb_v"),
        ("llama-3-70b", "tp=8 pp=8 sequence_parallel=true recompute=full schedule=zb_h1"),
        ("deepseek-v3", "fsdp=64 ep=64 pp=16 zero_stage=1 recompute=selective schedule=dualpipe"),
        ("deepseek-v3", "fsdp=64 ep=64 pp=16 zero_stage=1 recompute=full schedule=dualpipe"),
    ],
)
def test_tensors_that_await_weight_gradients_count_while_the_list_keeps_them(model: str, layout: str) -> None:
    """The fullest rank to the byte, also under full recomputation, where tensors that wait for W exceed the saved ones.
    Regression: all of them were counted in addition to all in flight (DeepSeek-V3 under DualPipe: 15% too much), and the
    two stages of a rank as equal (70B on pp=16: 2.6% too little)."""
    devices = Layout.parse(layout).num_devices
    planned, simulated_peaks = planned_and_simulated(model, f"h100:{devices}", 64, layout)
    assert max(planned) == pytest.approx(max(simulated_peaks), rel=1e-3)


@pytest.mark.parametrize("schedule", pipeline_schedule_names())
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 32)])
def test_micro_batches_at_the_last_stage_equal_those_of_the_list(schedule: str, p: int, m: int) -> None:
    v = min_virtual_stages(schedule, p)
    actions = build_actions(schedule, p, m, v)
    last = actions.num_stages - 1
    changes = {FORWARD: 1, FULL_BACKWARD: -1, BACKWARD_INPUT: -1}
    peak = 0
    for slots in actions.order:
        in_flight = 0
        for slot in slots:
            changes_of_slot = [changes.get(action.kind, 0) for action in slot if action.stage == last]
            peak = max(peak, in_flight + changes_of_slot.count(1))
            in_flight += sum(changes_of_slot)
    assert peak == get_schedule(schedule).num_at_end(p, v, m)
