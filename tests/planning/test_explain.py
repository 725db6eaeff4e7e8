"""The explanation of a plan: its story, other layouts, single terms, constants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.layout import parse_layout_text
from shardwise.layout.placement import ATOMIC_AXES, AXIS_ORDERS
from shardwise.layout.rules.table import violations
from shardwise.present.command_line import main
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.rendering.report import short_form
from shardwise.present.reports.explanation import explain_report
from shardwise.price.estimate import BOUND
from shardwise.price.term_inputs import SYMBOL_MEANINGS
from shardwise.search.explain.explanation import Explanation, explain_plan, explain_term
from shardwise.search.nearest_fitting_layout import find_nearest_fitting
from shardwise.search.payloads import ExplanationRecord
from shardwise.search.plan import Plan, plan_layout
from shardwise.search.verdicts import MODEL_ERROR, RESOLUTION, changed_fields, compare_steps, explain_slowdown
from shardwise.values.errors import NothingFitsError
from shardwise.values.estimate_term_names import MEMORY_TERMS, TIME_TERMS
from shardwise.values.payload import to_json
from shardwise.values.units import format_bytes

JOB = sw.Job(global_batch_tokens=2**19, seq_len=8192, overlap="per_axis")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return sw.plan(sw.load_model("llama-3-8b"), sw.load_cluster("h100:16"), JOB)


def job_of(tokens: int, seq_len: int) -> sw.Job:
    """A job that is planned by the bound of a convention."""
    return sw.Job(global_batch_tokens=tokens, seq_len=seq_len, overlap="per_axis")


def explained(plan: Plan, against: str | None = None, term: str | None = None) -> Explanation:
    other_layout = parse_layout_text(against, plan.model, plan.job) if against else None
    return explain_plan(
        plan, lambda layout: find_nearest_fitting(plan.problem, layout), other_layout=other_layout, term_name=term
    )  # fmt: skip


def with_layout(plan: Plan, text: str) -> Plan:
    return plan_layout(plan.model, plan.cluster, plan.job, parse_layout_text(text, plan.model, plan.job))


def test_trees_add_up_to_the_estimate(plan: Plan) -> None:
    story = explained(plan)
    assert sum(share.value for share in story.fit.memory) == pytest.approx(plan.estimate.memory_bytes, rel=1e-12)
    assert sum(share.value for share in story.throughput.time) == pytest.approx(plan.estimate.step_time_s, rel=1e-12)
    assert sum(share.share for share in story.fit.memory) == pytest.approx(1)
    assert story.batch.num_replicas * story.batch.seqs_per_replica >= story.batch.num_seqs
    assert story.notes == plan.estimate.notes == (BOUND,)
    assert story.stack is None
    assert plan.bound_s is None


def test_runners_up_carry_their_reason_and_whether_the_model_can_tell(plan: Plan) -> None:
    story = explained(plan)
    assert len(story.runners_up) == len(plan.alternatives) > 2
    for runner_up in story.runners_up:
        lead = runner_up.step_time_s / plan.estimate.step_time_s - 1
        assert runner_up.reason
        assert runner_up.verdict.startswith("undecided" if lead < MODEL_ERROR else "slower by")


def test_fit_names_the_gpu_rich_and_the_gpu_poor_regime(plan: Plan) -> None:
    """Poor: these degrees need recomputed activations. Source of the two measures: the playbook, step 1."""
    assert explained(plan).fit.regime == "GPU-rich"
    long = replace(plan, job=job_of(2**20, 16384))
    poor = explained(with_layout(long, "fsdp=16 recompute=full"))
    assert poor.fit.fits
    assert poor.fit.regime == "GPU-poor"
    assert "full activation recomputation is used" in poor.fit.because
    assert "gradient accumulation is used" in poor.fit.because
    assert "do not fit without" in poor.fit.because
    spared = explained(with_layout(plan, "fsdp=16 recompute=full"))
    assert spared.fit.regime == "GPU-rich"
    assert "fit without recomputing activations, though the layout does" in spared.fit.because


def test_every_runner_up_within_the_resolution_is_marked(plan: Plan) -> None:
    explanation = explained(plan)
    for runner_up in explanation.runners_up:
        lead = runner_up.step_time_s / plan.estimate.step_time_s - 1
        assert ("within the resolution of predictions" in runner_up.reason) == (
            abs(lead) >= 5e-4 and lead <= RESOLUTION
        ), runner_up
    tied = replace(explanation.runners_up[0], step_time_s=1.01 * plan.estimate.step_time_s, reason="a tie")
    slower = replace(tied, step_time_s=1.2 * plan.estimate.step_time_s, reason="no tie")
    text = render_text(short_form(explain_report(replace(explanation, runners_up=(tied, tied, tied, slower)))))
    assert (text.count(" a tie"), text.count("no tie")) == (3, 0)


def test_memory_binds_where_a_faster_neighbour_does_not_fit(plan: Plan) -> None:
    tight = with_layout(
        replace(plan, job=job_of(2**20, 16384)),
        "fsdp=16 recompute=full",
    )
    assert explained(tight).fit.binding.startswith("memory: recompute=")
    roomy = with_layout(plan, "fsdp=16 micro_batch_seqs=1")
    assert explained(roomy).fit.binding == roomy.estimate.bound == "compute"


def test_a_batch_too_small_for_the_devices_is_noted(plan: Plan) -> None:
    small = with_layout(replace(plan, job=job_of(8 * 8192, 8192)), "fsdp=16")
    story = explained(small)
    assert "8 of 16 replicas have no sequence" in story.batch.because
    assert story.batch.waste["sequences"] == pytest.approx(0.5)


def test_against_gives_every_term_of_both(plan: Plan) -> None:
    comparison = explained(plan, "tp=8 fsdp=2").against
    assert comparison is not None
    priced = min(
        sw.estimate(plan.model, plan.cluster, plan.job, replace(layout, placement=placement)).step_time_s
        for layout in [parse_layout_text("tp=8 fsdp=2", plan.model, plan.job)]
        for placement in [None, plan.layout.placement]
    )
    assert comparison.estimate.step_time_s <= priced * (1 + 1e-12)
    change = sum(term.change for term in comparison.time.values())
    assert change == pytest.approx(comparison.estimate.step_time_s - plan.estimate.step_time_s, rel=1e-9)
    change = sum(term.change for term in comparison.memory.values())
    assert change == pytest.approx(comparison.estimate.memory_bytes - plan.estimate.memory_bytes, rel=1e-9)
    assert comparison.verdict == f"slower by {comparison.lead:.1%}"
    assert comparison.changed["tp"] == (plan.layout.tp, 8)


def test_verdicts_depend_on_the_lead(plan: Plan) -> None:
    best = plan.estimate
    assert compare_steps(replace(best, step_time_s=best.step_time_s * 1.013), best).startswith(
        "undecided: the lead of 1.3%"
    )
    assert compare_steps(replace(best, step_time_s=best.step_time_s * 0.987), best).startswith(
        "undecided: the lead of 1.3%"
    )
    assert compare_steps(replace(best, step_time_s=best.step_time_s * 1.2), best) == "slower by 20.0%"
    assert compare_steps(replace(best, step_time_s=best.step_time_s * 0.8), best) == "faster by 20.0%"
    assert compare_steps(replace(best, fits=False, memory_bytes=90e9), best).startswith(
        "does not fit: 5.07 GB too much"
    )


def test_every_option_ends_at_its_step(plan: Plan) -> None:
    """Each is priced again here: what ends at 1 needs more memory, at 2 leaves replicas idle, at 3 has a time."""
    cluster = replace(plan.cluster, chip=replace(plan.cluster.chip, usable_bytes=80e9))
    small = replace(plan, cluster=cluster, job=job_of(8 * 16384, 16384))
    options = explained(with_layout(small, "tp=2 fsdp=8 recompute=full")).options
    assert {option.step for option in options} == {1, 2, 3}
    for option in options:
        layout = parse_layout_text(option.layout, small.model, small.job)
        broken = violations(small.model, small.job, 16, layout)
        priced = None if broken else sw.estimate(small.model, small.cluster, small.job, layout)
        if option.step == 1:
            assert priced is not None
            assert not priced.fits
            assert option.memory_bytes == priced.memory_bytes
            assert f"needs {format_bytes(priced.memory_bytes)}" in option.verdict
        elif option.step == 2:
            assert layout.num_replicas > small.job.num_seqs or "micro_batch" in broken[0]
        else:
            assert priced is not None
            assert priced.fits
            assert option.step_time_s is not None
            assert option.step_time_s <= priced.step_time_s * (1 + 1e-12)
            assert option.verdict.startswith(("undecided", "slower", "faster"))


def test_where_nothing_fits_the_playbook_is_tried_with_the_least_that_can_be_kept(plan: Plan) -> None:
    large = with_layout(replace(plan, model=sw.load_model("llama-3-405b")), "tp=8 fsdp=2 recompute=full")
    options = [option for option in explained(large).options if option.what.startswith("playbook: tp")]
    assert options
    assert all(option.step == 1 and "recompute=full" in option.layout for option in options)


def test_a_plan_with_idle_replicas_is_compared_with_layouts_that_have_as_many(plan: Plan) -> None:
    idle = with_layout(
        replace(plan, job=job_of(12 * 8192, 8192)),
        "fsdp=16 recompute=selective",
    )
    options = {option.what: option for option in explained(idle).options}
    assert options["recompute full in place of selective"].step == 3
    assert options["playbook: tp = 8 with ZeRO-3"].step == 3
    wider = with_layout(replace(idle, job=job_of(6 * 8192, 8192)), "tp=2 fsdp=8")
    options = {option.what: option for option in explained(wider).options}
    assert options["replicas in place of tp = 2"].verdict == "10 of 16 replicas have no sequence"


def test_a_wrong_term_is_found_before_anything_else_is_priced(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shardwise.search.explain.explanation.judge_options", lambda problem: pytest.fail("priced the options")
    )
    with pytest.raises(sw.InputError, match="colour"):
        explained(plan, term="colour")


def test_options_of_an_axis_are_dropped_with_it(plan: Plan) -> None:
    ring = with_layout(plan, "tp=2 cp=2 fsdp=4 cp_variant=zigzag async_tp=true recompute=full")
    options = {option.what: option for option in explained(ring).options}
    for name in ("replicas in place of cp = 2", "replicas in place of tp = 2", "no sequence parallelism"):
        assert options[name].step == 3, options[name].verdict


@pytest.mark.parametrize(("experts", "remaining_ep"), [("ep=4", 1), ("ep=8 etp=1", 2), ("ep=4 etp=2", 1)])
def test_experts_borrow_nothing_where_nothing_is_sharded(plan: Plan, experts: str, remaining_ep: int) -> None:
    moe = replace(plan, model=replace(sw.load_model("mixtral-8x7b"), num_layers=2))
    options = {option.what: option for option in explained(with_layout(moe, f"tp=2 fsdp=8 {experts}")).options}
    ep = experts.split()[0].removeprefix("ep=")
    without = options[f"ZeRO stage 0 in place of 3, with ep = {remaining_ep} in place of {ep}"]
    assert without.step == 3, without.verdict
    assert options["replicas in place of tp = 2"].step == 3


def test_the_options_undo_each_choice_and_try_the_recipes(plan: Plan) -> None:
    options = {
        option.what: option
        for option in explained(with_layout(plan, "tp=2 pp=2 fsdp=4 zero_stage=2 recompute=selective")).options
    }
    assert {
        "ZeRO stage 1 in place of 2", "ZeRO stage 0 in place of 2", "recompute none in place of selective",
        "recompute full in place of selective", "micro-batches twice as large", "no sequence parallelism",
        "replicas in place of tp = 2", "replicas in place of pp = 2", "playbook: ZeRO-3 alone", "playbook: tp = 8 with ZeRO-3",
        "playbook: tp = 8 with a pipeline",
    } <= options.keys()  # fmt: skip
    assert options["replicas in place of tp = 2"].layout.startswith("fsdp=8 pp=2 zero_stage=2 ")
    assert options["ZeRO stage 0 in place of 2"].layout.startswith("dp=4 tp=2 pp=2 sequence_parallel")
    assert len({option.layout for option in options.values()}) == len(options)


TWO = (
    "interleaved", "looped_bfs", "interleaved_breadth_first", "interleaved_zb", "zb_v", "dualpipe_v",
)  # schedules of several virtual stages  # fmt: skip


def test_the_other_schedules_of_the_same_degrees(plan: Plan) -> None:
    """Each is what the layout's estimate gives; a plan without a pipeline has none."""
    assert explained(with_layout(plan, "fsdp=16")).schedules == ()
    base = with_layout(plan, "tp=2 pp=2 fsdp=4 zero_stage=2 recompute=selective")
    schedules = {outcome.schedule: outcome for outcome in explained(base).schedules}
    assert list(schedules) == ["afab", "1f1b", "interleaved", "zb_h1", "zb_h2", "dualpipe", *TWO[1:]]
    assert schedules["1f1b"].verdict == "the plan"
    for name, outcome in schedules.items():
        virtual = f"num_virtual_stages={outcome.num_virtual_stages}"
        priced = with_layout(
            base, f"tp=2 pp=2 fsdp=4 zero_stage=2 recompute=selective schedule={name} {virtual}"
        ).estimate
        assert outcome.num_virtual_stages == (2 if name in TWO else 1)
        assert outcome.memory_bytes == priced.memory_bytes
        assert outcome.step_time_s is not None
        assert outcome.step_time_s <= priced.step_time_s
        assert outcome.fits == priced.fits
    bubbles = [schedules[name].bubble_s or 0.0 for name in ("1f1b", "zb_h1", "zb_h2")]
    assert bubbles == sorted(bubbles, reverse=True)
    few = with_layout(plan, "pp=2 fsdp=8 micro_batch_seqs=4")
    refused = {outcome.schedule: outcome for outcome in explained(few).schedules}["dualpipe"]
    assert (refused.step_time_s, refused.memory_bytes) == (None, None)
    assert "dualpipe requires at least 4 micro-batches" in refused.verdict


