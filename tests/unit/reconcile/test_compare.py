"""A run against its plan, on synthetic data with known verdicts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from json_schemas import require_valid
from number_paths import require_payload_numbers

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import published_calibration, with_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.layout.layout import Layout
from shardwise.measure.reconcile.payloads import ReconciliationRecord
from shardwise.measure.reconcile.reconciliation import InspectedRun, Reconciliation, reconcile
from shardwise.measure.reconcile.step_terms import (
    StepTime,
    TimeTerm,
    attribute_error,
    compare_collectives,
    compare_counts,
    compare_memory,
    compare_step_time,
    find_dependencies,
)
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.present.charts.chart import StackedBars
from shardwise.present.charts.measurement_charts import reconciliation_charts
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.run import reconcile_report
from shardwise.records.step_inspection import (
    MeasuredMemory,
    ProcessMemory,
    RunInspection,
    inspection_payload,
    parse_inspection,
)
from shardwise.records.step_log import StepRecord
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.search.plan import Plan, plan_layout
from shardwise.sharding.collectives import CollectiveKind, IssuedCollective
from shardwise.step.issued_collectives import count_collectives
from shardwise.values import to_json

MODEL = Architecture(
    name="small", num_layers=4, d_model=512, d_ff=2048, num_heads=8, num_kv_heads=8, head_dim=64, vocab_size=8192
)
JOB = Job(global_batch_tokens=16384, seq_len=512, loss="in_place")
NUM_MICRO_BATCHES = 4  # 32 sequences over 8 replicas, one at a time
MIB = 2**20


def plan_of(*, stack: str | None = "nemo-25", **layout: Any) -> Plan:
    cluster, job = load_cluster("h100:8"), JOB
    if stack:
        cluster = with_calibration(cluster, published_calibration("h100", get_stack(stack)))
    else:
        job = replace(JOB, overlap="per_axis")
    return plan_layout(MODEL, cluster, job, Layout(**(layout or {"dp": 4, "fsdp": 2, "zero_stage": 3})))


PLAN = plan_of()


def records(plan: Plan, scale: Mapping[str, float] | None = None, other_s: float = 0.0) -> tuple[StepRecord, ...]:
    """Ten steps with the plan's terms, some of them scaled, and `rest` more seconds, of which a third is data."""
    seconds = {name: value * (scale or {}).get(name, 1.0) for name, value in plan.estimate.time.items()}
    all_seconds = {**seconds, "data": other_s / 3, "other": other_s * 2 / 3}
    step_s = sum(all_seconds.values())
    return tuple(
        StepRecord(
            step=number, loss=1.0, grad_norm=1.0, learning_rate=1e-3, num_tokens=JOB.global_batch_tokens, num_targets=1,
            step_time_s=step_s * (1 + (number - 5.5) / 1000), seconds=all_seconds,
        )
        for number in range(1, 11)
    )  # fmt: skip


def planned_memory(plan: Plan, **changes: int) -> MeasuredMemory:
    """Memory of tensors in a run that equals its plan: at the peak, one of the alternatives is live."""
    largest = {name: round(size) for name, size in plan.estimate.memory.items() if name not in ("buffers", "runtime")}
    largest["logits"] = largest["logits"] or 7
    peak = sum(size for name, size in plan.estimate.memory.items() if name != "runtime")
    return MeasuredMemory(peak_bytes=round(peak) + sum(changes.values()), at_peak=largest, largest={
        name: size + changes.get(name, 0) for name, size in largest.items()
    })  # fmt: skip


def inspection_of(plan: Plan, **changes: Any) -> RunInspection:
    issued: Counter[IssuedCollective] = Counter()
    for collective, count in count_collectives(engine_instance(plan, RECIPE), NUM_MICRO_BATCHES).items():
        issued[collective._replace(what="")] += count
    usual = RunInspection(
        device="cuda", machine="NVIDIA H100 80GB HBM3", before={"products": 1e-3, "memory": 2e-3},
        after={"products": 1.02e-3, "memory": 1.9e-3}, step=2, memory=planned_memory(plan), process=ProcessMemory(5 * MIB, 7, 9),
        collectives=issued,
    )  # fmt: skip
    return replace(usual, **changes)


RECIPE = TrainingRecipe(steps=12)


def reconcile_run(plan: Plan = PLAN, counted: tuple[StepRecord, ...] = (), **changes: Any) -> Reconciliation:
    steps = counted or records(plan)
    inspection = inspection_of(plan, **changes)
    return reconcile(
        plan,
        InspectedRun(
            path=Path("runs/a"), timed_steps=steps, inspected_step=steps[0], inspection=inspection, recipe=RECIPE
        ),
    )


