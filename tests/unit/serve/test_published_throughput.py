"""Saturated throughput against TensorRT-LLM's own table, which no constant was fitted to."""

import numpy as np
import pytest

import shardwise as sw
from shardwise.serve import ConfigurationTable, ServingFormats, ServingLayout, ServingProblem, Workload, estimate_table
from shardwise.serve.formats import get_weight_format
from shardwise.serve.kernel_seconds import GroupRates

# Output tokens/s per GPU at saturation. Source: NVIDIA/TensorRT-LLM at 03e27c7, docs/source/developer-guide/perf-overview.md,
# Apache-2.0. "DEP" are copies of attention with experts split by expert.
TABLE = [
    ("llama-3.3-70b", "h100", "tp=2", "fp8", 1000, 1000, 2209),
    ("llama-3.3-70b", "h200", "tp=2", "fp8", 1000, 1000, 2587),
    ("llama-3.3-70b", "h200", "tp=2", "fp8", 8192, 1024, 537),
    ("llama-3.3-70b", "gb200", "tp=1", "nvfp4", 1000, 1000, 7769),
    ("llama-3.3-70b", "gb200", "tp=1", "nvfp4", 1024, 8192, 3805),
    ("qwen3-235b-a22b", "h100", "attention_dp=8 ep=8", "fp8", 1000, 1000, 1932),
    ("qwen3-235b-a22b", "h200", "attention_dp=4 ep=4", "fp8", 1000, 1000, 3288),
    ("qwen3-235b-a22b", "h200", "attention_dp=4 ep=4", "fp8", 1024, 8192, 1417),
    ("qwen3-235b-a22b", "h200", "attention_dp=4 ep=4", "fp8", 32768, 1024, 134),
    ("qwen3-235b-a22b", "b200", "attention_dp=4 ep=4", "nvfp4", 1000, 1000, 5764),
    ("qwen3-235b-a22b", "b200", "attention_dp=4 ep=4", "nvfp4", 8192, 1024, 1410),
    ("gpt-oss-120b", "h200", "tp=1", "mxfp4", 1000, 1000, 6868),
    ("gpt-oss-120b", "h200", "tp=1", "mxfp4", 8192, 1024, 1828),
]


def saturated_throughput(model, chip, layout_text, weights, isl, osl):
    """Return the most output tokens/s per device over concurrencies that fit."""
    layout, architecture = ServingLayout.parse(layout_text), sw.load_model(model)
    attention = "bf16" if weights == "nvfp4" and architecture.num_experts else None
    formats = ServingFormats(weights=weights, attention=attention, cache="fp8")
    if weights == "mxfp4":
        formats = ServingFormats(experts="mxfp4", cache="fp8")
    problem = ServingProblem(
        architecture=architecture, cluster=sw.load_cluster(f"{chip}:8"), engine="trtllm", formats=formats,
        workload=Workload(isl=isl, osl=osl, concurrency=1),
    )  # fmt: skip
    concurrencies = np.unique(np.geomspace(1, 8192 * layout.attention_dp, 60).round())
    table = ConfigurationTable.of([layout] * len(concurrencies), list(concurrencies), [8192] * len(concurrencies))
    estimate = estimate_table(problem, table)
    return np.where(estimate.fits, estimate.tokens_per_s_per_device, 0.0).max()


def test_saturated_throughput():
    ratios = np.array([saturated_throughput(*row[:-1]) / row[-1] for row in TABLE])
    sizes = np.sort(np.abs(np.log(ratios)))
    assert np.all(sizes[:-1] < np.log(1.2)), dict(zip(TABLE, ratios.round(2), strict=True))
    assert sizes[-1] < np.log(1.35)  # gpt-oss-120b on H200 with long inputs
    assert np.median(np.abs(ratios - 1)) < 0.1


@pytest.mark.parametrize(("chip", "product"), [("h200", "bf16"), ("b200", "fp8")])
def test_mxfp4_is_multiplied_as_the_chip_can(chip, product):

    chip = sw.load_cluster(f"{chip}:8").chip
    assert GroupRates.of(chip, get_weight_format("mxfp4")).peak == chip.peak(product)
