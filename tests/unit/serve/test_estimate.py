"""Estimates of single layouts and of tables: agreement, workloads by concurrency and by rate, refusals."""

import dataclasses

import numpy as np
import pytest

import shardwise as sw
from shardwise.serve import (
    BatchLimits,
    ConfigurationTable,
    ServingLayout,
    ServingProblem,
    Workload,
    estimate_serving,
    estimate_table,
)
from shardwise.serve import estimate as estimate_module
from shardwise.serve.estimate import ServingModel
from shardwise.serve.steady_state import latency_within, prompt_seconds, queueing_seconds, server_seconds
from shardwise.values import InputError

from .problems import serving_problem


def problem_of(model="llama-3.3-70b", cluster="h100:8", engine="vllm", weights="fp8", **workload):
    return serving_problem(model, cluster, engine=engine, weights=weights, **{"isl": 2000, "osl": 500, **workload})


@pytest.mark.parametrize(
    ("model", "cluster"), [("glm-5", "b200:8"), ("qwen3.5-397b-a17b", "b200:8"), ("llama-3.1-8b", "l40s:1")]
)
def test_models_of_the_published_rows_and_the_l40s_are_served_by_name(model, cluster):
    estimate = sw.serve_estimate(model, cluster, isl=1000, osl=100, concurrency=4)
    assert estimate.memory.verdict == "fits"
    assert 0.002 < estimate.tpot_s.value < 0.2


