"""Two pools: closed forms of rates, queue and transfer; limits of small and large loads; published rows."""

import numpy as np
import pytest

import shardwise as sw
from shardwise.measure.serving.pool_validation import published_pool_rows, validate_pool_rows
from shardwise.serve import (
    PooledEstimate,
    PooledLayout,
    ServingLayout,
    ServingProblem,
    estimate_pools,
    estimate_serving,
    parse_any_layout,
)
from shardwise.serve.engines import get_serving_engine
from shardwise.values import InputError

from .problems import serving_problem

LAYOUT = PooledLayout.parse("prefill: tp=2 replicas=2; decode: tp=4")


def problem(cluster: str = "h100:8", **load: float) -> ServingProblem:
    return serving_problem("llama-3.1-8b", cluster, isl=4000, osl=200, **load)


def estimate(layout: PooledLayout = LAYOUT, cluster: str = "h100:8", **load: float) -> PooledEstimate:
    return estimate_pools(problem(cluster, **load), layout)


def test_a_layouts_text_is_read_back() -> None:
    assert PooledLayout.parse(str(LAYOUT)) == LAYOUT
    assert parse_any_layout("decode: tp=4; prefill: tp=2 replicas=2") == LAYOUT
    assert parse_any_layout("tp=4") == ServingLayout(tp=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefil: tp=4; decode: tp=4", "did you mean 'prefill'"),
        ("prefill: tp=4", "the decode pool is missing"),
        ("prefill: tp=4; prefill: tp=2; decode: tp=1", "given twice"),
        ("prefill: tq=4; decode: tp=4", "layout: prefill: found 'tq=4'"),
        (";", "KEY=VALUE"),
    ],
)
def test_an_invalid_text_of_pools_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_any_layout(text)


def test_a_single_request_does_not_queue() -> None:
    """TTFT is then the sum of server, prefill and transfer, and TPOT that of a single request, as without pools."""
    pools = estimate(concurrency=1)
    assert pools.ttft_terms["queue"] == pytest.approx(0.0, abs=1e-9)
    assert sum(pools.ttft_terms.values()) == pytest.approx(pools.ttft_s.value)
    colocated = estimate_serving(problem(concurrency=1), ServingLayout(tp=4))
    assert pools.tpot_s.value == pytest.approx(colocated.tpot_s.value, rel=1e-9)


def test_the_transfer_is_the_cache_of_the_input_over_the_link() -> None:
    """Keys and values of llama-3.1-8b: 32 layers, 8 heads of 128, 2 bytes; a device of the smaller tp has half of them."""
    inside = sw.load_cluster("h100:8").topology.tiers[0]  # type: ignore[union-attr]
    rate = inside.bytes_per_s * inside.fraction * get_serving_engine("vllm").constants.link_share
    moved = 4000 * 2 * 32 * 8 * 128 * 2 / 2
    result = estimate(concurrency=8)
    assert result.transfer_bytes == pytest.approx(moved)
    assert result.ttft_terms["transfer of the cache"] == pytest.approx(moved / rate)


def test_the_rate_of_a_pool_is_the_sum_of_its_instances() -> None:
    """Twice the instances of a pool serve twice the rate, and the ratio of devices is that of the rates of a device."""
    single = estimate(concurrency=8)
    double = estimate(PooledLayout.parse("prefill: tp=2 replicas=4; decode: tp=4 replicas=2"), "h100:16", concurrency=8)
    for name in ("prefill", "decode"):
        assert getattr(double, name).max_rate_per_s == pytest.approx(2 * getattr(single, name).max_rate_per_s)
    rates = single.prefill.max_rate_per_s / 4, single.decode.max_rate_per_s / 4
    assert single.prefill_devices_per_decode_device == pytest.approx(rates[1] / rates[0])
    assert single.max_rate_per_s == pytest.approx(4 * min(rates))
    assert single.bound == ("prefill" if rates[0] <= rates[1] else "decode")


