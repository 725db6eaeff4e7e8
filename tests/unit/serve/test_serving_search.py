"""Serving plans against a loop over every layout and number of instances, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.hardware import load_cluster
from shardwise.model import load_model
from shardwise.search import ServingQuestion, plan_serving
from shardwise.search.serving.candidates import list_serving_layouts
from shardwise.serve import (
    BatchLimits,
    LatencyLimits,
    ServingFormats,
    ServingLayout,
    estimate_serving,
    get_serving_engine,
)
from shardwise.values import InputError
from shardwise.values.errors import MissedLimitError, NothingFitsError


def question(model: str = "llama-3.1-8b", cluster: str = "h100:8", **fields: Any) -> ServingQuestion:
    settings: dict[str, Any] = {
        "isl": 1000, "osl": 200, "rate_per_s": None, "engine": "vllm", "release": None, "formats": ServingFormats(),
        "batch_limits": BatchLimits(), "latency_limits": LatencyLimits(),
    }  # fmt: skip
    return ServingQuestion(architecture=load_model(model), cluster=load_cluster(cluster), **{**settings, **fields})


def layouts(serving_question: ServingQuestion) -> list[ServingLayout]:
    return list_serving_layouts(
        serving_question.architecture,
        serving_question.cluster,
        serving_question.formats,
        get_serving_engine(serving_question.engine),
    )


def device_counts_that_serve(serving_question: ServingQuestion) -> Iterator[int]:
    """Yield the devices of every layout and number of instances that serves the rate within the limits."""
    for layout in layouts(serving_question):
        for replicas in range(1, serving_question.cluster.num_devices // layout.devices_per_replica + 1):
            try:
                estimate = estimate_serving(
                    serving_question.problem(rate_per_s=serving_question.rate_per_s), layout.with_replicas(replicas)
                )
            except InputError:
                continue
            if estimate.meets(serving_question.latency_limits) and estimate.memory.verdict == "fits":
                yield layout.devices_per_replica * replicas


@pytest.mark.parametrize(("rate", "tpot_s"), [(2.0, 0.02), (20.0, 0.02), (40.0, 0.03), (10.0, 0.008)])
def test_a_rate_is_served_by_nearly_the_fewest_devices(rate: float, tpot_s: float) -> None:
    """The search keeps a margin to a limit, so that it may take an instance more than the loop, but never fewer devices."""
    serving_question = question(rate_per_s=rate, latency_limits=LatencyLimits(ttft_s=2.0, tpot_s=tpot_s))
    plan = plan_serving(serving_question)
    assert plan.estimate.meets(serving_question.latency_limits)
    assert plan.estimate.max_rate_per_s > rate
    fewest = min(device_counts_that_serve(serving_question))
    assert fewest <= plan.layout.num_devices <= 2 * fewest
    assert plan.idle_devices == 8 - plan.layout.num_devices


def test_a_rate_is_not_refused_for_the_first_wave_of_a_benchmark() -> None:
    """An estimate at the rate within the limits is a plan: no first wave is in its first tokens."""
    serving_question = question(rate_per_s=20.0)
    ttft_s = min(
        estimate_serving(serving_question.problem(rate_per_s=20.0), ServingLayout(tp=tp)).ttft_s.value
        for tp in (1, 2, 4)
    )
    plan = plan_serving(question(rate_per_s=20.0, latency_limits=LatencyLimits(ttft_s=1.1 * ttft_s)))
    assert plan.estimate.ttft_s.value <= 1.1 * ttft_s


def test_without_a_rate_no_layout_serves_more_within_the_limit() -> None:
    serving_question = question(latency_limits=LatencyLimits(tpot_s=0.02))
    plan = plan_serving(serving_question)
    assert plan.estimate.tpot_s.value <= 0.02
    rate = plan.estimate.tokens_per_s_per_device.value * plan.layout.num_devices
    for rejected in plan.alternatives:
        replicas = 8 // rejected.point.layout.devices_per_replica
        total = rejected.point.tokens_per_s_per_device * rejected.point.layout.devices_per_replica * replicas
        assert total <= rate * 1.03 + 1e-9


def test_a_tighter_limit_lowers_throughput() -> None:
    rates = [
        plan_serving(question(latency_limits=LatencyLimits(tpot_s=limit))).estimate.tokens_per_s_per_device.value
        for limit in (0.01, 0.02, 0.04)
    ]
    assert rates == sorted(rates)


def test_twice_the_load_takes_at_least_as_many_devices() -> None:
    plan = plan_serving(question(rate_per_s=10.0, latency_limits=LatencyLimits(tpot_s=0.02)))
    assert plan.doubled_devices is not None
    assert plan.doubled_devices >= plan.layout.num_devices
    assert plan.doubled is None or plan.doubled.tpot_s.value > plan.estimate.tpot_s.value


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": "llama-3-70b", "cluster": "h100:1"}, NothingFitsError, "does not fit on h100:1"),
        (
            {"latency_limits": LatencyLimits(tpot_s=1e-4)},
            MissedLimitError,
            "a TPOT of 100 µs \\(the best of any layout is",
        ),
        ({"rate_per_s": 1e6}, MissedLimitError, "1e\\+06 requests/s need about"),
        ({"engine": "none"}, InputError, "serving engine"),
    ],
)
def test_an_unreachable_target_is_refused_with_the_reachable_one(
    fields: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_serving(question(**fields))


def test_a_reachable_limit_is_not_named_as_the_cause() -> None:
    with pytest.raises(MissedLimitError, match="a TTFT of 1 ms") as error:
        plan_serving(question(latency_limits=LatencyLimits(ttft_s=0.001, tpot_s=0.1)))
    assert "TPOT" not in str(error.value)