def test_a_run_that_equals_its_plan_has_no_attribution() -> None:
    reconciliation = reconcile_run()
    assert reconciliation.time.measured_s == pytest.approx(PLAN.estimate.step_time_s)
    assert reconciliation.time.within is True
    assert reconciliation.attribution is None
    assert reconciliation.time.rest_s == pytest.approx(0.0, abs=1e-3 * reconciliation.time.measured_s)
    assert reconciliation.collectives.equal
    assert reconciliation.collectives.planned == reconciliation.collectives.found > 0
    assert all(
        memory_term.within is not False for memory_term in (*reconciliation.memory.terms, reconciliation.memory.total)
    )
    assert (reconciliation.remarks, reconciliation.advice, reconciliation.noisy) == ((), (), False)


@pytest.mark.parametrize("name", ["forward", "backward", "optimizer", "dp"])
def test_the_error_is_attributed_to_the_term_that_differs(name: str) -> None:
    predicted = PLAN.estimate.time[name]
    factor = 1 + 2 * PLAN.estimate.step_time_s / predicted
    reconciliation = reconcile_run(counted=records(PLAN, {name: factor}))
    assert reconciliation.attribution is not None
    assert reconciliation.attribution.term.name == name
    assert reconciliation.attribution.ratio == pytest.approx(factor)
    assert reconciliation.attribution.part == pytest.approx(1.0, abs=0.01)
    assert reconciliation.time.within is False
    assert reconciliation.advice[-2].startswith("shardwise calibrate h100:8 ")


def test_a_shorter_step_is_attributed_to_a_term_that_is_faster() -> None:
    reconciliation = reconcile_run(counted=records(PLAN, {"backward": 0.5, "optimizer": 1.2}))
    assert reconciliation.attribution is not None
    assert reconciliation.attribution.term.name == "backward"
    assert reconciliation.attribution.part > 1.0  # the optimizer makes up for some of it


def test_no_error_is_attributed_to_a_term_that_compensates_it() -> None:
    """Seconds of a step: 0.6 and 0.5 more than predicted, 0.8 less; 0.3 more in all, attributed to the 0.6."""
    terms = tuple(
        TimeTerm(name=name, predicted_s=1.0, measured_s=1.0 + difference)
        for name, difference in (("forward", 0.6), ("backward", -0.8), ("dp", 0.5))
    )
    longer = StepTime(
        predicted_s=3.0, interval90=None, measured_s=3.3, low_s=3.3, high_s=3.3, num_steps=1, rest_s=0.0, terms=terms
    )
    shorter = replace(longer, measured_s=2.7, terms=tuple(replace(t, measured_s=2.0 - t.measured_s) for t in terms))
    for step in (longer, shorter):
        attribution = attribute_error(step, lambda name: ())
        assert attribution is not None
        assert (attribution.term.name, attribution.part) == ("forward", pytest.approx(2.0))


def test_an_error_can_be_attributed_to_time_outside_of_all_terms() -> None:
    other_s = 0.5 * PLAN.estimate.step_time_s
    reconciliation = reconcile_run(counted=records(PLAN, other_s=other_s))
    assert reconciliation.time.rest_share == pytest.approx(1 / 3, abs=0.005)
    assert reconciliation.attribution is not None
    assert (
        reconciliation.attribution.term.name,
        reconciliation.attribution.ratio,
        reconciliation.attribution.depends_on,
    ) == ("other", None, ())


def test_small_errors_have_no_attribution() -> None:
    for scale, attributed in ((1.04, False), (1.08, True)):
        time = compare_step_time(PLAN.estimate, records(PLAN, dict.fromkeys(PLAN.estimate.time, scale)))
        assert (attribute_error(time, lambda name: ()) is not None) is attributed


def test_a_step_time_is_the_median_with_percentiles() -> None:
    time = compare_step_time(PLAN.estimate, records(PLAN))
    assert time.num_steps == 10
    assert (time.low_s, time.high_s) == pytest.approx(
        [time.measured_s * (1 + per_mille / 1000) for per_mille in (-3.5, 3.5)]
    )


