"""Hidden and exposed communication of a pass add up to its time without overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.price import Problem
from shardwise.price.estimate import Estimate, estimate

MODEL = sw.load_model("llama-3-70b")
JOB = Job(global_batch_tokens=2**21, seq_len=8192)
LAYOUT = Layout.parse("tp=8 pp=2 fsdp=4 zero_stage=1 sequence_parallel=true")


def estimate_layout(stack: str | None, layout: Layout) -> Estimate:
    return estimate(Problem(MODEL, sw.load_cluster("h100:64", stack=stack), JOB), layout)


@pytest.mark.parametrize("stack", [None, "megatron", "torchtitan"])
@pytest.mark.parametrize("async_tp", [False, True])
def test_hidden_and_exposed_traffic_of_tensor_parallelism_add_up(stack: str | None, async_tp: bool) -> None:
    """The reference is a stack and a layout without overlap on the same links."""
    overlapped = estimate_layout(stack, replace(LAYOUT, async_tp=async_tp))
    unoverlapped = estimate_layout("torchtitan" if stack else None, LAYOUT)
    assert unoverlapped.hidden.get("tp", 0.0) == 0.0
    if stack == "megatron" and not async_tp:
        assert (
            0.0 < overlapped.hidden["tp"] < overlapped.time["tp"] + overlapped.hidden["tp"]
        )  # beside the weights' gradients
        return
    if stack == "megatron":
        unoverlapped = estimate_layout("megatron", LAYOUT)
    total = overlapped.time["tp"] + overlapped.hidden.get("tp", 0.0)
    assert total == pytest.approx(unoverlapped.time["tp"] + unoverlapped.hidden.get("tp", 0.0), rel=1e-6)
    assert (overlapped.hidden.get("tp", 0.0) > 0.0) == async_tp


def test_the_step_equals_the_sum_of_its_terms() -> None:
    priced_step = estimate_layout("megatron", replace(LAYOUT, async_tp=True))
    assert sum(priced_step.time.values()) == pytest.approx(priced_step.step_time_s, rel=1e-12)
