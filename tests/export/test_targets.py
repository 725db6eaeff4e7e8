"""Every target: what it writes it reads back, what it cannot run it refuses, and its options are those of its release."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import get_args

import pytest
from export.random_launches import chip_of, random_launches, runnable_launches, sayable

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.stacks import get_stack
from shardwise.interop.frameworks.targets import TARGETS, find_target, get_target
from shardwise.interop.launches.export_launch import NONE_NEAR, build_files, export
from shardwise.interop.launches.launch import Launch, launch_from_plan
from shardwise.interop.launches.target import Target
from shardwise.interop.launches.translate_launch import LISTED_FIELDS, choose_precision, refusals, to_options
from shardwise.interop.read_launch import parse_launch
from shardwise.layout.layout import Layout
from shardwise.layout.rules.stack_abilities import ENGINE_STACK
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.model.structure import MlpKind
from shardwise.search.plan import Plan, plan_layout
from shardwise.values.errors import InputError
from shardwise.values.units import format_seconds

NUM_WRITTEN, NUM_MORE_WRITTEN, NUM_REFUSED, NUM_NEAREST = 24, 300, 50, 2
NUM_PLANS = 20  # of our own engine, whose launches are plan files, which have tests of their own


def kept_fields(launch: Launch) -> dict[str, object]:
    """All of a launch that no target may lose."""
    return {part: value for part, value in launch.fields().items() if not part.startswith(LISTED_FIELDS)}


@pytest.mark.parametrize("num_written", [NUM_WRITTEN, pytest.param(NUM_MORE_WRITTEN, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_written_launches_are_read_back_equal(target: Target, num_written: int) -> None:
    for launch in islice(runnable_launches(target.name, 1), NUM_PLANS if target.stack == ENGINE_STACK else num_written):
        options = to_options(target, launch)
        files = build_files(target, options, launch)
        target_files = {name: text for name, text in files.items() if name in target.write(options, launch)}
        model = None if target.includes_model else launch.model
        heard = parse_launch(target_files, launch.machines, target=target.name, model=model)
        assert kept_fields(heard.launch) == kept_fields(launch), launch.layout
        assert heard.unknown == ()


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_an_mlp_that_a_target_lacks_is_a_reason(target: Target) -> None:
    """`plan` asks every target: none fails over an activation that it has no name for."""
    launch = next(runnable_launches(target.name, 1))
    for mlp in get_args(MlpKind):
        # Weights of an activation's own are known for an MLP alone.
        if launch.model.num_experts and mlp == "xielu":
            continue
        changed = replace(launch, model=replace(launch.model, name="other", mlp=mlp))
        reasons = refusals(changed, target)
        is_judged = target.includes_model and target.stack != ENGINE_STACK
        assert reasons or not is_judged or mlp in ("swiglu", "geglu", "gelu", "relu", "clamped_swiglu")


@pytest.mark.parametrize("target", ["megatron", "megatron-bridge", "maxtext", "nanotron"])
def test_constants_that_a_launch_says_count_before_the_catalogue(target: str) -> None:
    """The sizes are a known model's, whose name and other constants stay."""
    launch = next(runnable for runnable in runnable_launches(target, 3) if runnable.model.name == "llama-3-8b")
    numerics = replace(launch.model.numerics, norm_epsilon=3e-6)
    if target != "nanotron":  # its Llama has the base of the first Llama, and no option for another
        numerics = replace(numerics, rotary=replace(numerics.rotary, base=1e6))
    model = replace(launch.model, numerics=numerics)
    written = get_target(target).write(to_options(get_target(target), replace(launch, model=model)), launch)
    heard = parse_launch(written, launch.machines, target=target).launch.model
    assert heard.name == "llama-3-8b"
    assert heard.numerics.norm_epsilon == 3e-6
    assert heard.numerics.rotary.base == (1e4 if target == "nanotron" else 1e6)
    assert replace(heard, numerics=numerics) == model


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_unsupported_plans_are_refused_with_the_reasons(target: Target) -> None:
    refused = ((launch, reasons) for launch in random_launches(2) if (reasons := refusals(launch, target)))
    for _, reasons in islice(refused, NUM_REFUSED):
        assert all(len(reason) > 20 for reason in reasons)


def named_instead(plan: Plan, target: Target) -> Plan | None:
    """The plan of the layout that the error names for one that a target refuses; None where it says that there is none."""
    with pytest.raises(InputError) as raised:
        export(plan, target)
    start, separator, layout = raised.value.problems[-1].partition("the nearest layout that it runs: ")
    if not separator:
        assert start == NONE_NEAR
        return None
    return plan_layout(plan.model, plan.cluster, plan.job, Layout.parse(layout))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_the_named_nearest_layout_runs(target: Target) -> None:
    models = [model for model in ("llama-3-8b", "mixtral-8x7b") if model in sayable(target.name, "models")]
    launches = random_launches(4, chip=chip_of(target.name), models=models, precisions=("bf16",))
    refused = (
        candidate
        for candidate in islice(launches, NUM_REFUSED)
        if refusals(choose_precision(candidate, target), target)
    )
    named = (near for candidate in refused if candidate.plan and (near := named_instead(candidate.plan, target)))
    several = list(islice(named, NUM_NEAREST))
    assert len(several) == NUM_NEAREST
    for near in several:
        assert near.estimate.fits
        assert export(near, target).files


