"""What a stack can run: its table, the searches and plans that keep to it, and messages about other layouts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.hardware.stacks import STACK_KINDS, Abilities, get_stack, stack_names
from shardwise.layout.choices import STAGES, Choices
from shardwise.layout.layout import CP_VARIANTS, OFFLOADS, Layout
from shardwise.layout.rules.framework_rules import FRAMEWORK_RULES, POLICY_RULES
from shardwise.layout.rules.stack_abilities import layout_as_run, stack_of, unsupported_choices
from shardwise.measure.calibrate.prediction_errors import predict_rows
from shardwise.measure.calibrate.published_runs.prediction_from_row import RunCase
from shardwise.measure.calibrate.published_runs.run_table import RunRow, layout_rows, published_rows
from shardwise.model.recompute_policies import policy_names
from shardwise.pipeline.registry import SCHEDULES
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.plan import plan_layout
from shardwise.search.plan_file import parse_plan, plan_payload
from shardwise.search.vectorised.search_layouts import SearchChecks, search_layouts
from shardwise.values.engine_policies import LOSS_KERNELS
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS

JOB = sw.Job(global_batch_tokens=2**20, seq_len=4096)


def job_of(stack: str) -> sw.Job:
    return replace(JOB, precision=get_stack(stack).precision)


TABLES: dict[str, Any] = {
    "axes": ("tp", "cp", "pp", "ep"), "zero": range(4), "zero_with_pp": range(4),
    "zero_with_cp": range(4), "zero_with_ep": range(4), "schedules": SCHEDULES,
    "cp_variants": CP_VARIANTS, "recompute": policy_names(), "losses": LOSS_KERNELS, "offload": OFFLOADS,
    "products": [precision.matmul_format for precision in PRECISIONS.values()] + ["int8"],
    "precisions": PRECISIONS, "replica_precisions": PRECISIONS, "stages": STAGES, "rules": (*FRAMEWORK_RULES, *POLICY_RULES),
}  # fmt: skip
NAMED = tuple(name for name in stack_names() if name not in STACK_KINDS)


@pytest.mark.parametrize("name", stack_names())
def test_every_stack_says_all_of_what_it_runs_in_names_that_there_are(name: str) -> None:
    stack = get_stack(name)
    runs = stack.abilities
    assert len(runs.source) > 20
    for ability, values in runs.items():
        assert isinstance(values, bool) or set(values) <= set(TABLES[ability]), ability
    assert set(runs.zero_with_pp) <= set(runs.zero)
    assert bool(runs.schedules) == ("pp" in runs.axes)
    assert bool(runs.cp_variants) == ("cp" in runs.axes)
    assert runs.recompute
    assert "none" in runs.offload
    assert stack.loss in runs.losses
    assert {field.name for field in fields(Abilities)} == {
        *TABLES,
        "sequence_parallel",
        "uneven_batches",
        "async_tp",
        "uneven_stages",
        "whole_experts",
        "source",
    }


@pytest.mark.parametrize("name", STACK_KINDS)
def test_a_kind_runs_what_any_of_its_stacks_does(name: str) -> None:
    runs = dict(get_stack(name).abilities.items())
    abilities = [
        dict(get_stack(stack_name).abilities.items()) for stack_name in NAMED if get_stack(stack_name).kind == name
    ]
    rules = [set(values_by_ability.pop("rules")) for values_by_ability in abilities]
    assert set(runs.pop("rules")) == set.intersection(*rules)
    for ability, values in runs.items():
        several = [values_by_ability[ability] for values_by_ability in abilities]
        assert values == any(several) if isinstance(values, bool) else set(values) == set().union(*several)


def _as_stated(case: RunCase) -> Layout:
    """The layout of a run, with whatever its stack has in place of `selective`."""
    usual = case.software.stack.abilities.recompute[0]
    return replace(case.layout, recompute=usual) if case.layout.recompute == "selective" else case.layout


PUBLISHED = [
    pytest.param(published_rows()[::4], id="a part of the runs"),
    pytest.param(published_rows(), id="runs", marks=pytest.mark.matrix),
    pytest.param(layout_rows(), id="layouts"),
]


@pytest.mark.parametrize("rows", PUBLISHED)
def test_every_published_run_is_one_that_its_stack_can_run(rows: tuple[RunRow, ...]) -> None:
    """But for recomputes between none and all, which are priced as ours, whatever software calls selective."""
    problems_by_run = {
        predicted.row.id: problems
        for predicted in predict_rows(rows)
        if predicted.prediction
        and (case := predicted.prediction.case)
        and (problems := unsupported_choices(case.software.stack, case.architecture, case.job, _as_stated(case)))
    }
    assert problems_by_run == {}


@pytest.mark.parametrize(
    ("stack", "text", "words"),
    [
        ("llm-foundry-torch2", "fsdp=8 tp=2", "llm-foundry-torch2 has no tp, found tp = 2"),
        ("torch-fsdp", "dp=16", ""),
        ("torch-fsdp", "fsdp=16 zero_stage=1", "torch-fsdp has no ZeRO-1; a zero_stage of 0, 2, 3 is required"),
        ("accelerate", "fsdp=4 tp=2 cp=2 cp_variant=zigzag sequence_parallel=false", ""),
        ("accelerate", "fsdp=16 recompute=full offload=activations", ""),
        ("accelerate", "fsdp=8 cp=2 cp_variant=ulysses", "accelerate has no cp_variant=ulysses"),
        ("accelerate", "fsdp=8 ep=2", "accelerate has no ep"),
        ("megatron", "fsdp=4 pp=4 zero_stage=3", "megatron has no ZeRO-3 in a pipeline"),
        ("megatron", "fsdp=4 pp=4 zero_stage=1", ""),
        ("deepspeed", "fsdp=4 pp=4 zero_stage=1", "deepspeed has no pp, found pp = 4"),
        ("deepspeed", "dp=2 fsdp=8", "deepspeed: ZeRO shards over all replicas, found dp = 2 beside fsdp = 8; set dp=1"),
        ("deepspeed", "fsdp=16 offload=activations", "activations on the host are checkpoints of layers; set recompute=full"),
        ("deepspeed", "dp=16 offload=optimizer", "an optimizer on the host is a sharded one"),
        ("megatron", "fsdp=16 recompute=core_attn recompute_layers=2", "recompute_layers goes with whole layers"),
        ("nanotron", "dp=2 pp=8 layers_per_stage=4,4,4,4,4,4,4,4 micro_batch_seqs=32", "1f1b takes at least 7 micro-batches"),
        ("torchtitan", "fsdp=2 tp=8 sequence_parallel=true", ""),
        ("torchtitan", "fsdp=1 dp=1 tp=16", "tp = 16 for 8 key-value heads, which are not copied"),
        ("deepspeed", "fsdp=4 cp=4 cp_variant=zigzag", "deepspeed has no cp_variant=zigzag"),
        ("deepspeed", "fsdp=4 cp=4 cp_variant=ulysses", ""),
        ("megatron-deepspeed", "fsdp=2 pp=8 zero_stage=1 num_virtual_stages=2", "no schedule=interleaved"),
        ("megatron-deepspeed", "fsdp=8 tp=2 zero_stage=1 sequence_parallel=true", "no sequence parallelism"),
        ("megatron-2022", "pp=16 layers_per_stage=1,3,2,2,2,2,2,2,2,2,2,2,2,2,2,2", "as many layers on each stage"),
        ("megatron-2022", "dp=2 pp=8 num_virtual_stages=3", "does not divide 32"),
        ("megatron", "fsdp=8 tp=2 zero_stage=1 async_tp=true", ""),
        ("internevo", "fsdp=8 tp=2 zero_stage=1 async_tp=true", "no async_tp=true"),
        ("megatron", "fsdp=4 pp=4 zero_stage=1 schedule=dualpipe", "no schedule=dualpipe"),
        ("torchtitan", "fsdp=4 pp=4 zero_stage=3 num_virtual_stages=2 schedule=zb_v", ""),
        ("torchtitan", "fsdp=16 recompute=selective", "no recompute=selective"),
        ("torchtitan", "fsdp=16 offload=optimizer", "no offload=optimizer"),
        ("maxtext", "fsdp=16 zero_stage=1 recompute=none", "no recompute=none; recompute=selective or full"),
        ("maxtext", "fsdp=8 cp=2 zero_stage=1 recompute=full", "no ZeRO-1 with context parallelism; a zero_stage of 3"),
        ("automodel", "dp=8 tp=2", "plain replicas are DDP's, which splits nothing else; set a zero_stage of 2 or 3"),
        ("automodel", "fsdp=8 cp=2 zero_stage=1", "no ZeRO-1; a zero_stage of 0, 2, 3"),
    ],
)  # fmt: skip
def test_missing_abilities_of_a_layout_are_named(stack: str, text: str, words: str) -> None:
    model = sw.load_model("llama-3-8b")
    problems = unsupported_choices(get_stack(stack), model, job_of(stack), Layout.parse(text))
    assert len(problems) == bool(words), problems
    assert all(words in problem for problem in problems)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_a_search_under_a_stack_finds_nothing_that_it_does_not_run(name: str, model: str) -> None:
    stack, architecture = get_stack(name), sw.load_model(model)
    cluster = sw.load_cluster("h100:16" if "GPU" in stack.platforms else "tpu-v5p:2x2x4", stack=name)
    job = replace(job_of(name), loss=stack.loss)
    result = search_layouts(
        Problem(architecture, cluster, job),
        choices=Choices().limit_to_stack(stack, architecture, job_of(name)),
        checks=SearchChecks(num_samples=200),
    )
    for row in (*result.best, *result.by_factorisation, *result.sampled):
        assert unsupported_choices(stack, architecture, job, row.layout) == []
    for row in result.sampled[:20]:
        assert row.step_time_s == pytest.approx(
            estimate(Problem(architecture, cluster, job), row.layout).step_time_s, rel=1e-9
        )


def test_only_what_a_stack_has_is_searched() -> None:
    llama = sw.load_model("llama-3-8b")
    has = {name: Choices().limit_to_stack(get_stack(name), llama, job_of(name)) for name in stack_names()}
    in_pieces = {name for name, choices in has.items() if choices.async_tp == (0, 1)}
    assert {"megatron", "nemo-25", "torchtitan", "maxtext", "fused", "compiled"} <= in_pieces
    assert not {"megatron-2022", "deepspeed", "torch-fsdp", "internevo", "shardwise"} & in_pieces
    assert has["torchtitan"].schedule == ("natural", "interleaved_zb", "zb_v", "dualpipe_v")
    assert has["deepspeed"].schedule == ("none",)
    assert has["maxtext"].schedule == ("none", "afab", "looped_bfs")
    assert has["maxtext"].stages == ("equal",)
    assert has["nanotron"].stages == ("by_products",)
    assert has["maxtext"].recompute == ("selective", "full")  # its blocks are checkpoints, whatever these keep
    recompute = ("none", "mlp", "full")
    assert has["fused"] == replace(Choices(), stack=get_stack("fused"), async_tp=(0, 1), recompute=recompute)
    assert has["shardwise"].recompute == ("none", "selective", "mlp", "full")
    assert Choices(runnable=True).limit_to_stack(get_stack("maxtext"), llama, JOB) == Choices(runnable=True)


@pytest.mark.parametrize(
    ("name", "model", "precision", "recompute"),
    [
        ("megatron", "llama-3-70b", "bf16", ("none", "mlp", "full")),
        ("megatron", "mixtral-8x7b", "bf16", ("none", "layernorm+moe_act", "full")),
        ("megatron", "mixtral-8x7b", "fp8_delayed", ("none", "full")),
        ("nemo-25", "deepseek-v3", "bf16", (
            "none", "layernorm+moe_act", "layernorm+moe_act+mla_up_proj",
            "layernorm+moe_act+mla_up_proj+mlp+shared_experts", "full",
        )),
        ("megatron-2022", "gpt-3-175b", "bf16", ("none", "core_attn", "full")),
        ("nemo-24", "llama-3-8b", "bf16", ("none", "full")),
        ("torchtitan", "llama-3-8b", "bf16_fp32_reduction", ("none", "alternate", "full")),
    ],
)  # fmt: skip
def test_only_the_recompute_that_a_stack_runs_on_a_model_is_searched(
    name: str, model: str, precision: str, recompute: tuple[str, ...]
) -> None:
    choices = Choices().limit_to_stack(get_stack(name), sw.load_model(model), replace(JOB, precision=precision))
    assert choices.recompute == recompute


def test_delayed_scaling_runs_no_norm_again() -> None:
    """Megatron-Core, TransformerConfig: "Delayed scaling does not support moe_act and layernorm recompute for fp8"."""
    model, stack = sw.load_model("mixtral-8x7b"), get_stack("megatron")
    layout = Layout.parse("fsdp=16 zero_stage=1 recompute=layernorm+moe_act")
    assert unsupported_choices(stack, model, JOB, layout) == []
    (text,) = unsupported_choices(stack, model, replace(JOB, precision="fp8_delayed"), layout)
    assert text.startswith("megatron does not run layernorm and moe_act again with delayed scaling")


EXPLAINED = ("maxtext", "nemo-25")  # of the stacks that overlap it: one for TPUs, one for GPUs


@pytest.mark.parametrize("name", stack_names())
def test_a_given_layout_is_as_the_stack_runs_it(name: str) -> None:
    """XLA, NeMo and Megatron Bridge overlap tensor parallelism whether a layout says so or not; no other stack does."""
    overlaps = name.startswith(("pax", "maxtext", "nemo", "megatron-bridge"))
    stack, layout = get_stack(name), Layout(dp=4, tp=2, sequence_parallel=True)
    assert stack.overlaps_tp is overlaps
    assert layout_as_run(stack, layout) == replace(layout, async_tp=overlaps)
    for unchanged in (replace(layout, sequence_parallel=False), Layout(fsdp=8, sequence_parallel=True)):
        assert layout_as_run(stack, unchanged) == unchanged
    if overlaps:
        cluster = sw.load_cluster("h100:8" if "GPU" in stack.platforms else "tpu-v5p:2x2x2", stack=name)
        plan = plan_layout(sw.load_model("llama-3-8b"), cluster, JOB, layout)
        assert plan.layout.async_tp
        assert plan.estimate.step_time_s == sw.estimate("llama-3-8b", cluster, JOB, layout).step_time_s
    if name in EXPLAINED:
        explanation = sw.explain(plan, str(layout))
        assert explanation.against is not None
        assert explanation.against.layout == str(plan.layout)


def test_without_a_stack_a_layout_is_as_given() -> None:
    layout = Layout(dp=4, tp=2, sequence_parallel=True)
    assert layout_as_run(None, layout) is layout


@pytest.mark.parametrize(
    ("stack", "pins", "job", "words"),
    [
        ("nemo-25", {"schedule": "dualpipe"}, JOB, "nemo-25 has no schedule=dualpipe; schedule=none or 1f1b or interleaved"),
        ("torch-fsdp", {"tp": 2}, JOB, "torch-fsdp has no tp=2; tp=1 is what it runs"),
        ("torch-fsdp", {"zero_stage": 1}, JOB, "no zero_stage=1"),
        ("deepspeed", {}, replace(JOB, precision="fp8_delayed"), "no products in fp8"),
        ("nemo-25", {}, replace(JOB, loss="chunked"), "no loss of the kind chunked; it has unfused, fused"),
        ("maxtext-gpu", {"stages": "balanced"}, JOB, "no stages=balanced"),
    ],
)  # fmt: skip
def test_a_plan_for_a_stack_refuses_what_it_does_not_run(
    stack: str, pins: dict[str, Any], job: sw.Job, words: str
) -> None:
    choices = Choices().with_pins(pins, {})
    with pytest.raises(InputError) as error:
        sw.plan(sw.load_model("llama-3-8b"), sw.load_cluster("h100:16", stack=stack), job, choices=choices)
    assert words in str(error.value)
    kind = get_stack(stack).kind
    llama = sw.load_model("llama-3-8b")
    of_kind = (
        Choices().with_pins(pins, {}).limit_to_stack(get_stack(kind), llama, job)
    )  # software of that kind may have it
    assert all(getattr(of_kind, name)[0] == value for name, value in pins.items() if name != "tp")


def test_a_pinned_value_stays_where_the_stack_would_search_more() -> None:
    stack = get_stack("torchtitan")
    choices = (
        Choices()
        .with_pins({"async_tp": False, "schedule": "1f1b"}, {})
        .limit_to_stack(stack, sw.load_model("llama-3-8b"), job_of(stack.name))
    )
    assert (choices.async_tp, choices.schedule) == ((0,), ("1f1b",))
    assert choices.stack == stack


def test_an_estimate_of_what_a_stack_does_not_run_is_made_and_says_so() -> None:
    model, layout = sw.load_model("llama-3-8b"), Layout.parse("fsdp=4 pp=4 zero_stage=3")
    words = "deepspeed has no pp, found pp = 4; it has data parallelism, tp, cp, ep; set pp=1"
    cluster = sw.load_cluster("h100:16", stack="deepspeed")
    assert stack_of(cluster) == get_stack("deepspeed")
    estimated = plan_layout(model, cluster, JOB, layout).estimate
    assert words in estimated.notes
    assert replace(estimated, notes=()) == replace(
        estimate(Problem(model, cluster, replace(JOB, loss="unfused")), layout), notes=()
    )
    for stack_name in ("torchtitan", "fused"):
        notes = plan_layout(
            model, sw.load_cluster("h100:16", stack=stack_name), job_of(stack_name), layout
        ).estimate.notes
        assert not any("has no" in note for note in notes)


def test_a_plan_says_what_another_stack_would_gain() -> None:
    """llm-foundry has no axis but FSDP's, which is slow where each device has few tokens."""
    model, job = sw.load_model("llama-3-70b"), sw.Job(global_batch_tokens=2**20, seq_len=4096)
    narrow = sw.plan(model, sw.load_cluster("h100:256", stack="llm-foundry-torch2"), job)
    assert narrow.search is not None
    elsewhere = narrow.search.elsewhere
    assert elsewhere is not None
    text, gain = elsewhere.removeprefix("another stack could run ").split(": ")[:2]
    alternative = estimate(Problem(model, narrow.cluster, narrow.job), Layout.parse(text))
    assert gain.startswith(f"{narrow.estimate.step_time_s / alternative.step_time_s - 1:.0%} faster")
    assert alternative.fits
    assert unsupported_choices(get_stack("llm-foundry-torch2"), model, job, Layout.parse(text))
    all_has = sw.plan(model, sw.load_cluster("h100:256", stack="shardwise"), job)
    assert all_has.search is not None
    assert all_has.search.elsewhere is None
    assert parse_plan(plan_payload(narrow)).search == narrow.search


