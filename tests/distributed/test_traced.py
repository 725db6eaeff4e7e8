"""Recorded steps of two ranks: what runs concurrently, under which names, and what a step waits for."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness import run_processes
from training import STEPS, Case, engine_of, run_step

from shardwise.layout.layout import Layout
from shardwise.measure.reconcile.aligned_traces import align_clocks
from shardwise.measure.reconcile.rank_time import find_stalls, match_collectives, measure_lateness, measure_occupancy
from shardwise.records.run_folder import RunFolder
from shardwise.records.step_inspection import (
    COLLECTIVE,
    KERNEL,
    PASS,
    WAIT,
    RankTrace,
    TraceEvent,
    read_trace,
    trace_path,
    write_trace,
)
from shardwise.records.step_log import StepRecord
from shardwise.run.engine.unit_passes import SlotCall
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.trainer.profiler import profiled_step
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.instructions import Kernel, unroll_rings

REPLICAS = Case(layout=Layout(dp=2, micro_batch_seqs=2))
SHARDED = Case(layout=Layout(fsdp=2, zero_stage=3, micro_batch_seqs=2))
TENSOR = Case(layout=Layout(tp=2, sequence_parallel=True, micro_batch_seqs=4))
PIPELINE = Case("deep", Layout(pp=2, schedule="1f1b", micro_batch_seqs=2))
STALL_S = 0.5  # on a machine of two shared cores, where a kernel of microseconds may wait some 50 ms for one


def record_step(case: Case, prepare: Any = None) -> tuple[RankTrace, float]:
    """Return the last of a few steps on this rank, recorded, and its loss."""
    engine = engine_of(case)
    for step in range(STEPS - 1):
        run_step(engine, case, step)
    if prepare is not None:
        prepare(engine)

    def last() -> StepRecord:
        loss = float(run_step(engine, case, STEPS - 1).loss)
        return StepRecord(
            step=STEPS, loss=loss, grad_norm=1.0, learning_rate=1.0, num_tokens=1, num_targets=1, step_time_s=1.0
        )

    record, trace = profiled_step(engine, last)
    assert engine.model.recorder is None
    return trace, record.loss


def run_unrecorded(case: Case) -> float:
    """Return the loss of the same step without recording."""
    engine = engine_of(case)
    return [float(run_step(engine, case, step).loss) for step in range(STEPS)][-1]


@cache
def traces(case: str) -> list[RankTrace]:
    return [trace for trace, _ in run_rank_threads(record_step, 2, CASES[case])]


CASES = {
    "replicas": REPLICAS, "reduced after": replace(REPLICAS, recipe={"reduction": "after"}), "sharded": SHARDED,
    "tensor": TENSOR, "pipeline": PIPELINE,
}  # fmt: skip


def of_kind(trace: RankTrace, kind: str) -> list[TraceEvent]:
    return [event for event in trace.events if event.kind == kind]


def reductions(trace: RankTrace) -> list[TraceEvent]:
    return [event for event in of_kind(trace, COLLECTIVE) if event.role == "gradient"]


def last_kernel_ns(trace: RankTrace) -> int:
    """When the last kernel of the step's last backward pass ended."""
    return max(event.end_ns for event in of_kind(trace, KERNEL) if event.phase == "backward")


def test_the_reduction_of_an_overlapped_step_is_inside_the_backward_pass() -> None:
    for trace in traces("replicas"):
        backward = [event for event in of_kind(trace, PASS) if event.phase == "B"][-1]
        sums = reductions(trace)
        inside = [event for event in sums if backward.start_ns < event.start_ns < last_kernel_ns(trace)]
        assert len(sums) > 3
        assert len(inside) >= len(sums) - 1  # the last may be of the very last kernel
        assert {event.name for event in sums} == {"all_reduce gradient"}


def test_a_reduction_after_the_backward_pass_is_seen_behind_it() -> None:
    for trace in traces("reduced after"):
        assert reductions(trace)
        assert all(event.start_ns >= last_kernel_ns(trace) for event in reductions(trace))


@pytest.mark.parametrize("name", ["replicas", "sharded", "tensor", "pipeline"])
def test_seconds_of_a_rank_add_up_and_nothing_on_the_compute_stream_overlaps(name: str) -> None:
    step = align_clocks(traces(name))
    for rank in step.ranks:
        occupancy = measure_occupancy(rank)
        parts = occupancy.busy_s + occupancy.exposed_s + occupancy.gaps_s + occupancy.between_s
        assert parts == pytest.approx(rank.seconds, rel=1e-9)
        for before, after in zip(rank.compute_spans, rank.compute_spans[1:], strict=False):
            assert before.end <= after.start


