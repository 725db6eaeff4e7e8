"""Saturated throughput against TensorRT-LLM's own table, which no constant was fitted to."""

import numpy as np
import pytest

import shardwise as sw
from shardwise.measure.serving.throughput_validation import (
    published_throughput_rows,
    saturated_throughput,
    validate_throughput_rows,
)
from shardwise.serve.formats import get_weight_format
from shardwise.serve.kernel_seconds import GroupRates

# Median relative error of each model's rows: a point above what is reached.
REACHED = {
    "deepseek-v3": 0.20, "gpt-oss-120b": 0.27, "gpt-oss-20b": 0.26, "llama-3.3-70b": 0.08, "qwen3-235b-a22b": 0.10,
    "qwen3-30b-a3b": 0.10,
}  # fmt: skip


def test_errors_of_saturated_throughput_stay_below_thresholds():
    rows = published_throughput_rows()
    errors = np.array([abs(saturated_throughput(row) / row.tokens_per_s_per_device - 1) for row in rows])
    models = np.array([row.model for row in rows])
    assert set(models) == set(REACHED)
    for model, limit in REACHED.items():
        assert np.median(errors[models == model]) < limit, model
    assert validate_throughput_rows().errors.median == pytest.approx(np.median(errors))


@pytest.mark.parametrize(("chip", "product"), [("h200", "bf16"), ("b200", "fp8")])
def test_mxfp4_is_multiplied_in_a_format_of_the_chip(chip, product):

    chip = sw.load_cluster(f"{chip}:8").chip
    assert GroupRates.of(chip, get_weight_format("mxfp4")).peak == chip.peak(product)
