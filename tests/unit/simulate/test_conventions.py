"""The simulated step under an overlap convention equals the estimate's closed form to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.layout_pricer import Pricing
from shardwise.price.simulation.result import simulate
from shardwise.price.simulation.simulated_step import SimulatedStep, StepSimulator, simulate_step
from shardwise.price.simulation.stage_passes import CONVENTION_STREAMS
from shardwise.price.stage_step_time import StageStep

LAYOUTS = [
    ("llama-3-8b", "h100:16", "dp=16"),
    ("llama-3-8b", "h100:16", "fsdp=16 zero_stage=1"),
    ("llama-3-8b", "h100:16", "fsdp=16 zero_stage=2 micro_batch_seqs=2"),
    ("llama-3-8b", "h100:16", "fsdp=16 zero_stage=3"),
    ("llama-3-8b", "h100:16", "dp=2 fsdp=4 tp=2 zero_stage=3 recompute=full"),
    ("llama-3-8b", "h100:16", "dp=2 fsdp=2 tp=4 zero_stage=1 sequence_parallel=false"),
    ("llama-3-8b", "h100:16", "fsdp=8 tp=2 async_tp=true recompute=selective"),
    ("llama-3-8b", "h100:16", "fsdp=8 cp=2 zero_stage=2 recompute=full"),
    ("llama-3-8b", "h100:16", "fsdp=8 cp=2 cp_variant=zigzag"),
    ("llama-3-8b", "h100:16", "fsdp=16 recompute=full recompute_layers=10"),
    ("llama-3-8b", "h100:16", "fsdp=16 offload=both"),
    ("mixtral-8x7b", "h100:64", "fsdp=64 ep=8"),
    ("mixtral-8x7b", "h100:64", "fsdp=16 tp=4 ep=4 etp=1 zero_stage=1"),
    ("deepseek-v3", "h100:512", "fsdp=512 ep=64 recompute=full"),
    ("gpt-2", "h100:8", "dp=8"),
    ("llama-3-8b", "tpu-v5p:4x4x4", "fsdp=16 tp=4"),
]


def job_of(overlap: str, *, precision: str = "bf16", seq_len: int = 1024) -> Job:
    convention = None if overlap == "none" else overlap
    return Job(global_batch_tokens=2**20, seq_len=seq_len, overlap=convention, precision=precision)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: f"{case[0]}-{case[2]}")
@pytest.mark.parametrize("overlap", CONVENTION_STREAMS)
def test_a_step_without_a_pipeline_equals_the_estimate(case: tuple[str, str, str], overlap: str) -> None:
    """`none` is the convention of a stack that exposes all of its communication."""
    model, cluster, layout = case
    pricing = Pricing(Problem(load_model(model), load_cluster(cluster), job_of(overlap)), Layout.parse(layout))
    (stage,) = pricing.stages()
    step = StageStep(stage=stage, overlap=pricing.job.overlap_convention, share=1.0 if overlap == "none" else None)
    simulated = simulate_step(pricing, overlap)
    assert simulated.step_time_s == pytest.approx(step.total_s, rel=1e-9)
    (rank,) = simulated.ranks
    assert rank.bubble_s == 0.0
    phases = {"forward": step.forward_s, "backward": step.backward_s, "recompute": step.recompute_s}
    for phase, seconds in phases.items():
        assert rank.computed.get(phase, 0.0) == pytest.approx(seconds * pricing.num_micro_batches, rel=1e-9)
    assert rank.computed["update"] == pytest.approx(step.update_s, rel=1e-9)
    assert sum(rank.exposed.values()) == pytest.approx(sum(step.communication.exposed_s.values()), rel=1e-6, abs=1e-9)
    for axis in ("tp", "cp", "ep") if overlap in ("per_axis", "none") else ():
        assert rank.exposed.get(axis, 0.0) == pytest.approx(step.communication.exposed_s[axis], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
@pytest.mark.parametrize("stack", [None, "compiled"])
def test_casts_and_launches_are_simulated(precision: str, stack: str | None) -> None:
    """A measured stack launches every kernel from the host. Its exposed share is not simulated, so that the convention applies.

    The stack has no slow host and no collectives beside weight gradients, whose time a convention would hide a second time."""
    cluster = load_cluster("h100:64", stack=stack)
    for model, layout in (
        ("llama-3-8b", "fsdp=32 tp=2 recompute=full"),
        ("mixtral-8x7b", "fsdp=64 ep=8"),
    ):
        pricing = Pricing(Problem(load_model(model), cluster, job_of("sum", precision=precision)), Layout.parse(layout))
        (stage,) = pricing.stages()
        expected = StageStep(stage=stage, overlap="sum").total_s
        assert simulate_step(pricing, "sum").step_time_s == pytest.approx(expected, rel=1e-9)


def test_a_simulation_has_the_step_time_of_the_estimate() -> None:
    model, cluster, layout = load_model("llama-3-8b"), load_cluster("h100:16"), Layout.parse("fsdp=8 tp=2 zero_stage=3")
    simulation = simulate(Problem(model, cluster, job_of("sum")), layout, overlap="sum")
    assert simulation.step_time_s == pytest.approx(
        estimate(Problem(model, cluster, job_of("sum")), layout).step_time_s, rel=1e-9
    )
    assert sum(simulation.time.values()) == pytest.approx(simulation.step_time_s, rel=1e-12)


@pytest.mark.parametrize("overlap", CONVENTION_STREAMS)
@pytest.mark.parametrize(
    "layout",
    [
        "pp=4", "pp=4 schedule=afab", "pp=4 num_virtual_stages=2", "pp=4 num_virtual_stages=4",
        "pp=4 num_virtual_stages=2 schedule=interleaved_breadth_first",
    ],
)  # fmt: skip
def test_equal_stages_of_a_pipeline_equal_the_closed_form(layout: str, overlap: str) -> None:
    """Every stage is an interior one, without shared weights: the first and the last pass equal all others."""
    simulated, step = equal_stages(layout, overlap)
    assert simulated.step_time_s == pytest.approx(step.total_s, rel=1e-9)
    assert simulated.ranks[simulated.busiest].bubble_s == pytest.approx(step.bubble_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["interleaved_zb", "zb_v", "dualpipe_v"])
def test_equal_stages_with_split_passes_equal_the_closed_form(schedule: str) -> None:
    """For the convention that exposes as much of a whole backward pass as of its two parts."""
    simulated, step = equal_stages(f"pp=4 num_virtual_stages=2 schedule={schedule}", "per_axis")
    assert simulated.step_time_s == pytest.approx(step.total_s, rel=1e-9)


def equal_stages(layout: str, overlap: str) -> tuple[SimulatedStep, StageStep]:
    pricing = Pricing(
        Problem(load_model("llama-3-8b"), load_cluster("h100:16"), job_of(overlap)),
        Layout.parse(f"tp=4 sequence_parallel=false {layout}"),
    )
    simulator = StepSimulator(pricing, overlap, 1.0)
    inner = simulator.stages[len(simulator.stages) // 2]
    count = sum(unit == "block" for unit in inner.units) * pricing.layout.num_virtual_stages
    simulator.stages = (inner,) * len(simulator.stages)
    stage = pricing.stages()[1]
    stage = replace(stage, counts=stage.counts._replace(layers={"dense_block": 0, "block": count}))
    step = StageStep(stage=stage, overlap=pricing.job.overlap_convention, share=1.0 if overlap == "none" else None)
    return simulator.run(), step


def test_split_passes_take_as_long_as_whole_ones() -> None:
    """Where nothing overlaps, a rank of a zero-bubble schedule works as long as estimated without the bubble."""
    pricing = Pricing(
        Problem(load_model("llama-3-8b"), load_cluster("h100:16"), job_of("none")),
        Layout.parse("tp=4 pp=4 schedule=zb_h1"),
    )
    simulator = StepSimulator(pricing, "none", 1.0)
    simulator.stages = (simulator.stages[1],) * 4
    step = StageStep(stage=pricing.stages()[1], overlap="per_axis", share=1.0)
    simulated = simulator.run()
    for rank in simulated.ranks:
        works = sum(rank.computed.values()) + sum(rank.exposed.values())
        assert works == pytest.approx(step.total_s - step.bubble_s, rel=1e-9)
