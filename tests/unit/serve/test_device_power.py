"""Power of serving devices: constants against the fit, readings outside of the fit, and sums over devices."""

import numpy as np
import pytest

import shardwise as sw
from shardwise.measure.serving.batch_rows import published_batch_rows
from shardwise.measure.serving.power_fit import batch_uses, power_rows, validate_power
from shardwise.serve import PooledLayout, ServingLayout, ServingProblem, Workload, estimate_pools, estimate_serving
from shardwise.serve.device_power import POWER, UNMEASURED, DeviceUse, power_constants

from .problems import LLAMA_2_70B, serving_problem

A100 = POWER["a100-80gb"]


def estimate(cluster, layout="tp=8", release=None, **workload):
    problem = serving_problem(cluster=cluster, release=release, **{**LLAMA_2_70B, **workload})
    return estimate_serving(problem, ServingLayout.parse(layout))


def test_constants_equal_the_fit_to_the_readings():
    fit = validate_power()
    assert (A100.idle, A100.memory, A100.compute) == pytest.approx((fit.idle, fit.memory, fit.compute), rel=0.002)
    assert fit.deviation <= A100.spread < 1.2 * fit.deviation
    assert fit.mean_error < 0.05
    constant = np.array([row.mean_power_share for row in power_rows()])
    assert np.mean(np.abs(0.6 / constant - 1)) > 3 * fit.mean_error


def test_highest_readings_equal_the_power_of_inputs():
    """The peak power of a batch, which is not part of the fit, is the power while its inputs are computed."""
    rows = power_rows()
    seconds = np.array([row.prompt_s for row in rows])
    uses = batch_uses([_only_prompt(row) for row in rows])
    shares = DeviceUse(memory=uses[:, 1], compute=uses[:, 2]).power_share(A100)
    errors = np.abs(shares / np.array([row.peak_power_share for row in rows]) - 1)
    assert len(seconds) == 36
    assert np.median(errors) < 0.1


def _only_prompt(row):
    """Return a batch as if it gave no tokens after the first."""
    return type(row)(**{name: getattr(row, name) for name in row.__slots__} | {"osl": 1, "request_s": row.prompt_s})


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_power_of_batches_equals_the_readings(batch):
    row = next(
        row for row in published_batch_rows()
        if (row.chip, row.model, row.tp, row.batch, row.isl) == ("a100-80gb", "llama-2-70b", 8, batch, 512)
    )  # fmt: skip
    watts = estimate("a100-80gb:8", release="0.2", concurrency=float(batch), waves=1.0).watts_per_device
    assert watts.low < row.mean_power_share * 400 < watts.high


def test_energy_is_power_over_tokens():
    for load in ({"concurrency": 16.0}, {"rate_per_s": 2.0}):
        result = estimate("h100:8", **load)
        assert result.joules_per_output_token.value == pytest.approx(
            result.watts_per_device.value / result.tokens_per_s_per_device.value
        )
        assert result.watts_per_device.high <= 700


def test_a_loaded_device_draws_more_power_and_less_energy_per_token():
    idle, loaded = (estimate("h100:8", concurrency=concurrency) for concurrency in (1.0, 64.0))
    assert idle.watts_per_device.value < loaded.watts_per_device.value
    assert idle.joules_per_output_token.value > 5 * loaded.joules_per_output_token.value


def test_an_idle_device_draws_its_idle_share():
    result = estimate("h100:8", rate_per_s=1e-4)
    assert result.watts_per_device.value == pytest.approx(UNMEASURED.idle * 700, rel=0.01)


def test_utilisation_is_at_most_one():
    """Neither use exceeds 1: memory and products cannot be busy longer than the time."""
    uses = batch_uses(power_rows())
    assert np.all(uses[:, 1:] < 1.0)
    assert np.all(uses[:, 1:] > 0.0)


def test_power_of_pools_follows_their_work():
    problem = ServingProblem(
        architecture=sw.load_model("llama-3.1-8b"), cluster=sw.load_cluster("h100:8"),
        workload=Workload(isl=4000, osl=200, rate_per_s=10),
    )  # fmt: skip
    pools = estimate_pools(problem, PooledLayout.parse("prefill: tp=1 replicas=6; decode: tp=1 replicas=2"))
    total = 6 * pools.prefill.watts_per_device.value + 2 * pools.decode.watts_per_device.value
    assert pools.joules_per_output_token.value == pytest.approx(total / (10 * 200))
    half = estimate_pools(
        problem.__class__(architecture=problem.architecture, cluster=problem.cluster,
                          workload=Workload(isl=4000, osl=200, rate_per_s=5)),
        PooledLayout.parse("prefill: tp=1 replicas=6; decode: tp=1 replicas=2"),
    )  # fmt: skip
    added = [
        pools.prefill.watts_per_device.value - UNMEASURED.idle * 700,
        half.prefill.watts_per_device.value - UNMEASURED.idle * 700,
    ]
    assert added[0] == pytest.approx(2 * added[1])


def test_a_chip_without_readings_has_a_wider_interval():
    assert power_constants(sw.load_cluster("b200:8").chip).spread > 3 * A100.spread
    assert power_constants(sw.load_cluster("a100-80gb:8").chip) is A100
