"""`import shardwise as sw`: names and paths stand for values, and the `repr` of a value has few lines."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import shardwise as sw
from shardwise import version
from shardwise.book_formulas.rooflines import KERNEL_FORMS
from shardwise.layout.placement import Placement
from shardwise.model.recompute_policies import policy_names
from shardwise.present.verbs.rooflines_and_rules import KernelName

SIZES: dict[str, Any] = {"global_batch_tokens": 2**19, "seq_len": 4096}
FUNCTIONS = (
    "cheat_sheet",
    "collective",
    "instructions",
    "matmul",
    "network",
    "precision",
    "reshard",
    "rule",
    "schedule",
    "schedules",
    "plan",
    "plan_clusters",
    "plan_to_loss",
    "estimate",
    "explain",
    "memory",
    "roofline",
    "rules",
    "run_noise",
    "simulation",
    "sweep",
)


def test_the_names_of_the_package_are_sorted_and_complete() -> None:
    assert sw.__all__ == sorted(sw.__all__) == dir(sw)
    for name in sw.__all__:
        value = getattr(sw, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="No shardwise attribute plans_of"):
        _ = sw.plans_of


def test_an_uninstalled_source_tree_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    installed = version.__version__
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "version", missing)
        assert importlib.reload(version).__version__ == "0+unknown"
    assert importlib.reload(version).__version__ == installed == metadata.version("shardwise")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_and_annotations(name: str) -> None:
    function = getattr(sw, name)
    assert ">>> import shardwise as sw" in function.__doc__
    assert f"sw.{name}(" in function.__doc__
    signature = inspect.signature(function)
    assert signature.return_annotation not in (inspect.Signature.empty, "Any")
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values())


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(sw.load_model("llama-3.2-1b"), sw.load_cluster("h100:8"), sw.Job(**SIZES))


def test_a_plan_by_names_equals_that_by_values(plan: sw.Plan) -> None:
    by_name = sw.plan("llama-3.2-1b", "h100:8", global_batch_tokens="512Ki", seq_len="4Ki")
    assert (by_name.layout, by_name.estimate, by_name.job) == (plan.layout, plan.estimate, plan.job)
    assert sw.plan(plan.model, plan.cluster, plan.job, tokens="1T").run is not None
    assert sw.plan("llama-3.2-1b", "h100:8", plan.job, stack="nemo-25").cluster == sw.load_cluster(
        "h100:8", stack="nemo-25"
    )


def test_paths_are_accepted_for_models_and_clusters(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": True,
    }), encoding="utf-8")  # fmt: skip
    cluster = tmp_path / "mine.toml"
    cluster.write_text('chip = "h100"\ntiers = [{ name = "t", size = 2, bytes_per_s = "25 GB/s" }]\n', encoding="utf-8")
    plan = sw.plan(config, cluster, global_batch_tokens=512, seq_len=64)
    assert (plan.model.num_layers, plan.cluster.num_devices) == (2, 2)


def test_pins_and_maxima_may_be_text_mapping_or_choices(plan: sw.Plan) -> None:
    arguments = (plan.model, plan.cluster, plan.job)
    text = sw.plan(*arguments, pins="tp=2 recompute=full", maxima="cp=1")
    mapping = sw.plan(*arguments, pins={"tp": 2, "recompute": "full"}, maxima={"cp": 1})
    chosen = sw.plan(*arguments, choices=sw.Choices().with_pins({"tp": 2, "recompute": "full"}, {"cp": 1}))
    assert text.layout == mapping.layout == chosen.layout
    assert (text.layout.tp, text.layout.cp, text.layout.recompute) == (2, 1, "full")
    combined = sw.plan(*arguments, pins={"tp": 2}, choices=sw.Choices().with_pins({"recompute": "full"}, {"cp": 1}))
    assert combined.layout == text.layout
    runnable = sw.plan(*arguments, runnable=True)
    assert (runnable.layout.tp, runnable.job.loss) == (1, "in_place")


def test_an_estimate_takes_a_layout_or_its_text(plan: sw.Plan) -> None:
    layout = sw.Layout(fsdp=8, zero_stage=3, recompute="full")
    by_value = sw.estimate(plan.model, sw.load_cluster("h100:8"), replace(plan.job, loss=None), layout)
    assert sw.estimate("llama-3.2-1b", "h100:8", layout="fsdp=8 recompute=full", **SIZES) == by_value


def test_the_memory_of_a_layout_equals_that_of_its_estimate(plan: sw.Plan) -> None:
    memory = sw.memory("llama-3.2-1b", "h100:8", "fsdp=4 pp=2 micro_batch_seqs=2", plan.job)
    priced = sw.estimate("llama-3.2-1b", "h100:8", plan.job, "fsdp=4 pp=2 micro_batch_seqs=2")
    assert (memory.memory_bytes, memory.fits, memory.margin) == (priced.memory_bytes, priced.fits, priced.margin)
    assert dict(memory.stages[memory.fullest_stage]) == dict(priced.memory)
    assert len(memory.stages) == 2
    filled = sw.memory("gpt-2", "h100:8", "dp=2 pp=4", seq_len="1Ki")
    assert filled.job == sw.Job(
        global_batch_tokens=2 * 4 * 1024, seq_len=1024
    )  # replicas, a micro-batch for each stage
    assert sw.memory("gpt-2", "h100:8", "dp=8").job.seq_len == 1024  # rows of its table of positions
    assert (
        sw.memory("gpt-2", "h100:8", "dp=8", seq_len=512, global_batch_tokens="64Ki").job.global_batch_tokens == 65536
    )


def test_explanations_of_a_plan_and_of_its_file_agree(plan: sw.Plan, tmp_path: Path) -> None:
    sw.dump_plan(plan, tmp_path / "plan.json")
    from_file = sw.explain(tmp_path / "plan.json", sw.Layout(tp=8, sequence_parallel=True))
    from_value = sw.explain(plan, sw.Layout(tp=8, sequence_parallel=True))
    from_text = sw.explain(plan, "tp=8 async_tp=false")
    assert from_file.against is not None
    assert from_value.against is not None
    assert from_text.against is not None
    assert (from_file.against.filled, from_text.against.filled.split()[0]) == ("", "sequence_parallel=true")
    assert (from_file.layout, from_file.against.layout) == (from_value.layout, from_value.against.layout)
    assert [term.name for term in sw.explain(plan, term="time.fsdp").terms] == ["time.fsdp"]


def test_rules_by_names_equal_the_books_rules(plan: sw.Plan) -> None:
    assert (
        sw.rules("llama-3.2-1b", "h100:8", **SIZES) == sw.book_rules(plan.model, plan.cluster, plan.job) == plan.rules
    )


def test_rooflines_are_of_kernels_or_of_blocks() -> None:
    assert set(get_args(KernelName)) == set(KERNEL_FORMS)
    kernel = sw.roofline("attention", sw.load_chip("h100"), T=8192, N=64, H=128, causal=True)
    assert isinstance(kernel, sw.KernelRoofline)
    assert kernel.causal
    assert sw.roofline("matmul", "tpu-v5e", B="1Ki", D=8192, F=8192, weights="int8").cost.flops == 2 * 1024 * 8192**2
    by_name = sw.roofline("llama-3-8b", "h100", T=4096, B=2)
    assert isinstance(by_name, sw.BlockRoofline)
    assert by_name == sw.roofline(sw.load_model("llama-3-8b"), "h100", T=4096, B=2)


def test_a_sweep_has_the_plans_of_its_values(plan: sw.Plan) -> None:
    swept = sw.sweep(
        "llama-3.2-1b",
        "h100:16",
        over=["gpus=8,16", "recompute=none,full"],
        pins="zero_stage=3",
        maxima={"tp": 1},
        **SIZES,
    )
    separate = sw.plan("llama-3.2-1b", "h100:8", pins="zero_stage=3 recompute=full", maxima={"tp": 1}, **SIZES)
    second = swept.points[1].plan
    assert second is not None
    assert (second.layout, second.estimate) == (separate.layout, separate.estimate)
    assert [dict(point.at) for point in swept.points][:2] == [
        {"gpus": 8, "recompute": "none"}, {"gpus": 8, "recompute": "full"}
    ]  # fmt: skip
    jobs = sw.sweep("gpt-2", plan.cluster, plan.job, over=["model=llama-3.2-1b", "batch=512Ki,1Mi"])
    assert [point.case.job.global_batch_tokens for point in jobs.points] == [2**19, 2**20]
    assert jobs.points[0].plan is not None
    assert jobs.points[0].plan.layout == plan.layout
    lengths = sw.sweep("gpt-2", "h100:8", over="seq_len=1Ki,2Ki", **SIZES)
    assert lengths.points[1].plan is None
    assert str(lengths.points[1].error) in repr(lengths)


WRONG = [
    (lambda: sw.sweep("gpt-2", "h100:8", over="gpu=8,16", **SIZES), ["over: found 'gpu' (did you mean 'gpus'?)"]),
    (lambda: sw.sweep("gpt-2", "h100:8", over="tp=1,2", pins="tp=2", **SIZES), ["pins tp: found over tp with it"]),
    (lambda: sw.sweep("gpt-2", sw.load_cluster("h100:8"), over="gpus=8,16", **SIZES), ["its name is required"]),
    (lambda: sw.sweep("gpt-2", "h100:8", over=(), **SIZES), ["over: found none; NAME=VALUES is required"]),
    (lambda: sw.plan("llama3-8b", "h10:8"), ["did you mean 'llama-3-8b'?", "did you mean 'h100'?", "h10"]),
    (lambda: sw.plan("gpt-2", "h100:8", batch_tokens=8, seq_len=8), ["no field 'batch_tokens' (did you mean 'global_batch"]),
    (lambda: sw.plan("gpt-2", "h100:8", global_batch_tokens="lots", seq_len=8), ["job: global_batch_tokens: found 'lots'"]),
    (lambda: sw.plan("gpt-2", sw.load_cluster("h100:8"), **SIZES, stack="fused"), ["stack: found 'fused' for a Cluster"]),
    (lambda: sw.plan("gpt-2", "h100:8", **SIZES, pins="tpp=2"), ["pin: found 'tpp' (did you mean 'tp'"]),
    (lambda: sw.plan("gpt-2", "h100:8", **SIZES, maxima="tp"), ["maxima: found 'tp'; KEY=VALUE is required"]),
    (lambda: sw.plan("gpt-2", "h100:8", deadline="30d", **SIZES), ["deadline: found no tokens", "such as tokens 15T"]),
    (lambda: sw.plan("gpt-2", "h100:8", goal="usd", **SIZES), ["goal: found without a noise scale"]),
    (lambda: sw.plan("gpt-2", "h100:8", noise_scale="1Mi", batch_schedule="0:1Mi"), ["batch_schedule: found with a noise scale"]),
    (lambda: sw.estimate("gpt-2", "h100:8", **SIZES), ["1,024 rows"]),
    (lambda: sw.explain("gpt-2"), ["cluster: missing; what to plan gpt-2 on is required"]),
    (lambda: sw.explain("nowhere.json", seq_len=8), ["seq_len: found with a plan"]),
    (lambda: sw.estimate("gpt-2", "h100:8", layout="dp=8", **SIZES), ["1,024 rows"]),
    (lambda: sw.memory("gpt-2", "h100:8", "dp=8", seq_len=4096), ["1,024 rows"]),
    (lambda: sw.memory("gpt-2", "h10:8", "dpp=8"), ["chip: found 'h10'", "layout: found 'dpp=8' (did you mean 'dp'"]),
    (lambda: sw.explain("nowhere.json"), ["cannot read nowhere.json"]),
    (lambda: sw.roofline("matmull", "h100", T=8), ["kernel: found 'matmull' (did you mean 'matmul'?)", "model: found 'matmull'"]),
    (lambda: sw.roofline("gpt-2", "h100", D=8), ["a block has no 'D'", "T missing"]),
    (lambda: sw.roofline("gpt-2", "h100", T=8, dtype="fp8"), ["a model's block is bf16"]),
    (lambda: sw.rules("gpt-2", "h10:8", seq_len="x"), ["chip: found 'h10'", "job: seq_len: found 'x'"]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "parts"), WRONG)
def test_all_problems_are_reported_together(make: Any, parts: list[str]) -> None:
    with pytest.raises(sw.InputError) as caught:
        make()
    assert all(part in str(caught.value) for part in parts), caught.value


def test_the_repr_of_a_value_has_few_lines(plan: sw.Plan) -> None:
    explanation = sw.explain(plan)
    printed = (plan, plan.estimate, plan.layout, explanation, sw.memory("gpt-2", "h100:8", "dp=8"))
    for value, lines in zip(printed, (4, 2, 1, 4, 2), strict=True):
        assert repr(value).count("\n") == lines - 1
        assert max(map(len, repr(value).splitlines())) < 200
    assert str(plan).splitlines()[1] == f"  {plan.layout}"
    assert "90% prediction interval" in repr(plan.estimate)
    assert "(a bound)" in repr(sw.estimate("llama-3.2-1b", "h100:8", plan.job, plan.layout))
    over = sw.estimate(
        "llama-3-8b", "h100:8", sw.Job(global_batch_tokens=2**20, seq_len=4096), "dp=8 micro_batch_seqs=32"
    )
    assert "DOES NOT FIT" in repr(over)


LAYOUTS = [
    sw.Layout(),
    sw.Layout(fsdp=8),  # a stage of ZeRO that is not the natural one
    sw.Layout(dp=2, fsdp=4, zero_stage=2, recompute="selective", recompute_layers=3, offload="both"),
    sw.Layout(tp=8),  # no sequence parallelism
    sw.Layout(tp=4, ep=8, etp=1, fsdp=8, zero_stage=3, sequence_parallel=True, async_tp=True),
    sw.Layout(cp=2, cp_variant="ulysses", micro_batch_seqs=4, pp=4, schedule="zb_h1", layers_per_stage=(6, 9, 9, 8)),
    sw.Layout(pp=2, num_virtual_stages=4, schedule="interleaved"),
    sw.Layout(sequence_parallel=True, cp_variant="ring"),
    sw.Layout(fsdp=8, zero_stage=3, placement=Placement(axes=("tp", "fsdp", "cp", "pp", "dp"), levels=(1, 0))),
    *(sw.Layout(recompute=policy) for policy in policy_names()),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_is_read_back_from_its_text(layout: sw.Layout) -> None:
    """`repr` to the last field; `str` leaves out the placement."""
    assert eval(repr(layout), {"Layout": sw.Layout}) == layout
    unplaced = layout if layout.placement is None else sw.Layout.parse(str(layout))
    assert sw.Layout.parse(str(layout)) == unplaced
    assert unplaced.placement is None


def test_layouts_of_a_search_are_read_back_from_their_texts(plan: sw.Plan) -> None:
    for layout in (plan.layout, *(alternative.layout for alternative in plan.alternatives)):
        assert eval(repr(layout), {"Layout": sw.Layout}) == layout


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tp", "layout: found 'tp'; KEY=VALUE"),
        ("tp=8 tp=4", "layout: tp is given twice"),
        ("tp=zero", "layout: tp: found 'zero'"),
        ("tp=0", "layout: tp is 0; a whole number of at least 1"),
        ("sequence_parallel=yes", "layout: sequence_parallel: found 'yes'; true or false"),
        ("placement=tp", "layout: placement: found 'tp'; AXES@LEVELS"),
        ("placement=tp@0", "placement: axes are ('tp',)"),
        ("recompute=ful", "recompute is 'ful' (did you mean 'full'?)"),
        ("num_micro_batches=4", "layout: found 'num_micro_batches=4'"),
    ],
)
def test_an_invalid_text_of_a_layout_is_refused(text: str, part: str) -> None:
    with pytest.raises(sw.InputError) as caught:
        sw.Layout.parse(text)
    assert part in str(caught.value)


def test_types_of_returned_values_can_be_resolved() -> None:
    """The types of annotations are exported."""
    names = {name: getattr(sw, name) for name in sw.__all__}
    for name in FUNCTIONS:
        returned = inspect.signature(getattr(sw, name)).return_annotation
        parts = returned.replace("tuple[", "").replace(", ...]", "").split(" | ")
        assert all(part in names for part in parts), returned
    assert get_type_hints(sw.Plan)["estimate"] is sw.Estimate


@pytest.mark.parametrize(
    ("text", "schema", "fix"),
    [
        ('{"a": 1}', "None", "`shardwise plan MODEL CLUSTER --out FILE` writes one"),
        ("[1]", "'list'", "`shardwise plan MODEL CLUSTER --out FILE` writes one"),
        (
            '{"schema": "shardwise.sweep/1"}',
            "'shardwise.sweep/1'",
            "`shardwise plan MODEL CLUSTER --out FILE` writes one",
        ),
        ('{"schema": "shardwise.plan/99"}', "'shardwise.plan/99'", "plan again with this version"),
    ],
)
def test_a_file_that_is_not_a_plan_is_refused_with_the_fix(text: str, schema: str, fix: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(sw.InputError) as caught:
        sw.load_plan(file)
    assert str(caught.value) == f"plan file {file}: found schema {schema}; 'shardwise.plan/3' is required: {fix}"