def test_measured_terms_add_up_to_the_measured_step() -> None:
    """In each step a different term is slow: medians of terms would add up to much less than the median step."""
    steps = []
    for number, record in enumerate(records(PLAN), start=1):
        slow = ("forward", "fsdp", "data")[number % 3]
        seconds = {**record.seconds, slow: record.seconds[slow] + 0.5 * record.step_time_s}
        steps.append(replace(record, seconds=seconds, step_time_s=1.52 * record.step_time_s))
    reconciliation = reconcile_run(counted=tuple(steps))
    medians = sum(median(step.seconds[term.name] for step in steps) for term in reconciliation.time.terms)
    assert medians < 0.8 * reconciliation.time.measured_s
    assert sum(term.measured_s for term in reconciliation.time.terms) == pytest.approx(
        reconciliation.time.measured_s, rel=1e-12
    )
    assert sum(term.predicted_s or 0.0 for term in reconciliation.time.terms) == pytest.approx(
        reconciliation.time.predicted_s, rel=1e-12
    )
    (bars,) = reconciliation_charts(reconciliation)[0].panels[0].marks
    assert isinstance(bars, StackedBars)
    assert bars.sums == pytest.approx((reconciliation.time.predicted_s, reconciliation.time.measured_s))
    shares = re.findall(r" (\d+\.\d)%  ", render_text(reconcile_report(reconciliation)).split("memory of a device")[0])
    assert sum(map(float, shares)) == pytest.approx(100.0, abs=0.5)


def test_a_difference_within_rounding_is_printed_as_zero() -> None:
    reconciliation = reconcile_run()
    step_s = reconciliation.time.measured_s

    def line(difference_s: float) -> str:
        terms = (
            TimeTerm(name="forward", predicted_s=step_s, measured_s=step_s + difference_s),
            *reconciliation.time.terms[1:],
        )
        text = render_text(reconcile_report(replace(reconciliation, time=replace(reconciliation.time, terms=terms))))
        return next(line for line in text.splitlines() if "forward" in line)

    assert line(1e-10 * step_s).split("%")[1].split()[:2] == ["+0", "s"]
    assert line(-1e-10 * step_s) == line(1e-10 * step_s)
    assert line(1e-3 * step_s) != line(0.0)


def test_a_term_depends_on_the_constants_that_change_it() -> None:
    compiled = plan_of(stack="torchtitan")
    forward, weights = find_dependencies(compiled, "forward"), find_dependencies(compiled, "fsdp")
    assert find_dependencies(PLAN, "forward") == ()  # such a small model waits for the host at any speed of the device
    assert {"chip.matmul_fraction", "stack.launch_s", "stack.elementwise"} <= set(forward)
    assert "chip.link_fraction" not in forward
    assert {"chip.link_fraction", "stack.exposed"} <= set(weights)
    assert "chip.memory_fraction" in find_dependencies(PLAN, "optimizer")
    assert "chip.matmul_fraction" not in find_dependencies(PLAN, "optimizer")
    assert find_dependencies(PLAN, "data") == ()
    assert "job.overlap" in find_dependencies(
        plan_of(stack=None), "fsdp"
    )  # without a calibration a convention decides what is exposed


def test_a_bound_has_no_verdict() -> None:
    plan = plan_of(stack=None)
    assert reconcile_run(plan).time.within is None


def test_the_error_of_a_noisy_machine_is_attributed_to_no_term() -> None:
    reconciliation = reconcile_run(
        counted=records(PLAN, {"forward": 3.0}), before={"products": 1e-3, "memory": 1e-3},
        after={"products": 1.14e-3, "memory": 0.95e-3},
    )  # fmt: skip
    assert reconciliation.noisy
    assert reconciliation.attribution is None
    assert reconciliation.remarks == (
        "the machine changed by 14% during the run (products +14%): times below are of a noisy machine",
    )
    assert reconciliation.advice[0] == "run it again while nothing else runs on the machine"


@pytest.mark.parametrize(
    ("device", "machine", "is_other"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", False),
        ("cuda", "NVIDIA H200", True),
        ("cpu", "CPU, 4 threads", True),
    ],
)
def test_another_machine_is_the_first_remark(device: str, machine: str, is_other: bool) -> None:
    reconciliation = reconcile_run(device=device, machine=machine, after={"products": 2.0, "memory": 2.0})
    assert reconciliation.remarks[0].startswith("the plan is priced for h100") is is_other
    assert len(reconciliation.remarks) == 1 + is_other


def test_remarks_name_another_loss_and_an_unfinished_run() -> None:
    plan = replace(PLAN, job=replace(JOB, loss="unfused"))
    unended, loss = reconcile_run(plan, after={}).remarks
    assert "has not ended" in unended
    assert "--set job.loss=in_place" in loss


