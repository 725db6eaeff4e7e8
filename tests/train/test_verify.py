"""`verify` runs a reduced plan with every axis of the layout, reports agreement and notices differences."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from number_paths import require_payload_numbers

import shardwise as sw
from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import require_legal
from shardwise.model.load import load_model
from shardwise.present.command_line import main
from shardwise.present.verbs import training as verbs
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.recipe import TrainingRecipe
from shardwise.search.plan import plan_layout
from shardwise.sharding.collectives import CollectiveKind, IssuedCollective
from shardwise.sharding.spec import Axes
from shardwise.step.issued_collectives import count_collectives, ordered_activation_collectives
from shardwise.values.errors import InputError
from shardwise.verify.training import compare_runs, training_case
from shardwise.verify.training import plan_verification as verifying
from shardwise.verify.training.compare_runs import (
    ERROR_LIMITS,
    CaseResult,
    collective_differences,
    relative_errors,
    run_case,
)
from shardwise.verify.training.training_case import MOST_DEVICES, TrainingCase, _job, shrink_plan

LARGE = {
    "llama-3-8b": "dp=4 fsdp=32 tp=8",
    "llama-3-70b": "dp=2 fsdp=64 tp=16 cp=4 cp_variant=zigzag recompute=selective",
    "llama-3-405b": "fsdp=128 tp=8 cp=16 cp_variant=ring",
    "mixtral-8x7b": "fsdp=8 ep=8 tp=2 cp=2",
    "deepseek-v3": "fsdp=64 ep=128 tp=2 cp=2 etp=1",
    "gemma-3-27b": "dp=4 fsdp=8 cp=4 cp_variant=ulysses zero_stage=2",
    "gpt-oss-120b": "dp=2 fsdp=16 ep=4 tp=4 zero_stage=1 micro_batch_seqs=4",
    "falcon-7b": "dp=16 zero_stage=0",
}
RECIPE = TrainingRecipe(steps=2, learning_rate=1e-2, warmup_steps=2, clip_norm=0.5, seed=3, bucket_bytes=2_000)


@pytest.mark.parametrize("name", LARGE)
def test_meshes_have_all_that_the_layout_has(name: str) -> None:
    model, layout = load_model(name), Layout.parse(LARGE[name])
    degrees = training_case.SmallMesh(model, layout).degrees
    meshes = shrink_plan(model, layout)
    assert {atom for mesh in meshes for atom in mesh.degrees} == set(degrees)
    pairs = {pair for mesh in meshes for pair in combinations(sorted(mesh.degrees), 2)}
    assert pairs == set(combinations(sorted(degrees), 2))
    for atom, degree in degrees.items():
        assert any(mesh.degrees.get(atom, 1) > 2 for mesh in meshes) == (degree > 2), atom
    for small_mesh in meshes:
        assert small_mesh.layout.num_devices <= MOST_DEVICES
        require_legal(
            small_mesh.architecture, _job(small_mesh.layout), small_mesh.layout.num_devices, small_mesh.layout
        )
        assert small_mesh.architecture.structure == model.structure
        if small_mesh.layout.cp > 1:
            assert small_mesh.layout.cp_variant == layout.cp_variant
        assert small_mesh.layout.recompute == layout.recompute
    widest = max(meshes, key=lambda mesh: len(mesh.degrees)).layout
    assert widest.zero_stage == layout.zero_stage


def test_windows_and_leading_layers_stay() -> None:
    """A layer of each kind is among the few that are left."""
    (gemma,) = shrink_plan(load_model("gemma-3-27b"), Layout(dp=2))
    assert {gemma.architecture.attention_window(layer) for layer in range(gemma.architecture.num_layers)} == {3, None}
    (leading,) = shrink_plan(load_model("deepseek-v3"), Layout(dp=2))
    assert leading.architecture.num_layers - leading.architecture.num_dense_layers == 3
    assert (leading.architecture.num_dense_layers, leading.architecture.num_predict_layers) == (1, 1)


def test_a_model_in_small_keeps_its_kinds_of_layers() -> None:
    """Sizes that differ still do; what a kind lacks it lacks in small."""
    none = {"num_experts": 0, "experts_per_token": 0}
    kinds = {
        "window": {"sliding_window": 1024, "num_kv_heads": 8}, "dense": {**none, "d_ff": 6144},
        "attention": {**none, "feed_forward": "none"}, "mlp": {**none, "mixer": "none"},
    }  # fmt: skip
    model = replace(
        load_model("qwen3-30b-a3b"), layer_kinds=kinds, layer_pattern=("window*2", "dense", "block", "attention", "mlp")
    )
    for mesh in shrink_plan(model, Layout.parse("fsdp=8 tp=2 pp=4 ep=8 num_virtual_stages=2 zero_stage=1")):
        small = mesh.architecture
        assert set(small.layer_counts) == {*kinds, "block"}
        layers = small.layer_architectures
        assert layers["window"].num_kv_heads == 2 * small.num_kv_heads
        assert layers["window"].sliding_window == 3
        assert layers["dense"].d_ff == 2 * small.d_ff
        assert [bool(layers[kind].num_experts) for kind in ("block", "window", "dense", "attention", "mlp")] == [
            True, True, False, False, False,
        ]  # fmt: skip
        require_legal(small, _job(mesh.layout), mesh.layout.num_devices, mesh.layout)


def test_heads_split_as_planned() -> None:
    """More ranks than key-value heads stay so; an uneven vocabulary stays uneven."""
    (small,) = shrink_plan(load_model("qwen2.5-0.5b"), Layout.parse("tp=2"))
    assert small.architecture.num_kv_heads > 1
    replicated = shrink_plan(load_model("llama-3-8b"), Layout.parse("tp=16 fsdp=4"))
    assert any(mesh.degrees.get("tp_rep", 1) > 1 and mesh.degrees.get("tp_kv", 1) > 1 for mesh in replicated)
    (uneven,) = shrink_plan(load_model("gpt-2"), Layout.parse("tp=2"))
    assert uneven.architecture.vocab_size % 2 == 1


def case(layout: str = "dp=2", name: str = "llama-3-8b") -> TrainingCase:
    (small,) = shrink_plan(load_model(name), Layout.parse(layout))
    return TrainingCase(architecture=small.architecture, layout=small.layout, recipe=RECIPE, num_seqs=4, seq_len=8)


def test_the_differing_gradient_or_weight_is_named() -> None:
    reference = run_case(case("dp=1"))
    same = run_case(case("dp=1"))
    assert relative_errors(same, reference).ok
    same.gradients[1]["layers.1.wq"] = same.gradients[1]["layers.1.wq"] * (1 + 1e-9)
    comparison = relative_errors(same, reference)
    assert (comparison.ok, comparison.gradient) == (False, "layers.1.wq")
    assert comparison.largest["gradients"] == pytest.approx(1e-9, rel=1e-3)
    assert comparison.largest["loss"] == 0.0
    lacking = replace_weights(same, "head.head")
    assert relative_errors(lacking, reference).weight == "head.head"
    same.losses[0] = float("nan")
    assert relative_errors(same, reference).largest["loss"] == np.inf


def test_weights_without_a_gradient_are_named() -> None:
    """A bias of keys without a rotation: its updates are rounding."""
    result = run_case(case("dp=1", "opt-175b"))
    judged = relative_errors(result, run_case(case("dp=1", "opt-175b")))
    assert judged.without_gradient == tuple(f"layers.{layer}.k_flat_bias" for layer in range(3))
    result.weights["layers.0.k_flat_bias"] += 1
    assert relative_errors(result, run_case(case("dp=1", "opt-175b"))).ok


def replace_weights(result: CaseResult, name: str) -> CaseResult:
    """Without the weight of that name."""
    weights = {key: values for key, values in result.weights.items() if key != name}
    return replace(result, weights=weights)


def test_differing_collectives_are_reported() -> None:
    training_case = case("fsdp=2 zero_stage=1")
    collectives = as_issued(training_case)
    assert collective_differences(training_case, [collectives, collectives]) == ()
    norm = next(issued for issued in collectives if issued.kind is CollectiveKind.ALL_REDUCE)
    lacking = list(collectives)
    lacking.remove(norm)
    (text,) = collective_differences(training_case, [collectives, lacking])
    assert text.startswith("rank 1: ")
    assert "all_reduce over fsdp" in text


def as_issued(training_case: TrainingCase) -> list[IssuedCollective]:
    """The list as it is captured: activations in order, and all else behind them."""
    moved = list(ordered_activation_collectives(training_case.instance, training_case.num_micro_batches))
    remaining = count_collectives(training_case.instance, training_case.num_micro_batches) - Counter(moved)
    return [issued._replace(what="") for issued in (*moved, *remaining.elements())]


def test_another_order_of_collectives_is_reported() -> None:
    training_case = case("tp=2 sequence_parallel=true")
    collectives = as_issued(training_case)
    place = next(number for number in range(len(collectives)) if collectives[number] != collectives[number + 1])
    turned = [*collectives[:place], collectives[place + 1], collectives[place], *collectives[place + 2 :]]
    assert collective_differences(training_case, [collectives, collectives]) == ()
    (text,) = collective_differences(training_case, [turned, collectives])
    assert text.startswith("rank 0: ")
    assert "does not come in the list's order" in text


def test_rows_are_counted_over_all_ranks() -> None:
    """One rank may send more rows than another, and all together send what is planned."""
    training_case = case("fsdp=2 ep=2 zero_stage=1", "mixtral-8x7b")
    rows = next(
        issued for issued in ordered_activation_collectives(training_case.instance, 1) if issued.what == "rows"
    )._replace(what="")
    fewer, more = as_issued(training_case), as_issued(training_case)
    for sequence, change in ((fewer, -16), (more, 16)):
        sequence[sequence.index(rows)] = rows._replace(num_bytes=rows.num_bytes + change)
    assert collective_differences(training_case, [fewer, more]) == ()
    (text,) = collective_differences(training_case, [fewer, fewer])
    assert text.startswith("all ranks: all_to_all over ep")


def test_collectives_without_a_router_are_compared_rank_by_rank() -> None:
    """Heads that go to another rank and back (Ulysses) are as many as planned on each, and only the rank that differs is told."""
    training_case = case("cp=2 cp_variant=ulysses")
    collectives = as_issued(training_case)
    heads = next(issued for issued in collectives if issued.kind is CollectiveKind.ALL_TO_ALL)
    lacking = list(collectives)
    lacking.remove(heads)
    assert collective_differences(training_case, [collectives, collectives]) == ()
    texts = collective_differences(training_case, [collectives, lacking])
    assert texts
    assert all(text.startswith("rank 1: ") and "all_to_all over cp" in text for text in texts)


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "plan.json"
    words = [
        "plan",
        "tiny-moe-19m",
        "local:2",
        "--batch-tokens",
        "4Ki",
        "--seq-len",
        "512",
        "--precision",
        "fp32",
        "--runnable",
        "--out",
        str(path),
    ]
    assert main([*words, "--pin", "ep=2"]) == 0
    capsys.readouterr()
    return path


def test_a_plan_is_verified(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(plan), "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["captured_equals_list"]
    assert [mesh["degrees"] for mesh in report["meshes"]] == [{"ep": 2}]
    assert {name: report["max_relative_error"][name] <= limit for name, limit in ERROR_LIMITS.items()} == dict.fromkeys(
        ERROR_LIMITS, True
    )
    assert main(["verify", str(plan), "--steps", "2", "--set", "recipe.balance=bias"]) == 0
    assert "trains as one process does" in capsys.readouterr().out


def test_a_fault_ends_with_3(plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reference differs, it says which gradient does."""
    run = compare_runs.run_reference

    def scaled(case: TrainingCase) -> CaseResult:
        result = run(case)
        result.gradients[0]["layers.0.experts_down"] *= 2
        return result

    monkeypatch.setattr(verifying, "run_reference", scaled)
    assert main(["verify", str(plan), "--steps", "1"]) == 3
    out = capsys.readouterr().out
    assert "layers.0.experts_down" in out
    assert "does NOT train" in out