@pytest.mark.parametrize(
    ("model", "target", "reason"),
    [
        ("glm-4.5-air", "nanotron", "hidden_size: found 4096; a multiple of num_attention_heads = 96 is required"),
        ("mpt-7b", "megatron-bridge", "position_embedding_type: found 'none'; one of learned_absolute, rope, yarn"),
    ],
)
def test_a_value_that_no_option_can_hold_is_a_reason(model: str, target: str, reason: str) -> None:
    precision = get_stack(get_target(target).stack).precision
    job, layout = Job(global_batch_tokens=2**18, seq_len=2048, precision=precision), Layout.parse("fsdp=8 zero_stage=1")
    launch = launch_from_plan(plan_layout(load_model(model), load_cluster("h100:8"), job, layout))
    assert [text for text in refusals(launch, get_target(target)) if reason in text]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("target", ["maxtext", "maxtext-gpu"])
def test_layouts_searched_under_maxtext_are_accepted_by_it(target: str, model: str) -> None:
    """Checkpoints of every block, and weights that are sharded over the context and the expert axes too."""
    cluster = load_cluster("tpu-v5p:2x4x4" if chip_of(target) == "tpu-v5p" else "h100:32", stack=target)
    for seq_len in (4096, 32768):
        chosen = sw.plan(load_model(model), cluster, Job(global_batch_tokens=2**21, seq_len=seq_len))
        assert refusals(launch_from_plan(chosen), get_target(target)) == [], chosen.layout


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(InputError, match="megatron"):
        get_target("megatrom")


def test_a_refused_plan_comes_with_the_nearest_that_runs() -> None:
    layout = Layout.parse("tp=2 fsdp=8 zero_stage=1 recompute=alternate")
    plan = plan_layout(
        load_model("llama-3-8b"), load_cluster("h100:16"), Job(global_batch_tokens=2**20, seq_len=8192), layout
    )
    with pytest.raises(InputError, match="recompute") as raised:
        export(plan, get_target("megatron"))
    assert "fsdp=8 tp=2" in raised.value.problems[-1]


def test_a_missing_precision_is_replaced_with_a_note() -> None:
    """torchtitan reduces gradients in fp32; nobody who plans for it by name has to know."""
    layout = Layout.parse("fsdp=16 zero_stage=3")
    cluster = load_cluster("h100:16", stack="torchtitan")
    plan = plan_layout(load_model("llama-3-8b"), cluster, Job(global_batch_tokens=2**20, seq_len=8192), layout)
    exported = export(plan, get_target("torchtitan"))
    (note,) = (text for text in exported.not_expressible if "precision" in text)
    assert note.startswith("job.precision is bf16; torchtitan takes bf16_fp32_reduction: a step of ")
    assert find_target(plan) is get_target("torchtitan")
    with pytest.raises(InputError, match="nvfp4"):
        export(replace(plan, job=replace(plan.job, precision="nvfp4")), get_target("torchtitan"))


@pytest.mark.parametrize(
    ("target", "placement", "is_noted"),
    [
        ("megatron", "tp,cp,pp,fsdp,dp@0,1", True),
        ("megatron", "tp,cp,fsdp,pp,dp@0,1", False),  # pipelines and replicas, of which there is one, in another order
        ("megatron", "tp,cp,fsdp,dp,pp@0,1", False),
        ("slurm", "tp,cp,pp,fsdp,dp@0,1", False),  # our own engine numbers ranks as the plan does
    ],
)
def test_another_order_of_ranks_is_noted(target: str, placement: str, is_noted: bool) -> None:
    """The step is that of the same layout in the target's order."""
    model, job = load_model("llama-3-8b"), Job(global_batch_tokens=2**20, seq_len=8192)
    cluster = load_cluster("h100:16", stack="megatron")
    text = "tp=2 pp=2 fsdp=4 zero_stage=1 placement="
    plan, theirs = (
        plan_layout(model, cluster, job, Layout.parse(text + order)) for order in (placement, "tp,cp,fsdp,dp,pp@0,1")
    )
    notes = [note for note in export(plan, get_target(target)).not_expressible if "placement" in note]
    steps = [format_seconds(priced.estimate.step_time_s) for priced in (theirs, plan)]
    assert (
        notes
        == [
            f"layout.placement is {placement}; Megatron-LM numbers ranks tp,cp,fsdp,dp,pp, innermost first: a step of "
            f"{steps[0]} for {steps[1]}"
        ]
        * is_noted
    )


@pytest.mark.parametrize(
    ("target", "precision", "taken"),
    [
        ("megatron", "bf16_fp32_gradients", "bf16_fp32_main_gradients"),  # 2 bytes of gradients less, and not 4
        ("megatron", "bf16_no_master", "bf16"),
        (
            "automodel",
            "bf16_fp32_main_gradients",
            "bf16_fp32_reduction",
        ),  # as many bytes as bf16, reduced in fp32 as well
        ("megatron", "fp8_torchao", "fp8_current"),  # as many bytes as other fp8, scales of the tensor at hand as well
        ("megatron", "bf16", "bf16"),
        ("megatron", "int8_aqt", "int8_aqt"),  # none multiplies in int8
    ],
)
def test_of_several_precisions_the_nearest_in_bytes_of_state_is_taken(target: str, precision: str, taken: str) -> None:
    job = Job(global_batch_tokens=2**20, seq_len=8192, precision=precision)
    plan = plan_layout(load_model("llama-3-8b"), load_cluster("h100:16"), job, Layout.parse("fsdp=16 zero_stage=2"))
    assert choose_precision(launch_from_plan(plan), get_target(target)).job.precision == taken
