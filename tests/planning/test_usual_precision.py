"""The precision of a job that names none is what the stack's users run; a plan says which it has.

Independent truth: Megatron-LM, megatron/training/arguments.py: `accumulate_allreduce_grads_in_fp32` unless --grad-reduce-in-bf16.
"""

from __future__ import annotations

import json

import pytest

import shardwise as sw
from shardwise.hardware.stacks import default_precision, get_stack, stack_names
from shardwise.present.command_line import main
from shardwise.values.precision import PRECISIONS

JOB = ("--batch-tokens", "512Ki", "--seq-len", "4096")
MAIN = "bf16_fp32_main_gradients"


@pytest.mark.parametrize("stack", ["megatron", "megatron-2022", "nemo-24", "nemo-25", "megatron-bridge-26"])
def test_megatron_accumulates_in_fp32_unless_told_otherwise(stack: str) -> None:
    assert default_precision(stack) == MAIN
    assert "grad-reduce-in-bf16" in get_stack(stack).precision_source


def test_every_stack_has_a_known_precision() -> None:
    for name in stack_names():
        stack = get_stack(name)
        assert stack.precision in PRECISIONS
        assert bool(stack.precision_source) == (stack.precision != "bf16")


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        (["--stack", "megatron"], MAIN),
        (["--stack", "megatron", "--precision", "bf16"], "bf16"),
        (["--stack", "torchtitan"], "bf16_fp32_reduction"),
        ([], "bf16"),
    ],
)
def test_command_line_plans_with_the_usual_precision_and_prints_it(
    flags: list[str], precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", "llama-3.2-1b", "h100:8", *JOB, *flags, "--layout", "fsdp=8"]
    assert main(words) == 0
    assert f"sequences of 4,096, precision {precision}" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["precision"] == precision


def test_python_plans_with_the_usual_precision() -> None:
    fields = {"global_batch_tokens": "512Ki", "seq_len": 4096}
    where = sw.load_cluster("h100:8", stack="megatron")
    assert sw.plan("llama-3.2-1b", "h100:8", stack="nemo-25", pins="tp=1", **fields).job.precision == MAIN
    assert sw.memory("llama-3.2-1b", where, "fsdp=8").job.precision == MAIN
    to_loss = sw.plan("gpt-2", "h100:8", noise_scale="128Ki", stack="megatron", seq_len=1024)
    assert to_loss.job.precision == MAIN
    assert sw.memory("llama-3.2-1b", where, "fsdp=8", precision="bf16").job.precision == "bf16"
    assert sw.plan("llama-3.2-1b", where, sw.Job(global_batch_tokens=2**19, seq_len=4096)).job.precision == "bf16"


@pytest.mark.parametrize(
    ("flags", "precision"),
    [([], "fp16"), (["--stack", "deepspeed"], "fp16_fp32_update"), (["--stack", "megatron"], "fp16_fp32_update")],
)
def test_a_chip_without_bf16_trains_in_fp16(
    flags: list[str], precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Volta's tensor cores have fp16 only (NVIDIA, Tesla V100 whitepaper)."""
    assert main(["plan", "gpt-3-1.3b", "v100:8", *JOB[:3], "2048", *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["job"]["precision"] == precision
    recipe = PRECISIONS[precision]
    assert (recipe.weights, recipe.gradients, recipe.activations, recipe.master, recipe.moments) == (
        "fp16", "fp16", "fp16", "fp32", "fp32",
    )  # fmt: skip


def test_fp16_takes_what_bf16_takes() -> None:
    """Formats of the same width and, on an A100, of the same peak."""
    fields = {"global_batch_tokens": "512Ki", "seq_len": 2048, "layout": "fsdp=8"}
    fp16, bf16 = (sw.estimate("gpt-3-1.3b", "a100-80gb:8", precision=name, **fields) for name in ("fp16", "bf16"))
    assert (fp16.step_time_s, fp16.memory, fp16.mfu) == (bf16.step_time_s, bf16.memory, bf16.mfu)


def test_the_default_of_several_clusters_is_one_that_all_have() -> None:
    fields = {"global_batch_tokens": "512Ki", "seq_len": 1024}
    comparison = sw.plan_clusters("gpt-2", ["h100:8", "v100:8"], **fields)
    assert {contender.plan.job.precision for contender in comparison.contenders if contender.plan} == {"fp16"}
