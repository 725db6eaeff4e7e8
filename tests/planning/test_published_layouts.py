"""The nearest published runs beside a plan: which they are, their layouts priced for its job, and what reports say of them."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources

import pytest

import shardwise as sw
from shardwise.measure import nearest_published_runs
from shardwise.measure.calibrate.published_runs.nearest_runs import INDEX_NAME, MAX_RATIO, index_text, read_index
from shardwise.present.command_line import main
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search import (
    NearestRuns,
    Plan,
    PublishedLayout,
    PublishedRun,
    advise_batch,
    compare_published_runs,
    plan_layout,
    plan_payload,
)

JOB = sw.Job(global_batch_tokens=2**22, seq_len=4096)
EXPERTS = ("qwen3-30b-a3b", "h100:64", "--batch-tokens", "4Mi", "--seq-len", "4096", "--stack", "megatron")


def run_verb(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def problem_of(model: str, cluster: str, job: sw.Job = JOB) -> Problem:
    return Problem(sw.load_model(model), sw.load_cluster(cluster), job)


def plan_of(model: str, cluster: str, layout: str, job: sw.Job = JOB) -> Plan:
    return plan_layout(sw.load_model(model), sw.load_cluster(cluster), job, sw.Layout.parse(layout))


def test_the_index_is_that_of_the_table() -> None:
    """`python -m shardwise.measure.calibrate.published_runs.nearest_runs` writes it again."""
    file = resources.files("shardwise.measure.calibrate.published_runs").joinpath(INDEX_NAME)
    assert file.read_text(encoding="utf-8") == index_text()


def test_runs_of_the_model_on_the_chip_come_alone_and_those_of_as_many_devices_first() -> None:
    nearest = nearest_published_runs(problem_of("llama-3-8b", "h100:64"))
    assert (nearest.same_model, nearest.same_chip) == (True, True)
    assert {run.chip for run in nearest.runs} == {"h100"}
    distances = [max(run.num_devices / 64, 64 / run.num_devices) for run in nearest.runs]
    assert distances == sorted(distances)
    assert all(re.search("llama.?3", run.model_name, re.IGNORECASE) for run in nearest.runs)


def test_a_model_without_runs_has_those_of_its_kind_and_size() -> None:
    """Gemma 2 9B on TPU v5p: dense models of 4.6 to 18 billion parameters; never one with experts."""
    nearest = nearest_published_runs(problem_of("gemma-2-9b", "tpu-v5p:4x4x4"))
    assert not nearest.same_model
    indexed = {run.run.id: run for run in read_index()}
    for run in nearest.runs:
        assert not indexed[run.id].num_experts
        assert 1 / MAX_RATIO <= indexed[run.id].active_params / 9.24e9 <= MAX_RATIO
    other_chip = nearest_published_runs(problem_of("qwen3-30b-a3b", "h800:64"))
    assert (other_chip.same_model, other_chip.same_chip) == (True, False)
    assert other_chip.runs[0].chip == "h100"  # of its generation


def test_layouts_are_priced_for_the_plans_job_and_the_difference_is_that_of_the_terms() -> None:
    plan = plan_of("qwen3-30b-a3b", "h100:64", "fsdp=64 zero_stage=3 micro_batch_seqs=8 recompute=full")
    published = compare_published_runs(plan, nearest_published_runs(plan.problem))
    assert published is not None
    assert published.num_runs == 11
    assert published.unlike == ("EP 1 (theirs: 8, 16)", "ZeRO stage 3 (theirs: 1)")
    for layout in published.layouts:
        parsed = sw.Layout.parse(layout.layout_text)
        assert (parsed.num_devices, parsed.ep > 1) == (64, True)
        assert layout.time is not None
        assert layout.lead is not None
        assert sum(layout.time.values()) == pytest.approx(layout.lead * plan.estimate.step_time_s)
        assert layout.step_time_s <= estimate(plan.problem, parsed).step_time_s + 1e-9  # on its fastest placement
        largest = max(layout.time, key=lambda term: abs(layout.time[term]))  # type: ignore[index]
        assert largest in layout.difference
    payload = plan_payload(replace(plan, published=published))["published"]
    assert payload["layouts"][0]["run"]["id"] == published.layouts[0].run.id


def run_of(layout: str, **changes: object) -> PublishedRun:
    values: dict[str, object] = {
        "id": "a", "model_name": "model", "chip": "h100", "num_devices": 8, "software": "", "precision": "bf16", "seq_len": 4096,
        "num_seqs": 8, "layout_text": layout, "recomputes": ("none",), "tokens_per_s_per_device": 1.0, "source": "",
    }  # fmt: skip
    return PublishedRun(**{**values, **changes})  # type: ignore[arg-type]


def compare_one(plan: Plan, run: PublishedRun) -> PublishedLayout:
    published = compare_published_runs(plan, NearestRuns(runs=(run,), same_model=False, same_chip=True))
    assert published is not None
    return published.layouts[0]


def test_a_layout_that_a_rule_refuses_names_the_rule() -> None:
    plan = plan_of("llama-3-8b", "h100:8", "fsdp=8 zero_stage=1")
    refused = compare_one(plan, run_of("tp=3 sequence_parallel=true"))
    assert refused.step_time_s is None
    assert re.match(r"\w+: .*", refused.problem)
    too_many = compare_one(plan, run_of("tp=8 pp=2"))
    assert "8" in too_many.problem
    assert not too_many.difference


def test_a_layout_whose_price_needs_a_value_without_a_source_is_refused_too() -> None:
    plan = plan_of("llama-3-8b", "h100:8", "fsdp=8 zero_stage=1")
    cluster = replace(plan.cluster, chip=replace(plan.cluster.chip, pcie_bytes_per_s=None))
    refused = compare_one(replace(plan, cluster=cluster), run_of("fsdp=8 zero_stage=3 offload=optimizer"))
    assert "pcie_bytes_per_s" in refused.problem


def test_recomputation_that_is_not_stated_is_the_least_that_fits() -> None:
    plan = plan_of("llama-3-8b", "h100:8", "fsdp=8 zero_stage=1")
    long = run_of("fsdp=8 zero_stage=3 micro_batch_seqs=6", recomputes=("none", "selective", "full"))
    priced = compare_one(plan, long)
    assert priced.fits
    assert "recompute=full" in priced.layout_text
    stated = compare_one(plan, replace(long, recomputes=("none",)))
    assert not stated.fits
    assert "too much" in stated.difference


def test_micro_batches_have_as_many_tokens_and_replicas_fill_the_cluster() -> None:
    plan = plan_of("llama-3-8b", "h100:32", "fsdp=32 zero_stage=1")
    priced = compare_one(plan, run_of("fsdp=4 tp=2 zero_stage=1 sequence_parallel=true", seq_len=8192))
    parsed = sw.Layout.parse(priced.layout_text)
    assert (parsed.fsdp, parsed.tp, parsed.micro_batch_seqs) == (16, 2, 2)


def test_plans_say_what_they_do_unlike_all_published_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of the issue had nothing on it; it still does what no run did, and now says so, with their price."""
    text = run_verb(capsys, "plan", *EXPERTS)
    assert re.search(
        r"^  published +11 published runs of qwen3-30b-a3b on h100.*would take [\d.]+ s here", text, re.MULTILINE
    )
    details = run_verb(capsys, "explain", *EXPERTS, "-v")
    assert "published runs near this plan, with their layouts priced for its job" in details
    assert re.search(r"measured [\d,]+ .*tokens/s per device: Qwen3 30B A3B on 16 h100", details)


def test_a_batch_that_is_too_small_for_its_devices_comes_with_one_that_is_not() -> None:
    """256 tokens for each of 16,384 devices, where FSDP needs alpha = C / W = 2,472."""
    plan = plan_of(
        "llama-3-8b", "h100:16384", "dp=256 fsdp=8 tp=8 zero_stage=1 sequence_parallel=true",
        replace(JOB, global_batch_tokens=2048 * 4096),
    )  # fmt: skip
    advice = advise_batch(plan)
    assert advice is not None
    assert advice.tokens_per_device == 512
    assert advice.batch_tokens == 8 * 2048 * 4096
    assert advice.batch_tokens / 16384 >= advice.min_tokens_per_device > advice.batch_tokens / 2 / 16384
    assert advice.max_devices == pytest.approx(2048 * 4096 / advice.min_tokens_per_device, abs=1)
    assert plan_payload(plan)["batch_advice"]["reason"] == advice.reason
    used_well = plan_of("llama-3-8b", "h100:8", "fsdp=8 zero_stage=1")
    assert advise_batch(used_well) is None
    assert "batch_advice" not in plan_payload(used_well)