def test_ranks_that_wait_for_each_other_are_named(
    plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank leaves out the sum of the gradients' squares."""
    reduce = MeshCollectives.sum_and_wait

    def left_out(self: MeshCollectives, values: torch.Tensor, axes: Axes) -> torch.Tensor:
        return values if self.world.rank == 1 else reduce(self, values, axes)

    monkeypatch.setattr(MeshCollectives, "sum_and_wait", left_out)
    assert main(["verify", str(plan), "--steps", "1"]) == 2
    (problem, *_) = capsys.readouterr().err.splitlines()
    assert problem.startswith("error: verify: fsdp=2 ep=2")
    assert re.search("rank 0( issued)? all_reduce", problem)


def test_python_result_reports_the_numbers_of_the_payload(plan: Path) -> None:
    verification = verbs.verify(plan, steps=1)
    assert verification.ok
    assert require_payload_numbers(verification) == 7 * len(verification.meshes)


def test_invalid_numbers_of_steps_are_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(plan), "--steps", "0"]) == 2
    assert "--steps: found 0; 1 to 10 are required" in capsys.readouterr().err


def test_unrunnable_plans_are_not_verified() -> None:
    job = sw.Job(global_batch_tokens=2**19, seq_len=8192)
    layout = Layout.parse("fsdp=8 offload=optimizer")
    planned = plan_layout(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job, layout)
    with pytest.raises(InputError, match="offload=optimizer is planned, not yet runnable"):
        verifying.verify_plan(planned, RECIPE)
