"""Splitwise's batches: their rows, and passes of vLLM of 2023, whose kernels the host launches one by one."""

import dataclasses
from statistics import geometric_mean

import pytest

from shardwise.measure.serving.batch_rows import published_batch_rows
from shardwise.serve import ServingLayout, estimate_serving
from shardwise.serve.engines import get_serving_engine
from shardwise.serve.serving_constants import ENGINE_CONSTANTS, load_constants

from .problems import LLAMA_2_70B, serving_problem


def test_a_power_of_zero_is_not_a_reading():
    rows = published_batch_rows()
    shares = [row.mean_power_share for row in rows if row.mean_power_share is not None]
    assert min(shares) > 0.1
    assert {row.chip for row in rows if row.mean_power_share is not None} == {"a100-80gb"}
    assert max(row.batch for row in rows if row.mean_power_share is not None) == 16


def test_batches_that_took_turns_are_left_out():
    turns = [(row.chip, row.tp, row.batch) for row in published_batch_rows() if not row.is_whole]
    assert turns == [("a100-80gb", 2, 32), ("a100-80gb", 2, 64), ("h100", 2, 64)]


def test_a_single_wave_computes_its_inputs_before_any_token():
    """A batch whose inputs take one pass decodes without inputs between its tokens."""
    single_wave = serving_problem(**LLAMA_2_70B, release="0.2", concurrency=16.0, waves=1.0, length_spread=0.0)
    estimate = estimate_serving(single_wave, ServingLayout(tp=8))
    assert estimate.tpot_s.value == pytest.approx(estimate.decode_pass_s)
    followed = estimate_serving(serving_problem(**LLAMA_2_70B, release="0.2", concurrency=16.0), ServingLayout(tp=8))
    assert followed.tpot_s.value > 1.02 * followed.decode_pass_s


def test_the_host_of_2023_launches_each_kernel():
    """More devices gain nothing once launches take longer than kernels, as measured: 29 and 30 ms on 4 and 8 devices."""
    seconds = {
        release: [
            estimate_serving(
                serving_problem(**LLAMA_2_70B, release=release, concurrency=1.0), ServingLayout(tp=tp)
            ).decode_pass_s
            for tp in (4, 8)
        ]
        for release in (None, "0.2")
    }
    assert seconds["0.2"][1] > 0.85 * seconds["0.2"][0]
    assert seconds[None][1] < 0.75 * seconds[None][0]
    assert 0.8 < seconds["0.2"][1] / 0.0298 < 1.25
    assert get_serving_engine("vllm", "0.2").captures_decode is False
    assert get_serving_engine("vllm").captures_decode is True


def test_terms_of_a_pass_that_the_host_launches_add_up():
    estimate = estimate_serving(serving_problem(**LLAMA_2_70B, release="0.2", concurrency=4.0), ServingLayout(tp=8))
    assert sum(estimate.decode_terms.values()) == pytest.approx(estimate.decode_pass_s)
    assert estimate.bound == "host"


def test_the_neutral_stack_has_the_means_of_the_current_engines():
    neutral, engines = load_constants("neutral"), [load_constants(name) for name in ("vllm", "sglang", "trtllm")]
    for name in ENGINE_CONSTANTS:
        assert getattr(neutral, name) == pytest.approx(geometric_mean(getattr(engine, name) for engine in engines))
    early = dataclasses.asdict(load_constants("vllm 0.2"))
    assert early["prompt_share"] < neutral.prompt_share
