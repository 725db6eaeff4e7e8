"""A stack's plan has a precision recipe that its framework writes: plan and launch agree on memory.

Independent truth: the files that a target writes, read back and priced again.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.stacks import CATALOG, get_stack
from shardwise.interop.frameworks.targets import TARGETS
from shardwise.interop.launches.launch import launch_from_plan
from shardwise.interop.launches.target import Target
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.interop.read_launch import parse_launch
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.plan import Plan, plan_layout
from shardwise.values.errors import InputError, MissingValueError
from shardwise.values.precision import PRECISIONS

TABLES = tomllib.loads(CATALOG.joinpath("stacks.toml").read_text(encoding="utf-8"))
JOB = Job(global_batch_tokens=2**18, seq_len=4096)


def exporters(name: str) -> list[Target]:
    """Targets of a stack, or else of the stack that it is `as`."""
    targets = [target for target in TARGETS.values() if target.stack == name]
    return targets or (exporters(TABLES[name]["as"]) if "as" in TABLES[name] else [])


EXPORTED = [name for name in TABLES if exporters(name)]
RECIPES = [
    (name, precision)
    for name in EXPORTED
    for precision in dict.fromkeys(
        (*get_stack(name).abilities.precisions, *get_stack(name).abilities.replica_precisions)
    )
]


def cluster_of(stack: str, precision: str = "bf16") -> sw.Cluster:
    chip = "gb200" if precision == "nvfp4" else "a100-80gb" if precision == "fp32" else "h100"
    return load_cluster(f"{chip}:8" if "GPU" in get_stack(stack).platforms else "tpu-v5p:2x2x2", stack=stack)


def memory_read_back(plan: Plan, target: Target) -> float:
    launch = launch_from_plan(plan)
    files = target.write(to_options(target, launch), launch)
    model = None if target.includes_model else plan.model
    restored = parse_launch(files, launch.machines, target=target.name, model=model).launch
    return estimate(Problem(restored.model, plan.cluster, restored.job), restored.layout).memory_bytes


@pytest.mark.parametrize("stack", EXPORTED)
def test_a_plan_has_the_memory_of_its_launch(stack: str) -> None:
    plan = sw.plan("llama-3-8b", cluster_of(stack), replace(JOB, precision=get_stack(stack).precision))
    for target in exporters(stack):
        assert refusals(launch_from_plan(plan), target) == []
        assert memory_read_back(plan, target) == plan.estimate.memory_bytes


@pytest.mark.parametrize(("stack", "precision"), RECIPES)
def test_each_recipe_of_a_stack_is_one_that_its_framework_writes(stack: str, precision: str) -> None:
    """torchtitan's tensorwise float8 is an option of the release with TOML files alone."""
    abilities = get_stack(stack).abilities
    # DeepSpeed keeps gradients in both formats under ZeRO-1 alone (BF16_Optimizer).
    zero = 1 if 1 in abilities.zero else max(abilities.zero)
    shards = f"fsdp=8 zero_stage={zero}" if precision in abilities.precisions else "dp=8"
    layout = Layout.parse(f"{shards} recompute={abilities.recompute[-1]} micro_batch_seqs=8")
    job, cluster = replace(JOB, precision=precision), cluster_of(stack, precision)
    if (
        precision == "fp32" and cluster.chip.vendor == "Google"
    ):  # TPUs multiply fp32 in several passes of bf16, of which no peak is known
        with pytest.raises(MissingValueError, match="no sourced fp32 peak"):
            plan_layout(load_model("llama-3-8b"), cluster, job, layout)
        return
    plan = plan_layout(load_model("llama-3-8b"), cluster, job, layout)
    targets = [target for target in exporters(stack) if not refusals(launch_from_plan(plan), target)]
    assert targets
    for target in targets:
        assert memory_read_back(plan, target) == plan.estimate.memory_bytes


@pytest.mark.parametrize("stack", sorted({target.stack for target in TARGETS.values()}))
def test_a_recipe_that_a_stack_lacks_is_no_launch_of_its_framework(stack: str) -> None:
    abilities = get_stack(stack).abilities
    for precision in set(PRECISIONS) - {*abilities.precisions, *abilities.replica_precisions}:
        layout = Layout.parse("fsdp=8" if 3 in abilities.zero else "fsdp=8 zero_stage=1")
        try:
            plan = plan_layout(load_model("llama-3-8b"), cluster_of(stack), replace(JOB, precision=precision), layout)
        except MissingValueError:
            continue
        for target in exporters(stack):
            assert any(precision in reason for reason in refusals(launch_from_plan(plan), target))


@pytest.mark.parametrize(
    ("stack", "precision", "nearest"),
    [
        ("nanotron", "bf16", "bf16_fp32_gradients"),
        ("torchtitan", "bf16", "bf16_fp32_reduction"),
        ("maxtext", "bf16_fp32_reduction", "bf16"),
        ("accelerate", "fp8_torchao_rowwise", "fp8_torchao"),
    ],
)
def test_a_search_refuses_a_recipe_that_a_stack_lacks_and_names_the_nearest(
    stack: str, precision: str, nearest: str
) -> None:
    expected = f"{stack} has no precision {precision}; precision={nearest} is the nearest that it has"
    with pytest.raises(InputError, match=expected):
        sw.plan("llama-3-8b", cluster_of(stack), replace(JOB, precision=precision))


def test_a_recipe_of_replicas_alone_is_refused_with_shards() -> None:
    """FSDP by Accelerate reduces in the format of its computation, DistributedDataParallel in fp32."""
    job = replace(JOB, precision="bf16_fp32_reduction")
    plan = plan_layout(load_model("llama-3-8b"), cluster_of("accelerate"), job, Layout.parse("fsdp=8"))
    assert [note for note in plan.estimate.notes if "bf16_fp32_reduction only without ZeRO; set zero_stage=0" in note]
