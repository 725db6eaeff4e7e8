"""A whole run: sums by hand, the limits of the formulas, and the published run of Llama 3 405B."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.batch_size.batch_schedule import parse_batch_schedule
from shardwise.price import Problem
from shardwise.price.reliability import RELIABILITY_SOURCES, goodput, time_between_failures, young_interval
from shardwise.price.training_run import FORMULAS, Run, checkpoint_bytes, price_scheduled_run, training_run
from shardwise.search.plan import Plan
from shardwise.search.plan_file import parse_plan, plan_payload
from shardwise.values.errors import InputError

LLAMA = sw.load_model("llama-3-8b")
CLUSTER = sw.load_cluster("h100:64")
JOB = sw.Job(global_batch_tokens=2**19, seq_len=8192, tokens=1e12, overlap="per_axis")
LAYOUT = sw.Layout(fsdp=64, zero_stage=3, recompute="full")


def plan_run(cluster: sw.Cluster = CLUSTER, reliability: sw.Reliability | None = None, job: sw.Job = JOB) -> Run:
    run = sw.plan_layout(LLAMA, cluster, job, LAYOUT, reliability=reliability).run
    assert run is not None
    return run


def with_chip(**values: float | str) -> sw.Cluster:
    return replace(CLUSTER, chip=replace(CLUSTER.chip, **values))  # type: ignore[arg-type]


def test_every_number_by_hand() -> None:
    """64 devices, a failure each 1,000 device-hours: M = 56,250 s. 14 bytes for each parameter at 64 · 1e7 B/s."""
    reliability = sw.Reliability(
        failures_per_device_hour=1e-3, checkpoint_bytes_per_s_per_device=1e7, restart_s=300.0, pue=1.2
    )  # fmt: skip
    run = plan_run(with_chip(price_usd_per_hour=2.5, price_date="2026-01-01", power_w=700.0), reliability)
    estimate = sw.estimate(LLAMA, CLUSTER, JOB, LAYOUT)
    mtbf, write = 56_250.0, 14 * sw.num_params(LLAMA) / 6.4e8
    interval = math.sqrt(2 * write * mtbf)
    share = interval / (mtbf * math.exp((300 + write) / mtbf) * (math.exp((interval + write) / mtbf) - 1))
    assert run.num_steps == 1_907_349  # 1e12 / 524,288, rounded up
    assert run.ideal_days == pytest.approx(1e12 / 2**19 * estimate.step_time_s / 86400)
    assert run.ideal_days == pytest.approx(estimate.train_days)
    assert run.mtbf_s == pytest.approx(mtbf)
    assert run.checkpoint_bytes == 14 * sw.num_params(LLAMA)
    assert run.checkpoint_s == pytest.approx(write)
    assert run.checkpoint_interval_s == pytest.approx(interval)
    assert run.goodput == pytest.approx(share)
    assert run.goodput + sum(run.lost.values()) == pytest.approx(1)
    assert run.lost["checkpoints"] == pytest.approx(share * write / interval)
    assert run.days == pytest.approx(run.ideal_days / share)
    assert run.num_interruptions == pytest.approx(run.days * 86400 / mtbf)
    assert run.chip_hours == pytest.approx(64 * 24 * run.days)
    assert run.usd == pytest.approx(2.5 * run.chip_hours)
    assert run.energy_mwh == pytest.approx(run.chip_hours * 0.0007 * 1.2)
    assert run.missing == ()


def test_totals_carry_the_interval_of_the_step() -> None:
    cluster = sw.load_cluster("h100:64", stack="torchtitan")
    job = sw.Job(global_batch_tokens=2**19, seq_len=8192, tokens=1e12)
    estimate = sw.estimate(LLAMA, cluster, job, "fsdp=64")
    run = training_run(LLAMA, cluster, job, estimate)
    assert run is not None
    assert estimate.interval90 is not None
    for end, step_s in enumerate(estimate.interval90):
        at_end = training_run(LLAMA, cluster, job, replace(estimate, step_time_s=step_s, interval90=None))
        assert at_end is not None
        for name in ("ideal_days", "days", "chip_hours", "usd", "energy_mwh"):
            assert getattr(run, f"{name}_interval90")[end] == getattr(at_end, name)
    low, high = run.days_interval90 or (0.0, 0.0)
    assert low < run.days < high
    assert plan_run().usd_interval90 is None  # a bound


def test_unknown_totals_have_no_interval() -> None:
    cluster = sw.load_cluster("tpu-v5p:4x4x4", stack="maxtext")
    run = sw.plan("llama-3-8b", cluster, sw.Job(global_batch_tokens=2**20, seq_len=8192, tokens=1e11)).run
    assert run is not None
    assert run.days_interval90 is not None
    assert run.energy_mwh is run.energy_mwh_interval90 is None


def test_a_schedule_of_batches_has_the_interval_of_its_phases() -> None:
    cluster = sw.load_cluster("h100:64", stack="torchtitan")
    job = sw.Job(global_batch_tokens=2**20, seq_len=8192, tokens=1e12)
    problem = Problem(LLAMA, cluster, job)
    run = price_scheduled_run(problem, sw.Layout.parse("fsdp=64"), parse_batch_schedule("0:512Ki,100G:1Mi"))
    low, high = run.ideal_days_interval90 or (0.0, 0.0)
    phases = [replace(job, global_batch_tokens=phase.batch_tokens) for phase in run.phases]
    steps = [sw.estimate(LLAMA, cluster, phase, "fsdp=64") for phase in phases]
    for end, days in enumerate((low, high)):
        seconds = sum(
            step.interval90[end] * phase.num_steps
            for step, phase in zip(steps, run.phases, strict=True)
            if step.interval90
        )
        assert days == pytest.approx(seconds / 86400)


def test_goodput_is_the_first_order_formula_where_failures_are_rare() -> None:
    mtbf, write, restart = 1e6, 10.0, 200.0
    interval = young_interval(write, mtbf)
    assert interval == pytest.approx(math.sqrt(2e7))
    first_order = 1 - write / interval - (restart + (interval + write) / 2) / mtbf
    assert goodput(interval, write, mtbf, restart) == pytest.approx(first_order, abs=2e-5)


def test_goodput_equals_that_of_a_simulated_run() -> None:
    """Failures drawn at a constant rate, which also strike checkpoints and restarts."""
    mtbf, write, restart, interval = 1000.0, 20.0, 60.0, 200.0
    draw, clock, done = random.Random(3), 0.0, 0
    until_failure = draw.expovariate(1 / mtbf)
    pending = interval + write
    while done < 20_000:
        if until_failure >= pending:
            clock, until_failure = clock + pending, until_failure - pending
            done, pending = done + 1, interval + write
        else:
            clock, until_failure = clock + until_failure, draw.expovariate(1 / mtbf)
            pending = restart + interval + write
    assert done * interval / clock == pytest.approx(goodput(interval, write, mtbf, restart), rel=0.01)


@pytest.mark.parametrize(("write", "mtbf"), [(3.0, 11_000.0), (60.0, 1e5), (15.8, 354_000.0)])
def test_youngs_interval_minimises_the_loss(write: float, mtbf: float) -> None:
    best = young_interval(write, mtbf)
    reached = goodput(best, write, mtbf, 600.0)
    assert reached > goodput(best * 1.5, write, mtbf, 600.0)
    assert reached > goodput(best / 1.5, write, mtbf, 600.0)


def test_a_checkpoint_interval_is_at_most_the_time_between_failures() -> None:
    assert young_interval(1000.0, 100.0) == 100.0


def test_without_failures_nothing_is_lost() -> None:
    run = plan_run(reliability=sw.Reliability(failures_per_device_hour=0.0))
    assert (run.goodput, run.days, run.num_interruptions) == (1.0, run.ideal_days, 0.0)
    assert run.mtbf_s is None
    assert run.checkpoint_interval_s is None


def test_a_requested_checkpoint_interval_is_used_and_at_least_a_step() -> None:
    assert plan_run(reliability=sw.Reliability(checkpoint_interval_s=7200.0)).checkpoint_interval_s == 7200.0
    step = sw.estimate(LLAMA, CLUSTER, JOB, LAYOUT).step_time_s
    assert plan_run(reliability=sw.Reliability(checkpoint_interval_s=step / 2)).checkpoint_interval_s == step


def test_values_without_a_source_are_absent_and_named() -> None:
    run = plan_run(replace(CLUSTER, chip=replace(CLUSTER.chip, price_usd_per_hour=None, price_date=None, power_w=None)))
    assert (run.usd, run.energy_mwh) == (None, None)
    assert run.missing == ("price_usd_per_hour", "power_w")


def test_every_input_has_a_source() -> None:
    reliability = sw.Reliability(restart_s=60.0)
    run = plan_run(with_chip(price_usd_per_hour=2.5, price_date="2026-01-01"), reliability)
    sources = {quantity.name: quantity.source for quantity in run.inputs}
    assert sources["restart_s"] == "set by hand"
    assert sources["pue"] == RELIABILITY_SOURCES["pue"]
    assert sources["price_usd_per_hour"].startswith("2026-01-01: ")
    assert all(sources.values())
    assert {"tokens", "step_time_s", "num_devices", "failures_per_device_hour", "power_w"} <= sources.keys()
    assert FORMULAS.keys() <= set(Run.__dataclass_fields__)


def test_a_job_without_a_length_has_no_run() -> None:
    assert sw.plan_layout(LLAMA, CLUSTER, replace(JOB, tokens=None), LAYOUT).run is None


def test_goodput_and_gpu_hours_of_llama_3_405b_equal_the_published_ones() -> None:
    """16,384 H100, 54 days with 419 unexpected interruptions, more than 90% effective training time; 30.84M GPU-hours.

    At the 400 TFLOP/s for each device that the paper reports (6·P·T FLOPs) the run must take about the GPU-hours of the model
    card, which also count what came before and after. Source: Grattafiori et al. 2024, 3.3.2 and 3.3.4; Llama 3.1 model card.
    """
    model, cluster = sw.load_model("llama-3-405b"), sw.load_cluster("h100:16384")
    job = sw.Job(global_batch_tokens=2**24, seq_len=8192, tokens=15.6e12)
    layout = sw.Layout(
        fsdp=128, tp=8, pp=16, zero_stage=1, sequence_parallel=True, recompute="selective", schedule="1f1b"
    )
    measured_s = 6 * 405e9 * 2**24 / (16_384 * 400e12)
    estimate = replace(sw.estimate(model, cluster, job, layout), step_time_s=measured_s)
    run = sw.training_run(model, cluster, job, estimate)
    assert run is not None
    mtbf = time_between_failures(16_384, sw.Reliability())
    assert mtbf is not None
    assert 54 * 86400 / mtbf == pytest.approx(419)
    assert 0.90 < run.goodput < 0.95
    assert run.ideal_days == pytest.approx(66.9, abs=0.2)
    assert run.chip_hours == pytest.approx(30.84e6, rel=0.10)


def test_the_checkpoint_of_bloom_has_its_published_size() -> None:
    """176B parameters in bf16 with AdamW in fp32: 2.3 TiB. Source: BigScience, BLOOM model card, 2022."""
    bloom = replace(LLAMA, name="bloom-like", num_layers=70, d_model=14336, d_ff=4 * 14336, num_heads=112, num_kv_heads=112,
                    head_dim=128, vocab_size=250880, tied_embeddings=True, mlp="gelu")  # fmt: skip
    assert sw.num_params(bloom) == pytest.approx(176e9, rel=0.01)
    assert checkpoint_bytes(bloom, JOB) == pytest.approx(2.3 * 2**40, rel=0.03)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"failures_per_device_hour": -1.0}, "failures_per_device_hour"),
        ({"checkpoint_bytes_per_s_per_device": 0.0}, "checkpoint_bytes_per_s_per_device"),
        ({"restart_s": math.nan}, "restart_s"),
        ({"pue": 0.9}, "pue"),
        ({"checkpoint_interval_s": 0.0}, "checkpoint_interval_s"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, float], name: str) -> None:
    with pytest.raises(InputError, match=rf"run: {name} is .* is required"):
        sw.Reliability(**values)


def test_a_run_that_never_ends_is_refused() -> None:
    with pytest.raises(InputError, match="never done"):
        plan_run(reliability=sw.Reliability(failures_per_device_hour=1.0, restart_s=1e6))


def test_plan_files_keep_the_run_and_older_files_have_none() -> None:
    plan = sw.plan_layout(LLAMA, CLUSTER, JOB, LAYOUT, reliability=sw.Reliability(pue=1.1))
    payload = json.loads(json.dumps(plan_payload(plan)))
    read_back: Plan = parse_plan(payload)
    assert read_back.run == plan.run
    older = payload["run"] | {"operations": payload["run"]["reliability"]}
    del older["reliability"]
    assert parse_plan(payload | {"schema": "shardwise.plan/2", "run": older}).run == plan.run
    with pytest.raises(InputError, match="reliability"):
        parse_plan(payload | {"run": older})
    del payload["run"]
    assert parse_plan(payload).run is None
