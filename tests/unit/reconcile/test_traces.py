"""Traces written by hand, against counts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.measure.reconcile.aligned_traces import align_clocks, read_traced_step
from shardwise.measure.reconcile.rank_time import (
    TrafficOverlap,
    find_stalls,
    match_collectives,
    measure_lateness,
    measure_occupancy,
)
from shardwise.present.charts.chart import Band, RuleLine
from shardwise.present.charts.step_charts import anatomy_chart
from shardwise.records.run_folder import RunFolder
from shardwise.records.step_inspection import (
    COLLECTIVE,
    KERNEL,
    PASS,
    PASSES,
    WAIT,
    MemorySample,
    MemoryTrace,
    RankTrace,
    TraceEvent,
    read_memory_traces,
    read_trace,
    trace_path,
    write_memory_trace,
    write_trace,
)
from shardwise.values.errors import InputError
from unit.draw.page import marks_of

MS = 1_000_000


def kernel(name: str, start: int, end: int, **more: Any) -> TraceEvent:
    """A kernel of a block, in milliseconds."""
    about = {"phase": "backward", "unit": "block", "path": "layers.0", "action": "0B0", **more}
    return TraceEvent(kind=KERNEL, name=name, stream="compute", start_ns=start * MS, end_ns=end * MS, **about)


def traffic(kind: Any, start: int, end: int, number: int, axis: str = "dp") -> TraceEvent:
    stream = axis if kind == COLLECTIVE else "compute"
    return TraceEvent(
        kind=kind, name="all_reduce gradient", stream=stream, start_ns=start * MS, end_ns=end * MS, role="gradient",
        axes=(axis,), num_bytes=1000, number=number,
    )  # fmt: skip


def trace(events: list[TraceEvent], rank: int = 0, length: int = 100, **more: Any) -> RankTrace:
    values = {"begin_ns": 5 * MS, "offset_ns": 0, "error_ns": 0, **more}
    return RankTrace(
        rank=rank, step=3, device="cpu", coordinate={"pp": 0, "dp": rank}, step_ns=length * MS, events=tuple(events), **values
    )  # fmt: skip


# One rank, in milliseconds: a pass from 0 to 80 with kernels from 0 to 30, 32 to 60 and 65 to 80; the stream waits from 60 to 65
# and from 80 to 90, and does nothing from 30 to 32 in the pass and from 90 to 100 behind it. Traffic over dp runs from 20 to 65
# and from 62 to 90: 70 ms, of which kernels run beside 20-30, 32-60 and 65-80, which is 53 ms.
BY_HAND = [
    TraceEvent(kind=PASS, name="0B0", stream=PASSES, start_ns=0, end_ns=80 * MS, phase="B", action="0B0"),
    kernel("contract dw", 0, 30), kernel("contract dx", 32, 60), kernel("map x", 65, 80),
    traffic(COLLECTIVE, 20, 65, 0), traffic(WAIT, 60, 65, 0), traffic(COLLECTIVE, 62, 90, 1), traffic(WAIT, 80, 90, 1),
]  # fmt: skip


def test_overlap_and_exposed_time_agree_with_a_hand_count() -> None:
    occupancy = measure_occupancy(align_clocks([trace(BY_HAND)]).ranks[0])
    assert occupancy.busy == pytest.approx({"backward": 0.073})
    assert occupancy.exposed == pytest.approx({"dp": 0.015})
    assert (occupancy.gaps_s, occupancy.num_gaps) == (pytest.approx(0.002), 1)
    assert occupancy.between_s == pytest.approx(0.010)
    assert occupancy.idle_s == pytest.approx(0.027)
    (overlap,) = occupancy.overlaps
    assert overlap == TrafficOverlap(axis="dp", traffic_s=pytest.approx(0.070), hidden_s=pytest.approx(0.053))
    assert overlap.share == pytest.approx(53 / 70)


# Rank 1's clock is 7 ms ahead, and it begins 1 ms later. In the common time the ranks come to the first collective at 10 and
# 41 ms, and to the second at 70 and 61 ms; the first rank waits from 20 to 50, of which 21 ms are for the other one to come.
FIRST = [
    kernel("contract dw", 0, 10),
    traffic(COLLECTIVE, 10, 50, 0),
    traffic(WAIT, 20, 50, 0),
    traffic(COLLECTIVE, 70, 75, 1),
]
SECOND = [
    kernel("contract dw", 0, 40), traffic(COLLECTIVE, 40, 49, 0), traffic(WAIT, 41, 49, 0),
    traffic(COLLECTIVE, 60, 74, 1), traffic(WAIT, 65, 74, 1),
]  # fmt: skip


def two_ranks() -> list[RankTrace]:
    return [trace(FIRST), trace(SECOND, rank=1, begin_ns=(5 + 7 + 1) * MS, offset_ns=7 * MS, error_ns=2000)]


def test_lateness_names_the_last_rank_and_the_time_others_wait() -> None:
    step = align_clocks(two_ranks())
    first, second = sorted(match_collectives(step).values(), key=lambda match: match.all_arrived)
    assert (first.last_rank, second.last_rank) == (1, 0)
    assert (first.all_arrived, second.all_arrived) == pytest.approx((0.041, 0.070))
    assert (first.traffic_s, second.traffic_s) == pytest.approx((0.009, 0.005))
    first_rank, second_rank = measure_lateness(step)
    assert (first_rank.num_met, first_rank.num_last, second_rank.num_met, second_rank.num_last) == (2, 1, 2, 1)
    assert second_rank.kept_s == pytest.approx(0.021)  # 20 to 41
    assert first_rank.kept_s == pytest.approx(0.004)  # 66 to 70
    assert (dict(second_rank.by_axis), step.error_s) == (pytest.approx({"dp": 0.021}), 2e-6)


def test_collectives_match_within_their_group_only() -> None:
    quartet = [
        RankTrace(**{**as_fields(trace), "rank": 2 * place + trace.rank, "coordinate": {"pp": place, "dp": trace.rank}})
        for place in (0, 1)
        for trace in two_ranks()
    ]
    met = match_collectives(align_clocks(quartet))
    assert sorted(tuple(sorted(match.spans)) for match in met.values()) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def as_fields(trace: RankTrace) -> dict[str, Any]:
    return {name: getattr(trace, name) for name in trace.__dataclass_fields__}


def test_a_stall_is_a_kernel_or_a_gap_far_longer_than_similar_ones() -> None:
    usual = [kernel("contract q", 10 * n, 10 * n + 1, path=f"layers.{n}") for n in range(6)]
    slow = kernel("contract q", 60, 90, path="layers.6")
    late = kernel("contract q", 99, 100, path="layers.7")
    stalls = find_stalls(align_clocks([trace([*usual, slow, late])]))
    assert [(stall.path, stall.in_gap) for stall in stalls] == [("layers.6", False)]
    assert (stalls[0].seconds, stalls[0].usual_s) == pytest.approx((0.030, 0.001))
    packed = [kernel("contract q", n, n + 1, path=f"layers.{n}") for n in range(6)]
    (gap,) = find_stalls(align_clocks([trace([*packed, late])]))
    assert (gap.path, gap.in_gap, gap.seconds) == ("layers.7", True, pytest.approx(0.093))
    assert find_stalls(align_clocks([trace([*usual])])) == ()


def test_traces_are_read_back_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(InputError, match="holds no traces"):
        read_traced_step(run)
    for rank_trace in two_ranks():
        write_trace(run, rank_trace)
    assert [rank.trace for rank in read_traced_step(run).ranks] == two_ranks()
    with pytest.raises(InputError, match="found 4; 3 were traced"):
        read_traced_step(run, 4)
    path = trace_path(run, 3, 1)
    path.write_text(path.read_text().replace("shardwise.events/1", "other/1"))
    with pytest.raises(InputError, match="found another schema"):
        read_trace(path)
    path.write_text("{")
    with pytest.raises(InputError, match="as `train --profile` writes it"):
        read_trace(path)


def test_the_anatomy_of_steps_stacks_the_memory_of_the_fullest_rank(tmp_path: Path) -> None:
    run, terms = RunFolder(tmp_path), ("parameters", "activations")
    with pytest.raises(InputError, match="holds no memory"):
        read_memory_traces(run)
    for rank in (0, 1):
        for step in (1, 2):
            samples = (MemorySample(0.0, (10, 0)), MemorySample(1.0, (10, 5 + rank)), MemorySample(2.0, (10, 1)))
            write_memory_trace(run, MemoryTrace(step=step, rank=rank, terms=terms, samples=samples))
    steps = read_memory_traces(run)
    assert [(memory_trace.step, memory_trace.rank, memory_trace.peak_bytes) for memory_trace in steps] == [
        (1, 1, 16),
        (2, 1, 16),
    ]
    chart = anatomy_chart(steps, "a model")
    assert [(band.label, max(high for _, _, high in band.edges)) for band in marks_of(chart, Band)] == [
        ("parameters", 10.0),
        ("activations", 16.0),
    ]
    assert all(low == 10.0 for _, low, _ in marks_of(chart, Band)[1].edges)
    assert [rule.at for rule in marks_of(chart, RuleLine)] == pytest.approx([0.0, 2.0 + 0.02 * 4.0])