def test_of_many_plans_the_chosen_one_says_what_another_stack_would_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second search for each of the others would be for nobody."""
    planned_clusters: list[str] = []

    def record_call(plan: sw.Plan, *_: object) -> sw.Plan:
        assert plan.search is not None
        planned_clusters.append(plan.cluster.name)
        return replace(plan, search=replace(plan.search, elsewhere="told"))

    for module in ("planner", "compare_clusters", "plan_to_target_loss"):
        monkeypatch.setattr(f"shardwise.search.{module}.add_other_stack_gain", record_call)
    model, job = sw.load_model("gpt-2"), sw.Job(global_batch_tokens=2**16, seq_len=1024)
    two = [sw.load_cluster(name, stack="nemo-25") for name in ("h100:4", "h100:8")]
    compared = sw.plan_clusters(model, two, job)
    assert compared.plan is not None
    assert planned_clusters == [compared.plan.cluster.name]
    to_loss = sw.plan_to_loss(model, two, noise_scale="64Ki", batches=["64Ki", "128Ki"], seq_len=1024)
    assert to_loss.plan is not None
    assert planned_clusters == [compared.plan.cluster.name, to_loss.plan.cluster.name]
    for plan in (compared.plan, to_loss.plan):
        assert plan.search is not None
        assert plan.search.elsewhere == "told"
    sw.sweep(model, two[1], over="seq_len=1024,2048", global_batch_tokens="64Ki")
    assert len(planned_clusters) == 2
    assert sw.plan(model, two[0], job).search.elsewhere == "told"  # type: ignore[union-attr]


def test_recompute_policies_of_deepseek_are_supported_and_priced() -> None:
    """Norms, activations of experts, and what latent attention makes of its latents (arXiv 2412.19437, section 3.2.3)."""
    model, job = sw.load_model("deepseek-v3"), sw.Job(global_batch_tokens=512 * 4096, seq_len=4096)
    cluster = sw.load_cluster("h800:512", stack="megatron")
    activation_bytes, recompute_s = [], []
    for recompute in ("none", "layernorm+moe_act", "layernorm+moe_act+mla_up_proj", "full"):
        layout = Layout.parse(f"fsdp=64 pp=8 ep=64 zero_stage=1 recompute={recompute}")
        assert unsupported_choices(get_stack("megatron"), model, job, layout) == []
        estimated = estimate(Problem(model, cluster, job), layout)
        activation_bytes.append(estimated.memory["activations"])
        recompute_s.append(estimated.time["recompute"])
    assert activation_bytes == sorted(activation_bytes, reverse=True)
    assert recompute_s == sorted(recompute_s)
    assert len(set(activation_bytes)) == len(set(recompute_s)) == 4


@pytest.mark.parametrize(
    ("cluster", "pins", "overlapped"),
    [
        ("h100:32", {"tp": 8, "pp": 1}, True),
        ("h100:32", {"tp": 16, "pp": 1}, False),  # over the network no device reads another's memory
        ("h100:32", {"tp": 16, "pp": 1, "async_tp": True}, True),
        ("gb200:32", {"tp": 16, "pp": 1}, True),
        ("tpu-v5p:2x4x4", {"tp": 16, "pp": 1}, True),
    ],
)
def test_tensor_parallelism_is_overlapped_among_devices_that_reach_one_another(
    cluster: str, pins: dict[str, Any], overlapped: bool
) -> None:
    """Unless it is asked for."""
    plan = sw.plan("llama-3-70b", cluster, JOB, pins={**pins, "sequence_parallel": True, "cp": 1})
    assert plan.layout.async_tp is overlapped
