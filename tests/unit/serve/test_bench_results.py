"""Results of serving benchmarks: files of the three tools, unreadable files, and the factors that follow."""

import dataclasses
import json

import pytest

from shardwise.measure.serving.bench_results import calibrate_serving, read_bench_results
from shardwise.serve import ServingLayout, Workload, estimate_serving
from shardwise.values import InputError

from .problems import serving_problem

LAYOUT = ServingLayout(tp=2)
PROBLEM = serving_problem("llama-3.1-8b", isl=1, osl=1, concurrency=1)


def vllm_result(ttft_s, tpot_s, **changes):
    return {
        "backend": "vllm", "num_prompts": 160, "request_rate": "inf", "max_concurrency": 16, "completed": 160,
        "total_input_tokens": 160 * 1000, "total_output_tokens": 160 * 200, "median_ttft_ms": ttft_s * 1e3,
        "median_tpot_ms": tpot_s * 1e3, **changes,
    }  # fmt: skip


def genai_perf_result(ttft_s, tpot_s):
    return {
        "time_to_first_token": {"unit": "ms", "avg": 1.0, "p50": ttft_s * 1e3},
        "inter_token_latency": {"unit": "ms", "avg": 1.0, "p50": tpot_s * 1e3},
        "input_sequence_length": {"avg": 1000.0}, "output_sequence_length": {"avg": 200.0},
        "input_config": {"perf_analyzer": {"stimulus": {"concurrency": 16}}},
    }  # fmt: skip


def write(path, *values):
    path.write_text("\n".join(json.dumps(value) for value in values))
    return path


def test_results_of_the_three_tools_agree(tmp_path):
    vllm = read_bench_results(write(tmp_path / "vllm.json", vllm_result(0.1, 0.01)))
    sglang = read_bench_results(write(tmp_path / "sglang.jsonl", *[vllm_result(0.1, 0.01, backend="sglang")] * 2))
    genai = read_bench_results(write(tmp_path / "genai.json", genai_perf_result(0.1, 0.01)))
    assert vllm == genai == sglang[:1] == sglang[1:]
    assert (vllm[0].isl, vllm[0].osl, vllm[0].concurrency, vllm[0].rate_per_s) == (1000.0, 200.0, 16.0, None)
    assert (vllm[0].ttft_s, vllm[0].tpot_s) == pytest.approx((0.1, 0.01))


def test_a_rate_without_a_concurrency_is_read(tmp_path):
    result = vllm_result(0.1, 0.01, max_concurrency=None, request_rate=4.0)
    (read,) = read_bench_results(write(tmp_path / "rate.json", result))
    assert read.workload == Workload(isl=1000, osl=200, rate_per_s=4.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"completed": 3}, "total_input_tokens, total_output_tokens, median_ttft_ms, median_tpot_ms missing"),
        (vllm_result(0.1, 0.01, max_concurrency=None), "neither a concurrency nor a rate"),
        (vllm_result(0.1, 0.01, completed=0), "at least 1 completed request"),
        (vllm_result(0.0, 0.01), "both above 0 are required"),
        (vllm_result(0.1, 0.01, median_tpot_ms="fast"), "median_tpot_ms is 'fast'; a number is required"),
        ([1], "found list; an object"),
    ],
)  # fmt: skip
def test_unreadable_results_are_refused(tmp_path, value, message):
    with pytest.raises(InputError, match=message):
        read_bench_results(write(tmp_path / "result.json", value))


def test_text_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "result.txt"
    path.write_text("Successful requests: 3")
    with pytest.raises(InputError, match="JSON of a serving benchmark is required"):
        read_bench_results(path)


def test_factors_bring_predictions_to_measurements(tmp_path):
    problem = dataclasses.replace(PROBLEM, workload=Workload(isl=1000, osl=200, concurrency=16))
    plain = estimate_serving(problem, LAYOUT)
    slow = vllm_result(1.5 * plain.ttft_s.value, 1.3 * plain.tpot_s.value)
    results = read_bench_results(write(tmp_path / "slow.jsonl", *[slow] * 20))
    calibration = calibrate_serving(PROBLEM, LAYOUT, results)
    calibrated = estimate_serving(dataclasses.replace(problem, calibration=calibration), LAYOUT)
    assert calibration.num_results == 20
    assert calibrated.tpot_s.value == pytest.approx(1.3 * plain.tpot_s.value, rel=0.02)
    assert calibrated.ttft_s.value == pytest.approx(1.5 * plain.ttft_s.value, rel=0.05)


def test_a_single_result_moves_a_factor_most_of_the_way(tmp_path):
    problem = dataclasses.replace(PROBLEM, workload=Workload(isl=1000, osl=200, concurrency=16))
    plain = estimate_serving(problem, LAYOUT)
    result = vllm_result(plain.ttft_s.value, 2 * plain.tpot_s.value)
    calibration = calibrate_serving(PROBLEM, LAYOUT, read_bench_results(write(tmp_path / "one.json", result)))
    assert 2**0.7 < calibration.pass_factor < 2**0.85


def test_an_empty_list_of_results_is_refused():
    with pytest.raises(InputError, match="found no results"):
        calibrate_serving(PROBLEM, LAYOUT, ())