def test_the_bubbles_formula_is_the_schedules(plan: Plan) -> None:
    bubble = explained(with_layout(plan, "pp=2 fsdp=8 schedule=zb_h1"), None, "time.bubble").terms[0]
    assert bubble.formula == "(p - 1) · (F + B - 2W)"
    shown = {share.term: share.formula for share in explained(with_layout(plan, "pp=2 fsdp=8")).throughput.time}
    assert shown["bubble"] == "(p - 1) · (F + B) / v"


def test_a_schedule_that_does_not_fit_is_the_smallest_change(plan: Plan) -> None:
    """AFAB holds 16 micro-batches, and another schedule of the same stages does not."""
    afab = with_layout(plan, "pp=2 tp=4 fsdp=2 schedule=afab")
    assert not afab.estimate.fits
    assert explained(afab).fit.smallest_change == "schedule afab → 1f1b"


def test_the_fit_counts_what_the_model_needs_at_least(plan: Plan) -> None:
    """8.03B parameters of 16 bytes are 128 GB: two devices of 80 GB."""
    fit = explained(plan).fit
    assert fit.state_bytes == 16 * sw.num_params(plan.model)
    assert (fit.devices_for_state, fit.num_devices) == (2, 16)
    reason = explained(with_layout(plan, "tp=2 pp=2 fsdp=4 zero_stage=2 recompute=full")).fit.held
    assert reason == (
        "tp = 2 splits the matrices; pp = 2 the blocks; ZeRO-2 the optimizer and gradients over 4; "
        "recompute full spares activations"
    )