@pytest.mark.parametrize("name", ["replicas", "sharded", "tensor", "pipeline"])
def test_kernels_have_the_names_of_the_planned_step(name: str) -> None:
    case = CASES[name]
    for place, trace in enumerate(traces(name)):
        instance = case.instance().for_pp_rank(place if case.layout.pp > 1 else 0)
        measured = {(event.path, event.phase, tensor) for event in of_kind(trace, KERNEL) for tensor in event.results}
        names = {part for event in of_kind(trace, KERNEL) for part in event.name.split(" + ")}
        for path, unit in instance.units:
            for kind in "FB":
                kernels = [
                    instruction
                    for instruction in unroll_rings(instance.instructions(path, unit, kind))
                    if isinstance(instruction, Kernel)
                ]
                for kernel in kernels:
                    assert any((path, kernel.phase, tensor) in measured for tensor in kernel.outputs), kernel.name
                    assert kernel.name in names or len(kernel.outputs) > 1, kernel.name


def test_collectives_of_activations_have_the_names_of_the_planned_step() -> None:
    instance = CASES["tensor"].instance()
    planned = {
        collective.name for path, unit in instance.units for collective in instance.activation_collectives(path, unit)
    }
    for trace in traces("tensor"):
        moved = {event.name for event in of_kind(trace, COLLECTIVE) if event.role == "activation"}
        assert moved == planned
        waited = {event.name for event in of_kind(trace, WAIT) if event.role == "activation"}
        assert waited == planned


@pytest.mark.parametrize("name", ["replicas", "sharded", "tensor"])
def test_ranks_meet_at_every_collective(name: str) -> None:
    rank_traces = traces(name)
    matches = match_collectives(align_clocks(rank_traces))
    assert len(matches) == len(of_kind(rank_traces[0], COLLECTIVE)) == len(of_kind(rank_traces[1], COLLECTIVE))
    for meeting in matches.values():
        names = {span.event.name for span in meeting.spans.values()}
        sizes = {span.event.num_bytes for span in meeting.spans.values()}
        assert len(names) == len(sizes) == 1


def test_messages_of_a_pipeline_are_recorded_on_both_stages() -> None:
    first, last = traces("pipeline")
    for sender, receiver in ((first, last), (last, first)):
        sent = [event for event in of_kind(sender, COLLECTIVE) if event.name.startswith("send")]
        taken = [event for event in of_kind(receiver, COLLECTIVE) if event.name.startswith("receive")]
        assert len(sent) == len(taken) == CASES["pipeline"].num_micro_batches


def test_nothing_is_done_before_all_ranks_have_come() -> None:
    """By clocks of one machine, which are one clock: the offset that is found is within its error of 0."""
    for name in ("replicas", "sharded", "tensor"):
        step = align_clocks(traces(name))
        for trace in traces(name):
            assert abs(trace.offset_ns) <= trace.error_ns
        for meeting in match_collectives(step).values():
            done = min(span.end for span in meeting.spans.values())
            assert done >= meeting.all_arrived - 2 * step.error_s


def test_a_recorded_step_computes_the_same() -> None:
    losses = [loss for _, loss in run_rank_threads(record_step, 2, SHARDED)]
    assert losses == run_rank_threads(run_unrecorded, 2, SHARDED)


def record_stall(case: Case) -> tuple[RankTrace, float]:
    return record_step(case, prepare=stall_of_rank_1)


def stall_of_rank_1(engine: TrainingEngine) -> None:
    """One product of one layer and micro-batch sleeps on the second rank."""
    if engine.world.rank != 1:
        return
    unit = next(layer.unit for layer in engine.model.layers if layer.path == "layers.1")
    runs = iter(range(1_000))

    def sleepy(step: SlotCall) -> SlotCall:
        def kernel(*operands: Any) -> Any:
            if next(runs) == 1:  # of the three layers, in the first micro-batch
                time.sleep(STALL_S)
            return step.kernel(*operands)

        return step._replace(kernel=kernel)

    unit.forward = tuple(sleepy(step) if step.identity.name == "contract gate" else step for step in unit.forward)


def test_an_injected_stall_is_found_and_named() -> None:
    step = align_clocks([trace for trace, _ in run_processes(record_stall, 2, TENSOR)])
    # a busy machine stalls other kernels as well
    (stall,) = [
        stall for stall in find_stalls(step) if (stall.rank, stall.name, stall.path) == (1, "contract gate", "layers.1")
    ]
    assert (stall.in_gap, stall.phase, stall.action) == (False, "forward", "0F0")
    assert stall.excess_s == pytest.approx(STALL_S, rel=0.2)
    waiting, late = measure_lateness(step)
    assert late.kept_s > 0.8 * STALL_S > waiting.kept_s
    assert late.by_axis["tp"] == pytest.approx(late.kept_s, rel=0.2)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for trace in traces("sharded"):
        write_trace(run, trace)
        assert read_trace(trace_path(run, STEPS, trace.rank)) == trace
    first = json.loads(trace_path(run, STEPS, 0).read_text().splitlines()[0])
    assert (first["schema"], first["rank"], first["step"]) == ("shardwise.events/1", 0, STEPS)
