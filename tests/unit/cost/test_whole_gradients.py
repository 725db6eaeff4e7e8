"""Gradients of FSDP2 that stay whole until the last micro-batch, by hand.

Independent truth: PyTorch's FSDPParam.unsharded_accumulated_grad: a gradient of each of the device's whole parameters, in the
format of the reduction.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.vectorised.search_layouts import SearchChecks, search_layouts
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.errors import InputError

MODEL = load_model("llama-3.2-1b")
JOB = sw.Job(global_batch_tokens=16 * 4096, seq_len=4096, precision="bf16_fp32_reduction", loss="unfused")


def gradients(stack: str, text: str, job: sw.Job = JOB) -> float:
    problem = Problem(MODEL, load_cluster("h100:8", stack=stack), job)
    return estimate(problem, Layout.parse(text)).memory["gradients"]


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize(
    ("stack", "accumulates"), [("automodel", True), ("accelerate", True), ("torchtitan", False), ("shardwise", False)]
)
def test_accumulated_gradients_are_whole_in_fp32(stack: str, accumulates: bool, zero_stage: int) -> None:
    text = f"fsdp=8 zero_stage={zero_stage}"
    shards = 2 * sw.num_params(MODEL) / 8
    assert gradients(stack, text) == pytest.approx(4 * sw.num_params(MODEL) if accumulates else shards, rel=1e-3)
    once = replace(JOB, global_batch_tokens=8 * 4096)  # one micro-batch, which is the last
    assert gradients(stack, text, once) == pytest.approx(shards, rel=1e-3)


def test_a_pipeline_of_torchtitan_reduces_in_the_last_micro_batch() -> None:
    layout = "fsdp=4 pp=2 zero_stage=2 layers_per_stage=8,8"
    sharded = gradients("megatron", layout)
    assert gradients("torchtitan", layout) == pytest.approx(sharded * 4 * 2)
    reduced_in_bf16 = replace(JOB, precision="bf16")
    assert gradients("torchtitan", layout, reduced_in_bf16) == pytest.approx(sharded * 4)


def test_a_search_prices_whole_gradients_as_an_estimate_does() -> None:
    problem = Problem(MODEL, load_cluster("h100:8", stack="automodel"), JOB)
    result = search_layouts(problem, choices=Choices(), checks=SearchChecks(num_samples=100))
    for row in (*result.best, *result.sampled):
        priced = estimate(problem, row.layout)
        assert row.memory_bytes == pytest.approx(priced.memory_bytes, rel=1e-9)


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="whole_gradients"):
        IssuePolicy(whole_gradients="sometimes")  # type: ignore[arg-type]