def test_the_run_is_told_with_the_assumptions_of_the_file(plan: Plan) -> None:
    assert explained(plan).run is None
    job = replace(JOB, tokens=1e12)
    long = plan_layout(plan.model, plan.cluster, job, plan.layout, reliability=sw.Reliability(pue=1.1))
    assert explained(long).run == long.run
    without = explained(replace(long, run=None)).run
    assert without is not None
    assert without.reliability == sw.Reliability()


def test_runners_up_are_all_different() -> None:
    narrow = sw.plan(
        sw.load_model("llama-3-8b"),
        sw.load_cluster("h100:2"),
        job_of(2**16, 8192),
    )
    layouts = [str(alternative.layout) for alternative in narrow.alternatives]
    assert len(layouts) == len(set(layouts))


def test_a_layout_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`estimate` says it too; a plan file of such a layout is explained."""
    words = [
        "llama-3-8b",
        "h100:16",
        "--batch-tokens",
        "512Ki",
        "--seq-len",
        "8192",
        "--layout",
        "fsdp=16 micro_batch_seqs=4",
    ]
    assert main(["estimate", *words]) == 0
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown
    assert "too much)" in shown
    (line,) = [line for line in shown.splitlines() if "smallest change that fits: " in line]
    assert main(["estimate", *words, "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["smallest_change"] == line.partition(": ")[2]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(payload), encoding="utf-8")
    code, out, _ = run(capsys, str(file))
    assert code == 0
    assert "1. does it fit? NO" in out
    assert line.strip() in out
    assert "binding constraint: memory:" in out


def test_the_smallest_change_keeps_the_degrees_where_it_can(plan: Plan) -> None:
    comparison = explained(plan, "fsdp=16 micro_batch_seqs=4").against
    assert comparison is not None
    assert not comparison.estimate.fits
    assert comparison.smallest_change is not None
    assert comparison.smallest_change.startswith(("micro_batch_seqs 4 → ", "recompute none → "))
    assert "," not in comparison.smallest_change


def test_no_smaller_change_fits(plan: Plan) -> None:
    """No layout with the same degrees and fewer changes fits: a check of every one of them, one by one."""
    layout = parse_layout_text("fsdp=16 zero_stage=1 micro_batch_seqs=4", plan.model, plan.job)
    nearest = find_nearest_fitting(plan.problem, layout)
    assert nearest is not None
    assert sw.estimate(plan.model, plan.cluster, plan.job, nearest).fits
    candidates = [
        replace(layout, zero_stage=zero, recompute=recompute, micro_batch_seqs=seqs)
        for zero in (1, 2, 3) for recompute in ("none", "selective", "full") for seqs in (1, 2, 3, 4)
    ]  # fmt: skip
    fitting = [candidate for candidate in candidates if sw.estimate(plan.model, plan.cluster, plan.job, candidate).fits]
    assert fitting
    assert len(changed_fields(layout, nearest)) == min(len(changed_fields(layout, candidate)) for candidate in fitting)


def test_degrees_change_where_they_must(plan: Plan) -> None:
    """Sixteen copies of the state fit nowhere, whatever else changes."""
    comparison = explained(plan, "dp=16").against
    assert comparison is not None
    assert comparison.smallest_change is not None
    assert "dp 16 → " in comparison.smallest_change


def test_an_explanation_says_that_nothing_fits(plan: Plan) -> None:
    big = replace(plan, model=sw.load_model("llama-3-405b"), alternatives=())
    story = explained(with_layout(big, "fsdp=16 recompute=full"))
    assert not story.fit.fits
    assert story.fit.binding.startswith("memory: ")
    assert story.fit.smallest_change is not None
    assert story.fit.smallest_change.startswith(
        "nothing fits of what was searched, every degree without offload, and offload at the layout's degrees: "
    )
    chip = replace(big.cluster.chip, pcie_bytes_per_s=None)
    unpriced = replace(big, cluster=replace(big.cluster, chip=chip))
    change = explained(with_layout(unpriced, "fsdp=16 recompute=full")).fit.smallest_change or ""
    assert "(not priced: no sourced pcie_bytes_per_s of h100)" in change


def test_offload_without_a_rate_is_not_known_to_help() -> None:
    cluster, job = sw.load_cluster("h100:2"), sw.Job(global_batch_tokens=2**16, seq_len=4096)
    bare = replace(cluster, chip=replace(cluster.chip, pcie_bytes_per_s=None))
    with pytest.raises(NothingFitsError) as known:
        sw.plan("llama-3-70b", cluster, job)
    assert "not known" not in str(known.value)
    with pytest.raises(NothingFitsError) as unknown:
        sw.plan("llama-3-70b", bare, job)
    assert "whether offload to the host helps is not known (no sourced pcie_bytes_per_s of h100)" in str(unknown.value)


@pytest.mark.parametrize("name", [*(f"time.{t}" for t in TIME_TERMS), *(f"memory.{t}" for t in MEMORY_TERMS)])
def test_every_term_can_be_asked_for(plan: Plan, name: str) -> None:
    layout = "fsdp=2 tp=2 pp=2 cp=2 recompute=full num_virtual_stages=2 micro_batch_seqs=1"
    own_plan = with_layout(plan, layout)
    term, estimated = explain_term(own_plan, own_plan.layout, own_plan.estimate, name), own_plan.estimate
    tree, _, term_name = name.partition(".")
    assert term.value == (estimated.time if tree == "time" else estimated.memory)[term_name]
    assert term.words
    assert term.formula
    assert {"m", "p", "v"} <= {quantity.symbol for quantity in term.inputs}


def test_a_terms_expressions_evaluate_to_its_value(plan: Plan) -> None:
    """Optimizer state without a pipeline: what is read off, times 8 bytes, is the term."""
    term = explained(with_layout(plan, "fsdp=16"), term="memory.optimizer").terms[0]
    per_unit = {quantity.what: quantity.value for quantity in term.derived}
    elements = per_unit["elements of the block"] * plan.model.num_layers
    elements += per_unit["elements of the embedding"] + per_unit["elements of the head"]
    assert term.value == pytest.approx(8 * elements, rel=1e-12)
    saved = explained(with_layout(plan, "fsdp=16"), term="memory.activations").terms[0]
    widths = {"residual": 2, "activation": 2, "statistic": 4}
    parts = {quantity.what: quantity.value * widths[quantity.what.rpartition(" ")[2]] for quantity in saved.derived}
    blocks = sum(value for label, value in parts.items() if label.startswith("block"))
    head = sum(value for label, value in parts.items() if label.startswith("head"))
    assert saved.value == pytest.approx(blocks * plan.model.num_layers + head, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "changes", "text"),
    [
        ("llama-3-8b", {"lora_rank": 16, "lora_targets": ("qkv", "mlp")}, "fsdp=4 tp=2 cp=2"),
        ("gpt-oss-20b", {}, "fsdp=8 ep=4 tp=2"),
        ("deepseek-v2-lite", {}, "fsdp=4 ep=4 tp=2 pp=2"),
        ("tiny-latent-moe-18m", {}, "fsdp=16 ep=4"),
        ("gpt-2", {}, "dp=16"),
    ],
)
def test_every_symbol_of_a_term_says_what_it_is(model: str, changes: dict[str, Any], text: str) -> None:
    """Dims of the model, axes, counts: a rank of adapters is no axis."""
    architecture = replace(sw.load_model(model), **changes)
    job = sw.Job(global_batch_tokens=2**17, seq_len=min(architecture.max_positions or 4096, 4096))
    layout = parse_layout_text(text, architecture, job)
    priced = plan_layout(architecture, sw.load_cluster("h100:16"), job, layout)
    meanings = {
        quantity.symbol: quantity.meaning
        for name in (*(f"time.{t}" for t in TIME_TERMS), *(f"memory.{t}" for t in MEMORY_TERMS))
        for quantity in explain_term(priced, priced.layout, priced.estimate, name).inputs
    }
    axes = {symbol for symbol, meaning in meanings.items() if meaning == "degree of the axis"}
    assert axes <= {"dp", "fsdp", "cp", "tp", "pp"}
    assert ("r" in meanings) == bool(architecture.lora_rank)
    assert meanings.get("r", "rank of an adapter") == "rank of an adapter"


def test_every_dim_has_a_meaning() -> None:
    atoms = {atom for axis in AXIS_ORDERS[0] for atom in ATOMIC_AXES.get(axis, (axis,))}
    assert set(SYMBOL_MEANINGS) >= {*sw.load_model("llama-3-8b").dims, "B", "T", "span"} | atoms


def test_a_collective_is_charged_to_its_term(plan: Plan) -> None:
    tensor = explained(with_layout(plan, "fsdp=2 tp=8"), term="time.tp").terms[0]
    assert any("all_gather over tp_kv" in quantity.what for quantity in tensor.derived)
    weights = explained(with_layout(plan, "fsdp=2 tp=8"), term="time.fsdp").terms[0]
    assert all("fsdp" in quantity.what for quantity in weights.derived)
    assert weights.derived
    assert weights.hidden_s > 0


def test_constants_are_sorted_and_priced(plan: Plan) -> None:
    constants = explained(plan).constants
    assert {"chip.matmul_fraction", "chip.memory_bytes_per_s", "nvlink.bytes_per_s"} <= {
        constant.name for constant in constants
    }
    assert [abs(constant.change) for constant in constants] == sorted(
        (abs(constant.change) for constant in constants), reverse=True
    )
    slower = replace(
        plan.cluster, chip=replace(plan.cluster.chip, matmul_fraction=plan.cluster.chip.matmul_fraction * 0.9)
    )
    matmul = next(constant for constant in constants if constant.name == "chip.matmul_fraction")
    assert matmul.step_time_s == sw.estimate(plan.model, slower, plan.job, plan.layout).step_time_s
    torus = plan_layout(
        plan.model, sw.load_cluster("tpu-v5e:4x4"), JOB, sw.Layout(fsdp=16, zero_stage=3, recompute="full")
    )  # fmt: skip
    assert {"torus.bytes_per_s", "torus.hop_latency_s"} <= {constant.name for constant in explained(torus).constants}


def test_a_tenth_less_memory_comes_first_where_the_plan_depends_on_it(plan: Plan) -> None:
    cluster = sw.load_cluster("h100:2")
    cluster = replace(cluster, chip=replace(cluster.chip, usable_bytes=80e9))
    full = with_layout(replace(plan, cluster=cluster, job=job_of(2**16, 8192)), "cp=2 zero_stage=3 recompute=full")
    first = explained(full).constants[0]
    assert (first.name, first.fits, first.change) == ("chip.memory_bytes", False, 0.0)
    assert 0.9 * 80e9 < full.estimate.memory_bytes < 80e9
    assert full.estimate.verdict == "tight"
    assert all(constant.fits for constant in explained(plan).constants)


def test_a_file_of_other_numbers_is_noted(plan: Plan) -> None:
    moved = replace(plan, estimate=replace(plan.estimate, step_time_s=1.0))
    assert "step_time_s = 1" in explained(moved).notes[0]
    assert explained(moved).throughput == explained(plan).throughput


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    sw.dump_plan(replace(plan, job=replace(plan.job, tokens=1e12)), path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["explain", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_report_has_its_sections_in_order(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(file), "--against", "tp=8 fsdp=2", "-v")
    assert (code, err) == (0, "")
    parts = [
        "1. does it fit?", "the memory of ", "how: ", "recomputation: these", "binding constraint", "optimizer  ",
        "rejected at step 1", "2. does it reach the batch?", "sequences each:", "replicas have work",
        "3. what bounds throughput?", "hidden behind compute", "layouts that fit and reach the batch", "playbook: tp = 8",
        "runners-up", "what the whole run takes", "failures_per_device_hour", "which constant", "against fsdp=2 tp=8",
        "other - plan",
    ]  # fmt: skip
    places = [out.index(part) for part in parts]
    assert places == sorted(places)


def test_payload_equals_the_record_of_the_explanation(
    file: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, str(file), "--against", "tp=8 fsdp=2", "--term", "time.tp", "--json")
    payload: dict[str, Any] = json.loads(out)
    assert code == 0
    assert payload["schema"] == "shardwise.explain/3"
    assert payload.keys() == {
        "schema", "model", "cluster", "layout", "placement", "model_error", "fit", "batch", "throughput", "runners_up",
        "options", "schedules", "run", "constants", "against", "terms", "notes",
        "stack", "critical_batch", "recompute", "batch_advice", "published",
    }  # fmt: skip
    assert [term["layout"] for term in payload["terms"]] == [payload["layout"], payload["against"]["layout"]]
    assert payload["against"]["time"]["tp"].keys() == {"plan", "other", "change"}
    long = replace(plan, job=replace(plan.job, tokens=1e12))
    explanation = sw.explain(long, "tp=8 fsdp=2", term="time.tp")
    assert to_json(ExplanationRecord.of(explanation)) == payload


def test_one_term_is_shown_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(file), "--term", "memory.activations")
    assert code == 0
    assert "does it fit" not in out
    for part in ("memory.activations of", "of the whole", "read off the derivation", "·D·", "model width"):
        assert part in out


WRONG = [
    (["--term", "memory.everything"], ["'memory.everything'", "memory.activations", "time.tp"]),
    (["--against", "tp=3 fsdp=8"], ["24", "16 devices", "32 query heads"]),
    (["--against", "zero=3"], ["--against: found 'zero=3'", "zero_stage"]),
    (["--against", ""], ["--against: found ''", "such as tp=8"]),
]


@pytest.mark.parametrize(("flags", "parts"), WRONG, ids=lambda value: " ".join(value))
def test_wrong_input_exits_2_with_the_problem(
    flags: list[str], parts: list[str], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, str(file), *flags)
    assert (code, out) == (2, "")
    for part in parts:
        assert part in err


def test_a_file_that_is_no_plan_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(tmp_path / "none.json"))
    assert code == 2
    assert "cannot read" in err


def test_a_reason_is_part_of_the_difference() -> None:
    """A term that rounds otherwise is no reason why a layout is slower."""
    model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:16")
    job = sw.Job(global_batch_tokens=2**19, seq_len=8192)
    best = plan_layout(model, cluster, job, sw.Layout.parse("fsdp=16")).estimate
    time = {**best.time, "tp": best.time["tp"] + 0.1, "control": best.time["control"] + 1e-20}
    slower = replace(best, time=time, step_time_s=best.step_time_s + 0.1)
    assert explain_slowdown(slower, best).endswith(": exposed tp communication +100 ms; same memory")
