"""A measured step, and its parts according to the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.measure.utilisation import (
    IDEAL_CONSTANTS,
    REST_OF_KERNELS,
    RunSetup,
    StepBreakdown,
    break_down_step,
    compute_utilisation,
)
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.search.plan import Plan, plan_layout
from shardwise.values.errors import InputError, MissingValueError

LLAMA, JOB = load_model("llama-3-8b"), Job(global_batch_tokens=1 << 20, seq_len=8192)
H100 = load_cluster("h100:64", stack="torchtitan")


def make_plan(text: str = "fsdp=64", cluster: Cluster = H100, job: Job = JOB) -> Plan:
    return plan_layout(LLAMA, cluster, job, Layout.parse(text))


def break_down(plan: Plan, measured_s: float) -> StepBreakdown:
    rate = plan.job.global_batch_tokens / measured_s / plan.cluster.num_devices
    return break_down_step(plan, measured_s, compute_utilisation(plan.problem, rate, plan.layout))


def test_mfu_by_hand() -> None:
    """Llama 3 8B: 6 FLOPs for each of the weights but the embedding's, 6·T·d a layer for causal attention, twice that for all."""
    used = compute_utilisation(Problem(LLAMA, H100, JOB), 6500.0)
    weights, attention = 8_030_261_248 - 128_256 * 4096 - 65 * 4096, 32 * 6 * 8192 * 4096
    assert used.flops_per_token == pytest.approx(6 * weights + attention, rel=2e-4)
    assert used.flops_per_token_full == pytest.approx(6 * weights + 2 * attention, rel=2e-4)
    # torchtitan 0.3.0, models/utils.py, get_dense_model_nparams_and_flops: with the norms' weights, head_dims of keys and values
    assert used.flops_per_token_full == pytest.approx(6 * (weights + 65 * 4096) + 6 * 32 * 32 * 256 * 8192, rel=1e-4)
    assert used.mfu == used.flops_per_token * 6500.0 / 989e12
    assert used.mfu_full == pytest.approx(used.flops_per_token_full * 6500.0 / 989e12)
    assert (used.hfu, used.peak_format) == (None, "bf16")


def test_a_prediction_measured_as_it_is_has_its_mfu_and_nothing_unexplained() -> None:
    plan = make_plan("fsdp=8 tp=8 sequence_parallel=true recompute=full")
    account = break_down(plan, plan.estimate.step_time_s)
    assert account.parts[0].share == pytest.approx(plan.estimate.mfu)
    assert account.parts[0].share + account.parts[1].share == pytest.approx(plan.estimate.hfu)
    assert (account.verdict, account.unexplained_s) == ("inside", 0.0)


@pytest.mark.parametrize(
    "layout", ["fsdp=64", "fsdp=8 tp=8 sequence_parallel=true", "fsdp=8 pp=8 recompute=full", "dp=64 offload=optimizer"]
)
@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_parts_add_up_to_what_was_measured(layout: str, times: float) -> None:
    plan = make_plan(layout)
    measured_s = times * plan.estimate.step_time_s
    account = break_down(plan, measured_s)
    assert sum(part.seconds for part in account.parts) == pytest.approx(measured_s, rel=1e-9)
    assert sum(part.share for part in account.parts) == pytest.approx(1.0, rel=1e-9)
    assert account.parts[-1].seconds == pytest.approx(measured_s - plan.estimate.step_time_s, abs=1e-12)
    assert all(part.seconds > 0 for part in account.parts[:-1])
    assert {*IDEAL_CONSTANTS, REST_OF_KERNELS} <= {part.name for part in account.parts}
    assert account.verdict == {0.5: "faster", 1.0: "inside", 3.0: "slower"}[times]


def test_each_loss_grows_with_the_constant_that_says_it() -> None:
    def parts(**worse: float) -> dict[str, float]:
        assert H100.calibration is not None
        constants = {**H100.calibration.constants, "update": 1.0, **worse}
        plan = make_plan(cluster=replace(H100, calibration=replace(H100.calibration, constants=constants)))
        return {part.name: part.seconds for part in break_down(plan, 3.0).parts}

    usual = parts()
    for constant, name in (
        ({"matmul_fraction": 0.4}, "GEMM efficiency"), ({"attention": 3.0}, "attention kernel efficiency"),
        ({"launch_s": 1e-4}, "gaps between kernels"), ({"elementwise": 6.0}, REST_OF_KERNELS),
    ):  # fmt: skip
        changed = parts(**constant)
        grown_parts = {part for part in changed if changed[part] > usual[part] * 1.2}
        assert grown_parts == {name}, constant


def test_fp8_products_are_one_number_beside_the_bf16_peak() -> None:
    plan = make_plan(job=replace(JOB, precision="fp8_delayed"))
    names = [part.name for part in break_down(plan, plan.estimate.step_time_s).parts]
    assert "kernels, beyond their FLOPs at the peak" in names
    assert not {*IDEAL_CONSTANTS, REST_OF_KERNELS} & set(names)


def test_a_bound_has_no_interval() -> None:
    plan = make_plan(cluster=load_cluster("h100:64"), job=replace(JOB, overlap="per_axis"))
    account = break_down(plan, 2 * plan.estimate.step_time_s)
    assert (account.interval90, account.bound_s, account.verdict) == (None, None, "slower")


def test_a_chip_without_a_peak_is_refused() -> None:
    with pytest.raises(InputError, match="no machine's peak; a cluster of your own is required"):
        compute_utilisation(Problem(LLAMA, load_cluster("local:2"), replace(JOB, precision="fp32")), 1.0)
    bare = replace(H100, chip=replace(H100.chip, peak_flops_per_s={"fp32": 67e12}))
    with pytest.raises(MissingValueError, match="no sourced bf16 peak"):
        compute_utilisation(Problem(LLAMA, bare, JOB), 1.0)


def test_a_batch_that_is_known_later_is_the_jobs() -> None:
    """As a log says it, by which its step is predicted."""
    ran = RunSetup(model=LLAMA, cluster=H100, job=JOB, layout=None, batch_tokens=None, software="torchtitan")
    known = ran.with_batch(1 << 22)
    assert (known.batch_tokens, known.job) == (1 << 22, replace(JOB, global_batch_tokens=1 << 22))
    assert ran.with_batch(None) is ran
