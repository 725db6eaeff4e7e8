"""No prediction is below the bound of its own plan: every stack on every chip."""

from __future__ import annotations

import pytest

from shardwise.hardware import chip_names, get_stack, load_chip, with_ideal_constants, with_published_constants
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.stacks import stack_names
from shardwise.layout import Layout
from shardwise.model import Job, load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.values import ShardwiseError

SHAPES = {"tpu-v2": "2x4", "tpu-v3": "2x4", "tpu-v5e": "2x4", "tpu-v6e": "2x4", "h100-pcie": "4"}
LAYOUTS = {
    "llama-3-8b": (
        "fsdp=8 zero_stage=3",
        "tp=4 fsdp=2 sequence_parallel=true",
        "pp=4 fsdp=2",
        "cp=8 cp_variant=zigzag",
    ),
    "qwen3-30b-a3b": ("fsdp=8 zero_stage=3", "ep=8 fsdp=8 zero_stage=1"),
}
CHIPS = [name for name in chip_names() if load_chip(name).platform]


@pytest.mark.parametrize("name", CHIPS)
def test_no_prediction_is_below_the_bound_of_its_plan(name: str) -> None:
    shape = SHAPES.get(name, "8" if load_chip(name).platform == "GPU" else "2x2x2")
    cluster = load_cluster(f"{name}:{shape}")
    compared = 0
    for stack in map(get_stack, stack_names()):
        if load_chip(name).platform not in stack.platforms:
            continue
        predicted = with_published_constants(cluster, stack)
        for model, layouts in LAYOUTS.items():
            for text in layouts:
                for seq_len in (4096, 131072):
                    job = Job(global_batch_tokens=2**22, seq_len=seq_len)
                    problem = Problem(load_model(model), predicted, job)
                    bound = Problem(load_model(model), with_ideal_constants(predicted), job)
                    try:
                        layout = Layout.parse(text)
                        step_s = estimate(problem, layout).step_time_s
                    except ShardwiseError:  # a layout of eight devices on four, or one that the model cannot have
                        continue
                    compared += 1
                    assert step_s >= estimate(bound, layout).step_time_s * (1 - 2e-3), (
                        stack.name,
                        model,
                        text,
                        seq_len,
                    )
    assert compared > 0 or "bf16" not in load_chip(name).peak_flops_per_s or cluster.num_devices != 8