def test_memory_is_compared_at_the_loss_or_in_a_block() -> None:
    sizes = {**dict.fromkeys(PLAN.estimate.memory, 0.0), "parameters": 100.0, "activations": 50.0, "runtime": 1000.0}
    largest = {"parameters": 100, "activations": 51, "logits": 33, "workspace": 40}
    at_peak = {"parameters": 100, "activations": 45, "logits": 30, "workspace": 25}
    inspection = inspection_of(PLAN, memory=MeasuredMemory(peak_bytes=200, at_peak=at_peak, largest=largest))
    at_loss = {
        memory_term.name: memory_term
        for memory_term in compare_memory({**sizes, "logits": 33.0, "workspace": 19.0}, inspection).terms
    }
    assert [(memory_term.predicted, memory_term.measured, memory_term.within) for memory_term in at_loss.values()] == [
        (100.0, 100, True), (50.0, 51, True), (33.0, 30, False), (19.0, 19, True),
    ]  # fmt: skip
    in_block = compare_memory({**sizes, "workspace": 40.0, "buffers": 8.0}, inspection)
    assert [(memory_term.name, memory_term.predicted, memory_term.measured) for memory_term in in_block.terms][2:] == [
        ("workspace", 48.0, 49)
    ]
    assert (in_block.total.predicted, in_block.total.measured, in_block.runtime) == (198.0, 200, 1000.0)
    assert in_block.total.within
    for terms in (at_loss.values(), in_block.terms):
        assert sum(memory_term.measured for memory_term in terms) == 200


def test_gathered_weights_are_compared_at_the_peak() -> None:
    sizes = {**dict.fromkeys(PLAN.estimate.memory, 0.0), "gathered": 41.0, "workspace": 10.0}
    inspection = inspection_of(
        PLAN, memory=MeasuredMemory(peak_bytes=50, at_peak={"gathered": 40, "workspace": 10}, largest={"gathered": 60})
    )
    gathered, workspace = compare_memory(sizes, inspection).terms
    assert (gathered.measured, gathered.largest, gathered.within) == (40, 60, True)
    assert (workspace.measured, workspace.largest, workspace.within) == (10, None, True)


def test_collectives_that_differ_are_listed() -> None:
    reduce = IssuedCollective(CollectiveKind.ALL_REDUCE, ("dp",), "fp32", 4000, "")
    gather = IssuedCollective(CollectiveKind.ALL_GATHER, ("fsdp",), "bf16", 100, "")
    comparison = compare_counts(Counter({reduce: 3, gather: 2}), Counter({reduce: 2, gather: 2}))
    assert not comparison.equal
    assert [(miscount.issued, miscount.planned, miscount.found) for miscount in comparison.miscounted] == [
        (reduce, 3, 2)
    ]
    assert (comparison.planned_bytes, comparison.found_bytes) == ({"dp": 12000, "fsdp": 200}, {"dp": 8000, "fsdp": 200})


def test_planned_collectives_follow_the_batch_of_the_inspected_step() -> None:
    """A batch twice as large has twice as many gathers."""
    usual, twice = (
        compare_collectives(PLAN, RECIPE, factor * JOB.global_batch_tokens, Counter()).planned_bytes["fsdp"]
        for factor in (4, 8)
    )
    assert twice == pytest.approx(2 * usual, rel=1e-3)


def test_an_inspection_is_read_back_unchanged() -> None:
    for inspection in (inspection_of(PLAN), RunInspection(device="cpu", machine="CPU", before={"products": 1.0})):
        assert parse_inspection(inspection_payload(inspection), "measured.json") == inspection


def test_bytes_of_rows_depend_on_the_router() -> None:
    """Collectives of rows are compared without their bytes; where shares are even, with them."""
    rows = IssuedCollective(CollectiveKind.ALL_TO_ALL, ("ep",), "bf16", 4096, "rows")
    fewer = Counter({rows._replace(num_bytes=1024, what=""): 2})
    comparison = compare_counts(Counter({rows: 2}), fewer)
    assert (comparison.equal, comparison.uneven) == (True, True)
    assert not compare_counts(Counter({rows: 3}), fewer).equal
    assert not compare_counts(Counter({rows: 2}), fewer, even=True).equal
    assert not compare_counts(Counter({rows._replace(what="activations"): 2}), fewer).equal


def test_a_payload_has_every_field_of_its_schema() -> None:
    plan = plan_of()
    payload = json.loads(json.dumps(to_json(ReconciliationRecord.of(reconcile_run(plan)))))
    require_valid(payload)
    assert require_payload_numbers(reconcile_run(plan)) > 50
    memory = reconcile_run(plan).memory
    assert payload["memory"]["runtime"] == memory.runtime
    assert [memory_term["name"] for memory_term in payload["memory"]["terms"]] == [
        memory_term.name for memory_term in memory.terms
    ]
