"""Ranks that follow the plan have no differences; changes to them are detected, with cause and remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from json_schemas import require_valid
from number_paths import require_payload_numbers

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.measure.reconcile.aligned_traces import align_clocks
from shardwise.measure.reconcile.payloads import TraceRecord
from shardwise.measure.reconcile.step_differences import StepDifference, explain_traffic
from shardwise.measure.reconcile.trace_analysis import Bottleneck, TraceAnalysis
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.records.run_folder import RunFolder
from shardwise.records.step_inspection import KERNEL, RankTrace
from shardwise.search.explain.neighbour_layouts import find_remedy, iterate_neighbours, seconds_of_terms
from shardwise.search.plan import Plan, plan_layout
from shardwise.values import to_json
from unit.reconcile.as_planned import as_planned, is_kernel, slowed

QUERIES = "contract q_flat"


def plan_of(kind: str = "tp", **more: object) -> Plan:
    """Llama 3.2 1B on a node of eight."""
    tensor: dict[str, object] = {"tp": 8, "sequence_parallel": True, "micro_batch_seqs": 4}
    fields = tensor if kind == "tp" else {"fsdp": 8, "zero_stage": 3}
    job = Job(global_batch_tokens=8 * 2048, seq_len=2048, precision="bf16")
    layout = Layout(**{**fields, **more})  # type: ignore[arg-type]
    return plan_layout(load_model("llama-3.2-1b"), load_cluster("h100:8"), job, layout)


PLAN = plan_of()


def analyse(traces: list[RankTrace], plan: Plan = PLAN) -> TraceAnalysis:
    return TraceAnalysis(plan, align_clocks(traces), RunFolder(Path("runs/a")))


def largest_difference(analysis: TraceAnalysis) -> StepDifference:
    return analysis.differences[0]


def bottleneck_of_kind(analysis: TraceAnalysis, kind: str) -> Bottleneck:
    return next(bottleneck for bottleneck in analysis.bottlenecks if bottleneck.kind == kind)


@pytest.mark.parametrize("plan", [PLAN, plan_of("fsdp")], ids=["tp", "fsdp"])
def test_ranks_that_follow_the_plan_have_no_differences(plan: Plan) -> None:
    axis = "tp_kv" if plan.layout.tp > 1 else "fsdp"
    analysis = analyse(as_planned(plan, axis=axis), plan)
    step_s = analysis.planned.step_time_s
    assert max(abs(difference.difference_s) for difference in analysis.differences) < 1e-4 * step_s
    assert {bottleneck.kind for bottleneck in analysis.bottlenecks} <= {"exposed", "update"}
    assert analysis.stalls == ()


def test_differences_add_up_to_the_difference_of_the_step() -> None:
    first, second = as_planned(PLAN)
    analysis = analyse([slowed(first, is_kernel(QUERIES), 3.0), slowed(second, is_kernel("contract gate"), 2.0)])
    mean = sum(rank.seconds for rank in analysis.step.ranks) / 2
    total_s = sum(difference.difference_s for difference in analysis.differences)
    assert total_s == pytest.approx(mean - analysis.planned.step_time_s, rel=1e-6)


def test_a_kernel_slower_on_all_ranks_is_slower_than_its_roofline() -> None:
    analysis = analyse([slowed(trace, is_kernel(QUERIES), 3.0) for trace in as_planned(PLAN)])
    difference = largest_difference(analysis)
    assert (difference.kind, difference.name, difference.where) == ("kernel", QUERIES, "block forward")
    assert difference.measured_s == pytest.approx(3 * difference.expected_s, rel=1e-4)
    assert difference.cause == "kernel slower than its roofline"
    assert bottleneck_of_kind(analysis, "kernels").what.count(QUERIES) == 1


def test_a_kernel_whose_thread_has_no_core_suffers_contention() -> None:
    analysis = analyse([slowed(trace, is_kernel(QUERIES), 3.0, on_core=0.4) for trace in as_planned(PLAN)])
    assert largest_difference(analysis).cause == "contention"
    assert "a core for 40% of the time" in largest_difference(analysis).why
    assert "fewer ranks" in bottleneck_of_kind(analysis, "kernels").advice


def test_a_rank_that_is_late_to_every_collective_is_a_straggler() -> None:
    """The second rank takes longer for one kernel of every layer; the first one waits for it that long."""
    first, second = as_planned(PLAN)
    slow = slowed(second, is_kernel(QUERIES), 20.0)
    shifted = {(event.axes, event.number): event for event in slow.events if event.kind == "collective"}
    events, later = [], 0
    for event in sorted(first.events, key=lambda traced_event: (traced_event.start_ns, traced_event.kind)):
        more = 0
        if event.kind == "wait":
            more = max(shifted[event.axes, event.number].end_ns - event.end_ns - later, 0)
        events.append(replace(event, start_ns=event.start_ns + later, end_ns=event.end_ns + later + more))
        later += more
    analysis = analyse([replace(first, events=tuple(events), step_ns=first.step_ns + later), slow])
    straggler = bottleneck_of_kind(analysis, "straggler")
    assert straggler.rank == 1
    assert QUERIES in straggler.advice
    late = next(difference for difference in analysis.differences if difference.kind == "late")
    assert late.cause == "waiting for a late peer"
    assert "rank 1" in late.why
    extra = sum(e.end_ns - e.start_ns for e in second.events if e.kind == KERNEL and e.name == QUERIES) * 19 / 1e9
    assert straggler.seconds > 0.9 * extra


@pytest.mark.parametrize(
    ("exposed_s", "moving_s", "cause"),
    [
        (0.0219, 0.9, "as planned"),
        (0.0181, 0.9, "as planned"),
        (0.0179, 0.9, "faster than planned"),
        (0.0221, 0.043, "less hidden than planned"),  # on its way for as long as planned, within a tenth
        (0.0221, 0.045, "collective slower than alpha-beta"),
    ],
)
def test_exposed_traffic_has_a_cause(exposed_s: float, moving_s: float, cause: str) -> None:
    """The plan has 40 ms of traffic, of which 20 ms are exposed."""
    assert explain_traffic(0.02, exposed_s, 0.04, moving_s)[0] == cause


def test_less_tensor_parallelism_is_the_remedy_for_its_exposed_traffic() -> None:
    analysis = analyse(as_planned(PLAN))
    exposed = bottleneck_of_kind(analysis, "exposed")
    assert "tp" in exposed.what
    assert exposed.remedy is not None
    assert exposed.remedy.saves_s > 0
    assert exposed.seconds == pytest.approx(analysis.planned.exposed["tp"], rel=0.01)
    mended = Layout.parse(exposed.remedy.layout)
    assert mended.tp < PLAN.layout.tp


def test_a_remedys_layout_has_the_payload_of_a_plans_layout() -> None:
    analysis = analyse(as_planned(PLAN))
    with_bottlenecks = replace(analysis, lists_bottlenecks=True)
    payload = to_json(TraceRecord.of(with_bottlenecks))
    require_valid(payload)
    assert require_payload_numbers(with_bottlenecks) > 50
    (change, *_) = (bottleneck["remedy"] for bottleneck in payload["bottlenecks"] if bottleneck["remedy"])
    assert change["layout"]["tp"] < PLAN.layout.tp
    assert TraceRecord.of(analysis).bottlenecks is None


def test_a_remedy_is_priced_and_has_less_of_the_lost_time() -> None:
    amount = seconds_of_terms(("tp",))
    change = find_remedy(PLAN, 0.0, amount)
    assert change is not None
    assert change.saves_s == pytest.approx(PLAN.estimate.step_time_s - change.step_time_s)
    more = find_remedy(PLAN, 10.0, amount)
    assert more is not None
    assert more.saves_s > change.saves_s
    assert find_remedy(PLAN, 0.0, lambda layout, priced: 1.0) is None  # of which every layout has as much


def test_neighbours_keep_the_devices() -> None:
    for layout in (PLAN.layout, Layout(dp=4, pp=2, schedule="1f1b", micro_batch_seqs=2), Layout(dp=2, tp=4, cp=2)):
        neighbours = [neighbour for _, neighbour in iterate_neighbours(replace(PLAN, layout=layout))]
        assert len(neighbours) > 4
        assert {neighbour.num_devices for neighbour in neighbours} == {layout.num_devices}
