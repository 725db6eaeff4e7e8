"""Checks of a plan, its data and the machine before a run starts; none of them needs PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train.stand_in import VOCAB, small_plan, write_inputs

import shardwise as sw
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.layout.rules.engine import job_for_engine, require_runnable
from shardwise.model.job import Job
from shardwise.model.numerics import Numerics
from shardwise.price.estimate import estimate
from shardwise.run import machine_resources
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.batch_schedule import require_batches
from shardwise.run.trainer.preflight import require_memory, require_world, smallest_change
from shardwise.search.plan import Plan, plan_layout
from shardwise.search.plan_file import load_plan
from shardwise.search.planner import make_plan as searched
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.errors import InputError, NothingFitsError
from shardwise.values.precision import get_precision

BF16 = get_precision("bf16")
MODEL = sw.load_model("llama-3-8b")


def big_plan(**layout: object) -> Plan:
    job = sw.Job(global_batch_tokens=2**19, seq_len=8192)
    return plan_layout(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job, Layout(**layout))


def test_all_unrunnable_choices_are_named_together() -> None:
    plan = big_plan(
        tp=2, pp=2, cp=2, sequence_parallel=True, async_tp=True, zero_stage=1, offload="optimizer", schedule="zb_h1"
    )
    with pytest.raises(InputError) as caught:
        require_runnable(plan.model, plan.layout, BF16)
    offload, split = caught.value.problems
    assert (
        offload
        == "plan: offload=optimizer is planned, not yet runnable; plan again with --runnable, or --pin offload=none"
    )
    assert "async_tp with schedule=zb_h1" in split
    assert split.endswith("--pin async_tp=false, or with --pin schedule=1f1b")
    require_runnable(plan.model, big_plan(pp=8, schedule="1f1b").layout, BF16)
    require_runnable(MODEL, big_plan(dp=2, fsdp=4, zero_stage=3).layout, BF16)
    require_runnable(MODEL, big_plan(fsdp=2, tp=2, cp=2, sequence_parallel=True, zero_stage=3).layout, BF16)


def test_a_batch_that_a_schedule_does_not_run_is_refused_before_the_first_step() -> None:
    plan = big_plan(pp=4, dp=2, schedule="dualpipe")
    require_batches(plan, TrainingRecipe(steps=9, batch_ramp=((0, 16), (5, 64))))
    with pytest.raises(
        InputError, match=r"a batch of 4 sequences .*: micro-batches: found 2; dualpipe requires at least 8"
    ):
        require_batches(plan, TrainingRecipe(steps=9, batch_ramp=((0, 64), (5, 4))))


def test_an_uneven_vocabulary_runs() -> None:
    assert sw.load_model("gpt-2").vocab_size % 2
    require_runnable(sw.load_model("gpt-2"), Layout(tp=2), BF16)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"norm_weight": False}, "unit_rms_norm"),
        ({"norm_weight": False, "norm": "layer"}, "unit_layer_norm"),
        ({"inner_norms": True}, "norms of what the products back to the residual stream read"),
        ({"qk_norm": True, "norm": "layer"}, "LayerNorm of queries and keys"),
        ({"qk_norm": True, "qk_norm_over": "each_head"}, "weights of queries' and keys' norms for each head"),
        ({"bias": ("head",)}, "a bias of the head"),
    ],
)
def test_a_structure_without_kernels_is_named(fields: dict[str, Any], part: str) -> None:
    model = replace(MODEL, **fields)
    with pytest.raises(InputError, match=f"has {part}: planned, not yet runnable"):
        require_runnable(model, Layout(), BF16)
    require_runnable(replace(MODEL, mlp="relu2"), Layout(), BF16)


def test_arithmetic_that_is_not_known_is_named() -> None:
    """A family whose numerics are read in part is planned, and not trained; the format of its files says nothing of it."""
    unread = ("the activation 'gelu_tanh'", "quantization_config = {'bits': 4}")
    with pytest.raises(InputError, match=r"has the activation 'gelu_tanh' in its config, .* planned, not yet runnable"):
        require_runnable(replace(MODEL, numerics=Numerics(unread=unread)), Layout(), BF16)
    require_runnable(replace(MODEL, numerics=Numerics(unread=unread[1:])), Layout(), BF16)


def test_whole_experts_run() -> None:
    layout = Layout(fsdp=2, tp=2, ep=4, etp=1, zero_stage=1)
    for sequence_parallel in (False, True):
        require_runnable(sw.load_model("mixtral-8x7b"), replace(layout, sequence_parallel=sequence_parallel), BF16)


def test_a_precision_recipe_that_does_not_run_is_named_with_those_that_do() -> None:
    problem = "precision int8_aqt: products in int8 .*; one of bf16, .*fp32, .*fp8_nanotron runs"
    with pytest.raises(InputError, match=problem):
        require_runnable(MODEL, Layout(), get_precision("int8_aqt"))
    with pytest.raises(InputError, match=problem):
        job_for_engine(Job(global_batch_tokens=8, seq_len=8, precision="int8_aqt"))


@pytest.mark.parametrize("name", ["fp8_deepseek_v3", "fp8_nanotron", "fp8_torchao"])
def test_a_search_for_what_runs_keeps_to_the_layouts_of_the_recipe(name: str) -> None:
    precision = get_precision(name)
    kept = sw.plan("llama-3-8b", "h100:16", global_batch_tokens=2**20, seq_len=8192, precision=name, runnable=True)
    for layout in (kept.layout, *(alternative.layout for alternative in kept.alternatives)):
        require_runnable(kept.model, layout, precision)


FP32 = get_precision("fp32")
UNRUNNABLE = {
    "weights": ({"weights": "fp8"}, "fp8 at rest, which takes scales, is"),
    "products": ({"matmul": "int8"}, "products in int8"),
    "first moments": ({"moments": "int8"}, "int8 at rest"),
    "second moments": ({"second_moment": "int8"}, "int8 at rest"),
    "gradients": ({"gradients": "fp8"}, "fp8 at rest"),
    "gradients added up otherwise": ({"activations": "bf16", "accumulated_gradients": "fp32"},
                                     "gradients in fp32, added up in another format, under bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNRUNNABLE)
def test_each_format_that_does_not_run_is_a_problem_of_its_own(name: str) -> None:
    changes, problem = UNRUNNABLE[name]
    require_runnable(MODEL, Layout(), replace(FP32, second_moment="fp32"))
    with pytest.raises(InputError) as caught:
        require_runnable(MODEL, Layout(), replace(FP32, **changes))  # type: ignore[arg-type]
    (reported,) = caught.value.problems
    assert reported.startswith(f"precision fp32: {problem}")


@pytest.mark.parametrize(
    ("changes", "layout", "problem"),
    [
        ({"activations": "bf16", "gathered": "bf16"}, Layout(fsdp=2, zero_stage=3), "gathers in bf16"),
        (
            {"matmul": "fp8", "operand": "e4m3", "gradient_operand": "e5m2", "scaling": "tensor"},
            Layout(tp=2, sequence_parallel=True, async_tp=True), "in pieces",
        ),
    ],
)  # fmt: skip
def test_layouts_that_a_recipe_does_not_run_are_named(changes: dict[str, str], layout: Layout, problem: str) -> None:
    recipe = replace(FP32, **changes)  # type: ignore[arg-type]
    require_runnable(MODEL, replace(layout, zero_stage=min(layout.zero_stage, 2), async_tp=False), recipe)
    with pytest.raises(InputError, match=problem):
        require_runnable(MODEL, layout, recipe)


def test_there_are_as_many_processes_as_devices() -> None:
    require_world(small_plan(2), 2)
    with pytest.raises(InputError, match=r"found 1 processes; the plan \(dp=2 .*\) is of 2 devices"):
        require_world(small_plan(2), 1)


def test_the_smallest_change_that_fits_is_the_fastest_of_those_with_the_fewest_choices() -> None:
    plan = big_plan(dp=8, micro_batch_seqs=4)
    needed = plan.estimate.memory_bytes
    smallest = smallest_change(plan, int(0.9 * needed))
    assert smallest is not None
    one_choice = [
        {"recompute": "selective"}, {"recompute": "full"}, {"micro_batch_seqs": 2}, {"micro_batch_seqs": 1},
        *({"dp": 1, "fsdp": 8, "zero_stage": stage} for stage in (1, 2, 3)),
    ]  # fmt: skip
    priced = [
        (sw.estimate(plan.model, plan.cluster, plan.job, replace(plan.layout, **change)), change)
        for change in one_choice
    ]
    fitting = [(estimate.step_time_s, change) for estimate, change in priced if estimate.memory_bytes <= 0.9 * needed]
    assert smallest[0] == min(fitting, key=lambda pair: pair[0])[1]
    # less than any one choice gives takes two
    smallest_bytes = min(estimate.memory_bytes for estimate, _ in priced)
    two = smallest_change(plan, int(0.8 * smallest_bytes))
    assert two is not None
    assert not any(set(two[0]) <= set(change) for change in one_choice)
    assert two[1].memory_bytes <= 0.8 * smallest_bytes
    assert smallest_change(plan, 10**9) is None


def test_an_error_of_memory_names_flags_that_plan_again() -> None:
    plan = big_plan(fsdp=8, zero_stage=1, micro_batch_seqs=4)
    available = int(0.5 * plan.estimate.memory_bytes)
    require_memory(plan, TrainingRecipe(steps=1), int(plan.estimate.memory_bytes) + 1, "cpu")
    with pytest.raises(NothingFitsError, match="the smallest change that fits takes") as caught:
        require_memory(plan, TrainingRecipe(steps=1), available, "cuda:0")
    assert caught.value.exit_code == 3
    flags = str(caught.value).split("plan again with ")[1].split()
    pins = dict(flag.split("=") for flag in flags if flag != "--pin")
    assert pins
    numbers = {name: int(value) if value.isdecimal() else value for name, value in pins.items()}
    choices = Choices().with_pins(numbers, {})
    again = searched(plan.problem, choices=choices)
    assert all(getattr(again.layout, name) == value for name, value in numbers.items())
    with pytest.raises(
        NothingFitsError,
        match="no change of one or two of recomputation, micro-batch and ZeRO stage fits, and other degrees",
    ):
        require_memory(plan, TrainingRecipe(steps=1), 10**9, "cuda:0")


def test_required_memory_includes_what_train_keeps() -> None:
    """A plan of software that keeps casts of activations takes less."""
    plan = big_plan(fsdp=8, zero_stage=1, micro_batch_seqs=4)
    plan = plan_layout(plan.model, plan.cluster, replace(plan.job, precision="fp8_delayed"), plan.layout)
    with pytest.raises(NothingFitsError, match="the smallest change that fits takes"):
        require_memory(plan, TrainingRecipe(steps=1), int(plan.estimate.memory_bytes) + 1, "cuda:0")
    runnable = estimate(plan.problem, plan.layout, IssuePolicy(casts="in_products", weight_casts="each_step"))
    assert runnable.memory_bytes > plan.estimate.memory_bytes
    require_memory(plan, TrainingRecipe(steps=1), int(runnable.memory_bytes) + 1, "cuda:0")


def test_memory_is_what_the_container_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine_resources, "CGROUP_LIMIT", limit)
    whole = machine_resources.host_bytes()
    assert whole > 2**26
    limit.write_text("max\n")
    assert machine_resources.host_bytes() == whole
    limit.write_text("1048576\n")
    assert machine_resources.host_bytes() == 2**20
    assert machine_resources.device_bytes("cpu", 4) == 2**18


SCRIPT = """
import sys
from shardwise.values.argument_parser import Parser
from shardwise.run.trainer.flags import add_train_arguments, parse_settings as settings_of
from shardwise.run.trainer.preflight import check_run as admit
from shardwise.search.plan_file import load_plan
from shardwise.values.errors import ShardwiseError
parser = Parser()
add_train_arguments(parser)
settings = settings_of(parser.parse_args(sys.argv[1:]))
try:
    admit(load_plan(settings.plan), settings)
