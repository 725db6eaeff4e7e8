"""Values of serving: workloads, layouts, formats and limits; refusals and text forms."""

from __future__ import annotations

import pytest

from shardwise.serve import BatchLimits, LatencyLimits, ServingFormats, ServingLayout, Workload, get_weight_format
from shardwise.values import InputError


@pytest.mark.parametrize(
    "text", ["tp=1", "tp=8", "tp=2 attention_dp=4 ep=8", "tp=4 ep=2 expert_tp=2", "tp=8 pp=2 replicas=3", "cp=2"]
)
def test_a_layouts_text_is_read_back(text: str) -> None:
    layout = ServingLayout.parse(text)
    assert str(layout) == text
    assert ServingLayout.parse(str(layout)) == layout


def test_experts_are_split_over_the_devices_of_attention() -> None:
    layout = ServingLayout.parse("tp=2,attention_dp=4,ep=4,pp=2,replicas=3")
    assert layout.expert_tp_degree == 2
    assert (layout.devices_per_replica, layout.num_devices, layout.attention_copies) == (16, 48, 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=8 ep=3", "a divisor of tp \\* attention_dp = 8 is required"),
        ("tp=8 ep=8 expert_tp=2", "ep \\* expert_tp is 16; tp \\* attention_dp = 8 is required"),
        ("tp=0", "at least 1"),
        ("tp=2 tp=4", "given twice"),
        ("dp=2", "did you mean 'attention_dp'"),
        ("fast", "KEY=VALUE"),
    ],
)
def test_wrong_layouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServingLayout.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"isl": 0, "osl": 5, "concurrency": 1}, "isl is 0"),
        ({"isl": 5, "osl": 5}, "neither of concurrency and rate_per_s"),
        ({"isl": 5, "osl": 5, "concurrency": 1, "rate_per_s": 1.0}, "both of concurrency and rate_per_s"),
        ({"isl": 5, "osl": 5, "rate_per_s": float("inf")}, "rate_per_s is inf"),
        ({"isl": 5, "osl": 5, "concurrency": 1, "cached_tokens": 5}, "0 to isl - 1 = 4"),
    ],
)
def test_wrong_workloads_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload(**fields)  # type: ignore[arg-type]


def test_a_request_has_half_its_output_in_the_cache_on_average() -> None:
    workload = Workload(isl=1000, osl=500, rate_per_s=2.0, cached_tokens=400)
    assert (workload.total_tokens, workload.mean_context, workload.new_input_tokens) == (1500, 1250, 600)


# Bytes of an element: 4 bits and a byte of scale for 16 or 32 elements; two bytes for a group of 128 or 32.
@pytest.mark.parametrize(
    ("name", "expected"), [("nvfp4", 9 / 16), ("mxfp4", 17 / 32), ("int4", 33 / 64), ("int4_g32", 9 / 16), ("fp8", 1.0)]
)
def test_bytes_of_weight_formats_count_their_scales(name: str, expected: float) -> None:
    assert get_weight_format(name).bytes_per_element == expected


def test_parts_without_a_format_have_that_of_the_weights() -> None:
    formats = ServingFormats(weights="nvfp4", attention="bf16", cache="fp8")
    assert (formats.attention_format.name, formats.expert_format.name, formats.cache_bytes) == ("bf16", "nvfp4", 1.0)
    assert str(formats) == "nvfp4, attention bf16, cache fp8"


def test_all_problems_of_formats_and_limits_are_reported_together() -> None:
    with pytest.raises(InputError, match=r"(?s)weights is 'fp9'.*did you mean 'fp8'.*cache is 'fp4'"):
        ServingFormats(weights="fp9", cache="fp4")
    with pytest.raises(InputError, match=r"(?s)max_num_seqs is 0.*memory_fraction is 1.5"):
        BatchLimits(max_num_seqs=0, memory_fraction=1.5)
    with pytest.raises(InputError, match="tpot_s is -1"):
        LatencyLimits(tpot_s=-1)