def test_table_and_single_layout_agree():
    problem = problem_of(concurrency=32.0)
    layouts = [ServingLayout(tp=tp, replicas=8 // tp) for tp in (2, 4, 8)]
    table = ConfigurationTable.of(layouts, [32.0] * 3, [8192] * 3)
    estimates = estimate_table(problem, table)
    for row, layout in enumerate(layouts):
        single = estimate_serving(problem, layout)
        assert single.tpot_s.value == pytest.approx(estimates.tpot_s[row], rel=1e-12)
        assert single.ttft_s.value == pytest.approx(estimates.ttft_s[row], rel=1e-12)
        assert single.tokens_per_s_per_device.value == pytest.approx(estimates.tokens_per_s_per_device[row], rel=1e-12)
        assert single.memory.largest_batch == int(estimates.largest_batch[row])


def test_a_table_in_blocks_equals_the_whole_table(monkeypatch: pytest.MonkeyPatch):
    layouts = [ServingLayout.parse(text) for text in ("tp=8", "tp=2 attention_dp=4 ep=8", "tp=4 attention_dp=2 ep=8")]
    table = ConfigurationTable.of([*layouts, *layouts], [8.0, 8.0, 16.0, 64.0, 64.0, 64.0], [8192] * 6)
    problem = problem_of("qwen3-30b-a3b", concurrency=8.0)
    unblocked = estimate_table(problem, table)
    monkeypatch.setattr(estimate_module, "BLOCK_ROWS", 4)
    blocks = estimate_table(problem, table)
    for field in dataclasses.fields(unblocked):
        np.testing.assert_array_equal(getattr(blocks, field.name), getattr(unblocked, field.name), field.name)


def test_terms_add_up():
    estimate = estimate_serving(problem_of("deepseek-v3", "h200:8", "sglang", concurrency=16.0), ServingLayout(tp=8))
    assert sum(estimate.decode_terms.values()) == pytest.approx(estimate.decode_pass_s, rel=1e-9)
    assert sum(estimate.prefill_terms.values()) == pytest.approx(estimate.prefill_s, rel=1e-9)
    assert estimate.bound == max(estimate.decode_terms, key=estimate.decode_terms.get)


def test_a_pass_takes_longer_than_reading_the_weights():
    estimate = estimate_serving(problem_of(concurrency=1.0), ServingLayout(tp=4))
    read_s = estimate.memory.weight_bytes / sw.load_cluster("h100:8").chip.memory_bytes_per_s
    assert read_s < estimate.tpot_s.value < 3 * read_s


def test_the_rate_obeys_littles_law():
    estimate = estimate_serving(problem_of(rate_per_s=2.0), ServingLayout(tp=8))
    assert estimate.requests_per_s == 2.0
    assert estimate.concurrency == pytest.approx(2.0 * estimate.request_s, rel=1e-9)
    assert estimate.running == pytest.approx(max(2.0 * 500 * estimate.tpot_s.value, 1.0), rel=0.1)


@pytest.mark.parametrize("rate", [0.1, 1.0, 4.0])
def test_first_tokens_at_a_rate_wait_in_a_queue(rate):
    """A first token takes the server, the pass that runs, the input's own chunks, and the wait of an M/D/1 queue for those of
    others (Pollaczek and Khinchine), computed here independently."""
    problem = problem_of(rate_per_s=rate)
    model, layout = ServingModel.of(problem), ServingLayout(tp=8)
    estimate = estimate_serving(problem, layout)
    pricer = model.pricer(ConfigurationTable.of([layout], [1.0], [8192]))
    constants = model.engine.constants
    service_s = float(prompt_seconds(pricer)[0]) * constants.prompt_factor
    busy = rate * service_s
    running = max(estimate.running, 1.0)
    passes_s = constants.wait_passes * float(pricer.decode_seconds(np.array([running]))[0])
    alone_s = float(server_seconds(pricer, np.array([running]))[0]) + passes_s + service_s
    expected = (alone_s + busy / (2 * (1 - busy)) * service_s) * pricer.first_token_factor
    assert estimate.ttft_s.value == pytest.approx(expected, rel=0.02)


def test_latency_at_a_rate_does_not_depend_on_waves():
    single_wave, ten_waves = (
        estimate_serving(problem_of(rate_per_s=2.0, waves=waves), ServingLayout(tp=8)) for waves in (1.0, 10.0)
    )
    assert single_wave.ttft_s == ten_waves.ttft_s
    assert single_wave.tpot_s == ten_waves.tpot_s


def test_latency_rises_with_the_rate():
    rates = (0.5, 1.0, 2.0, 4.0)
    estimates = [estimate_serving(problem_of(rate_per_s=rate), ServingLayout(tp=8)) for rate in rates]
    for quantity in ("ttft_s", "tpot_s"):
        values = [getattr(estimate, quantity).value for estimate in estimates]
        assert values == sorted(values)


def test_a_rate_above_the_layouts_is_refused():
    with pytest.raises(InputError, match=r"serves at most .* requests/s"):
        estimate_serving(problem_of(rate_per_s=1000.0), ServingLayout(tp=8))


def test_a_layout_that_the_engine_lacks_is_refused():
    with pytest.raises(InputError, match="cp is 2; vLLM does not have it"):
        estimate_serving(problem_of(concurrency=1.0), ServingLayout(tp=4, cp=2))


def test_more_devices_than_the_clusters_are_refused():
    with pytest.raises(InputError, match="takes 16 devices; at most the 8"):
        estimate_serving(problem_of(concurrency=1.0), ServingLayout(tp=8, replicas=2))


def test_an_unknown_release_lists_the_measured_ones():
    problem = ServingProblem(
        architecture=sw.load_model("llama-3.1-8b"), cluster=sw.load_cluster("h100:1"),
        workload=Workload(isl=10, osl=10, concurrency=1), release="0.0.1",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"release: found '0\.0\.1'"):
        estimate_serving(problem, ServingLayout())


@pytest.mark.parametrize("cluster", ["tpu-v5p:2x2x1", "mi300x:8", "a100-80gb:8"])
def test_chips_without_measurements_are_priced_and_marked(cluster):
    estimate = estimate_serving(
        problem_of("llama-3.1-8b", cluster, weights="bf16", concurrency=8.0), ServingLayout(tp=2)
    )
    measured = estimate_serving(
        problem_of("llama-3.1-8b", "h100:8", weights="bf16", concurrency=8.0), ServingLayout(tp=2)
    )
    assert not estimate.is_measured
    assert measured.is_measured
    assert any("nothing measured" in note for note in estimate.notes)
    assert estimate.tpot_s.high / estimate.tpot_s.value > measured.tpot_s.high / measured.tpot_s.value


def test_drafted_tokens_shorten_tpot_at_low_load():
    problem = problem_of("deepseek-v3", "h200:8", "sglang", concurrency=1.0)
    drafting = BatchLimits(mtp_tokens=3, acceptance=0.7)
    plain, faster = (
        estimate_serving(p, ServingLayout(tp=8)).tpot_s.value
        for p in (problem, dataclasses.replace(problem, batch_limits=drafting))
    )
    assert plain / (1 + 0.7 + 0.7**2 + 0.7**3) < faster < plain


def test_the_queue_with_constant_service_equals_the_closed_form():
    # M/D/1 at half load waits half a service; Pollaczek and Khinchine.
    assert queueing_seconds(np.array([5.0]), np.array([0.1]))[0] == pytest.approx(0.05)


def test_limits_are_met_with_a_margin():
    values, low, high = np.array([0.9, 0.99]), np.array([0.6, 0.66]), np.array([1.35, 1.485])
    assert latency_within(1.0, values, low, high).tolist() == [True, False]
    assert latency_within(None, values, low, high).all()