except ShardwiseError as error:
    print(error)
sys.exit("torch" in sys.modules)
"""


def run_admission(flags: list[str]) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *flags, "--steps", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_launcher_checks_plan_and_data_without_pytorch(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path)
    assert run_admission(flags) == ""
    plan = small_plan(vocab_size=VOCAB - 1)
    payload = json.loads((tmp_path / "plan.json").read_text())
    payload["model"]["vocab_size"] = plan.model.vocab_size
    payload["layout"] |= {"offload": "optimizer", "text": f"{payload['layout']['text']} offload=optimizer"}
    (tmp_path / "plan.json").write_text(json.dumps(payload))
    assert load_plan(tmp_path / "plan.json").model.vocab_size == VOCAB - 1
    reported = run_admission(flags).splitlines()
    assert reported[0].startswith("plan: offload=optimizer is planned, not yet runnable")
    assert f"the tokens have a vocabulary of {VOCAB}, the model one of {VOCAB - 1}" in reported[1]


def test_data_too_short_for_a_sequence_is_refused(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path)
    payload = json.loads((tmp_path / "plan.json").read_text())
    payload["job"] |= {"seq_len": 1024, "global_batch_tokens": 8192}
    (tmp_path / "plan.json").write_text(json.dumps(payload))
    assert "train has 1,000 tokens; sequences of 1,024 require at least 1,025" in run_admission(flags)