def test_random_arrivals_wait_by_pollaczek_and_khinchine() -> None:
    """At a rate, each server of the prefill pool is a separate M/D/1 queue."""
    single = estimate(rate_per_s=0.7 * estimate(concurrency=8).prefill.max_rate_per_s)
    service_s = (
        2 / single.prefill.max_rate_per_s
    )  # of an input in one of the two servers, with full passes of one input
    inputs = 8192 // 4000  # in a pass
    assert single.ttft_terms["queue"] == pytest.approx(0.7 / (2 * 0.3) * service_s * inputs, rel=0.05)


@pytest.mark.parametrize("concurrency", [1, 7, 64, 500, 5000])
def test_requests_in_the_system_are_rate_times_time(concurrency: float) -> None:
    """Little's law, with both pools short of load, one of them full, and far more requests than they serve."""
    result = estimate(concurrency=concurrency)
    assert result.concurrency == pytest.approx(concurrency, rel=0.02)
    assert result.requests_per_s <= result.max_rate_per_s * (1 + 1e-9)
    decode_s = 199 * result.tpot_s.value
    assert result.requests_per_s == pytest.approx(concurrency / (result.ttft_s.value + decode_s), rel=0.02)


def test_first_tokens_take_longer_with_every_request() -> None:
    times = [estimate(concurrency=float(load)).ttft_s.value for load in np.geomspace(1, 2000, 12)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("layout", "load", "message"),
    [
        ("prefill: tp=4; decode: tp=8", {"concurrency": 4}, "takes 12 devices; at most the 8"),
        ("prefill: tp=3; decode: tp=4", {"concurrency": 4}, "tp is 3; a divisor of the 32 query heads"),
        ("prefill: tp=1; decode: tp=4", {"rate_per_s": 1e4}, "the prefill pool serves at most"),
        ("prefill: cp=2; decode: tp=4", {"concurrency": 4}, "cp is 2; vLLM does not have it"),
    ],
)
def test_layouts_that_pools_cannot_run_are_refused(layout: str, load: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        estimate(PooledLayout.parse(layout), **load)


@pytest.mark.parametrize("load", [{"rate_per_s": "4/s"}, {}])
def test_proposed_pools_are_within_the_limits_and_have_no_pipelines(load: dict[str, str]) -> None:
    """By a separate estimate; no published row of pools has pipeline stages, which the search would prefer."""
    plan = sw.serve_plan("deepseek-v3", "h200:64", isl=4000, osl=1000, tpot="30ms", engine="sglang", **load)
    assert plan.pools is not None
    layout, separate = plan.pools.layout, estimate_pools(plan.pools.problem, plan.pools.layout)
    assert (layout.prefill.pp, layout.decode.pp) == (1, 1)
    assert layout.num_devices <= 64
    assert separate.tpot_s.value <= 0.03
    assert separate.requests_per_s == pytest.approx(4.0) if load else separate.requests_per_s > 4.0
    verdicts = separate.prefill.memory.verdict, separate.decode.memory.verdict
    assert verdicts == ("fits", "fits")


def test_errors_of_published_rows_of_pools_stay_below_thresholds() -> None:
    """Medians of the rows that state the workers of both pools. Two choices about first tokens were made by these rows."""
    validation = validate_pool_rows(states_workers=True)
    assert validation.num_rows == 69
    assert validation.tpot.median <= 0.08
    assert validation.ttft.median <= 0.30
    assert validation.tpot_coverage >= 0.86
    assert validation.ttft_coverage >= 0.86


def test_errors_of_rows_outside_of_the_fit_stay_below_thresholds() -> None:
    """Rows outside of the fit: workers and drafted tokens are those of the launch, latencies those of the published table."""
    validation = validate_pool_rows(states_workers=False)
    assert validation.num_rows == 56
    assert validation.tpot.median <= 0.11
    assert validation.tpot.percentile_90 <= 0.20
    assert validation.ttft.median <= 0.34
    assert validation.tpot_coverage >= 0.9
    assert validation.ttft_coverage >= 0.9


def test_every_measurement_of_pools_occurs_once() -> None:
    rows = published_pool_rows()
    assert len({(row.ttft_s, row.tpot_s) for row in rows}) == len(rows)
