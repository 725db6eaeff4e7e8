"""The price of a pipeline whose stages differ, against the step that is played of all of its stages."""

from __future__ import annotations

import pytest

from shardwise.cluster.load import load_cluster
from shardwise.cost.estimate import estimate
from shardwise.cost.pricing import Pricing
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.model.load import load_model
from shardwise.simulate.step import simulated

# A model, a cluster, micro-batches. The head of Llama 3 8B takes two and a half layers, that of Gemma 2 9B six.
EIGHT, EIGHT_BY_FOUR = ("llama-3-8b", "h100:16", 32), ("llama-3-8b", "h100:16", 16)
SEVENTY, GEMMA, MIXTRAL = ("llama-3-70b", "h100:64", 32), ("gemma-2-9b", "h100:8", 16), ("mixtral-8x7b", "h100:32", 16)
WHOLE = [
    (*EIGHT, "pp=16"), (*EIGHT, "pp=16 schedule=afab"), (*EIGHT, "pp=16 num_virtual_stages=2"),
    (*EIGHT, "pp=16 num_virtual_stages=2 schedule=looped_bfs"),
    (*EIGHT, "pp=16 num_virtual_stages=2 schedule=interleaved_breadth_first"),
    (*EIGHT_BY_FOUR, "tp=4 pp=4"), (*EIGHT_BY_FOUR, "tp=4 pp=4 num_virtual_stages=2"),
    (*EIGHT_BY_FOUR, "tp=4 pp=4 num_virtual_stages=4"),
    (*SEVENTY, "tp=8 pp=8"), (*SEVENTY, "tp=8 pp=8 num_virtual_stages=2"), (*SEVENTY, "tp=8 pp=8 num_virtual_stages=5"),
    (*GEMMA, "pp=8"), (*GEMMA, "pp=8 num_virtual_stages=2"),
    (*MIXTRAL, "fsdp=8 ep=8 pp=4 zero_stage=1"), (*MIXTRAL, "fsdp=8 ep=8 pp=4 zero_stage=1 num_virtual_stages=2"),
]  # fmt: skip
SPLIT = [
    (*EIGHT, "pp=16 schedule=zb_h1"), (*EIGHT, "pp=16 schedule=dualpipe"),
    (*EIGHT, "pp=16 num_virtual_stages=2 schedule=interleaved_zb"), (*EIGHT, "pp=16 num_virtual_stages=2 schedule=zb_v"),
    (*EIGHT, "pp=16 num_virtual_stages=2 schedule=dualpipe_v"),
    (*EIGHT_BY_FOUR, "tp=4 pp=4 schedule=zb_h1"), (*EIGHT_BY_FOUR, "tp=4 pp=4 num_virtual_stages=2 schedule=zb_v"),
    (*SEVENTY, "tp=8 pp=8 schedule=zb_h1"), (*SEVENTY, "tp=8 pp=8 num_virtual_stages=2 schedule=zb_v"),
    (*MIXTRAL, "fsdp=8 ep=8 pp=4 zero_stage=1 num_virtual_stages=2 schedule=dualpipe_v"),
]  # fmt: skip
Case = tuple[str, str, int, str]


def off(model: str, cluster: str, num_micro_batches: int, layout: str) -> float:
    """By how much the price is longer than the played step, under the same convention of overlap."""
    chosen, devices = Layout.parse(layout), load_cluster(cluster)
    job = Job(global_batch_tokens=num_micro_batches * chosen.num_replicas * 4096, seq_len=4096, overlap="per_axis")
    pricing = Pricing(load_model(model), devices, job, chosen)
    assert pricing.num_micro_batches == num_micro_batches
    return (
        estimate(pricing.architecture, devices, job, chosen).step_time_s / simulated(pricing, "per_axis").step_time_s
        - 1
    )


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: f"{case[0]}-{case[3]}")
def test_stages_with_whole_backward_passes(case: Case) -> None:
    """A stage waits for the passes of the others, not for as many of its own."""
    assert abs(off(*case)) < 0.016


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: f"{case[0]}-{case[3]}")
def test_stages_with_split_backward_passes(case: Case) -> None:
    """The closed forms hold for stages that take alike: of others they are near."""
    assert abs(off(*case)) < 0.065


def test_a_stage_in_the_middle_that_takes_longest_fills_waits() -> None:
    """1F1B runs ahead of the stages behind it, which the mean of the others leaves out: an upper bound."""
    layout = "fsdp=64 ep=64 pp=16 zero_stage=1 recompute=full"
    assert 0 < off("deepseek-v3", "h100:1024", 32, layout) < 0.075
