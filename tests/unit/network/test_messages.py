"""The simulator: complete collectives, bytes on links, steps; every closed form of collectives against them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from shardwise.book_formulas.collective_times import all_to_all_chunks, axes_report, link_bytes, torus_of_axes
from shardwise.hardware.network.links import COLLECTIVE_NAMES, received_bytes
from shardwise.hardware.network.message_simulation import (
    SIMULATED_KINDS,
    CollectiveSimulation,
    HopMessage,
    RingGrid,
    ShardPiece,
    ring_grid,
    simulate_collective,
)
from shardwise.present.charts.chart import Cell
from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.sharding_charts import device_names, frames, strip_of
from shardwise.sharding.collectives import CollectiveKind
from shardwise.values.errors import InputError

AG, RS, AR, A2A = SIMULATED_KINDS
OPERATION = {CollectiveKind(name): name for name in COLLECTIVE_NAMES if name in set(SIMULATED_KINDS)}
SIZES = (2, 3, 4, 5, 8, 9)
GRIDS = ((4, 4), (2, 3), (3, 3), (4, 2), (2, 2, 2), (4, 2, 2))
WRAPS = (True, False)


@pytest.mark.parametrize("kind", SIMULATED_KINDS)
@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_every_collective_completes_on_every_grid(kind: CollectiveKind, one_way: bool, split: bool) -> None:
    """Completion and that no summand is added twice are checked by the simulator itself."""
    for shape, wraps in itertools.product((*((n,) for n in SIZES), *GRIDS), WRAPS):
        done = simulate_collective(kind, 1.0, ring_grid(shape, wraps, one_way=one_way), split=split)
        count = done.grid.num_devices
        assert min(done.received_bytes) > 0
        if kind is not A2A:  # no byte is passed on that the device does not need
            total = received_bytes(OPERATION[kind], 1.0, count)
            assert sum(done.received_bytes) == pytest.approx(count * total)
            assert kind is not AG or done.received_bytes == pytest.approx((total,) * count)


@pytest.mark.parametrize("kind", [AG, RS, AR])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("wraps", "one_way"), [(True, False), (True, True), (False, False)])
def test_times_on_a_single_axis_equal_the_closed_form(
    kind: CollectiveKind, size: int, wraps: bool, one_way: bool
) -> None:
    """Steps, and the time where latency, bandwidth, or neither plainly dominates."""
    done = simulate_collective(kind, 6.4e6, ring_grid((size,), wraps, one_way=one_way))
    torus = torus_of_axes((size,), 9e10, wraps=wraps, hop_latency_s=1e-6)
    report = axes_report(OPERATION[kind], 6.4e6, torus, one_way=one_way)
    assert done.num_steps == report.hops
    assert done.time_s(4.5e10, 1e-6) == pytest.approx(report.time_s)
    for latency in (1e-9, 1e-3):
        report = axes_report(OPERATION[kind], 6.4e6, dataclasses.replace(torus, hop_latency_s=latency), one_way=one_way)
        assert done.time_s(4.5e10, latency) == pytest.approx(report.time_s)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("wraps", "one_way"), [(True, False), (True, True), (False, False)])
def test_the_busiest_link_of_an_axis_equals_the_closed_form(size: int, wraps: bool, one_way: bool) -> None:
    gather = simulate_collective(AG, 1.0, ring_grid((size,), wraps, one_way=one_way))
    transpose = simulate_collective(A2A, 1.0, ring_grid((size,), wraps, one_way=one_way))
    assert gather.busiest_link_bytes == pytest.approx(link_bytes("all_gather", 1.0, size, wraps=wraps, one_way=one_way))
    assert transpose.busiest_link_bytes == pytest.approx(
        link_bytes("all_to_all", 1.0, size, wraps=wraps, one_way=one_way)
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_that_splits_its_last_hop_needs_the_exact_factor(size: int) -> None:
    """The books' V/W is floor(N/2) whole shards; half each way in the last hop gives (N-1)/N V/W."""
    links = 2 if size > 2 else 1
    done = simulate_collective(AG, 1.0, ring_grid((size,)), split=True)
    assert done.busiest_link_bytes == pytest.approx((size - 1) / size / links)


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_transposes_in_the_time_of_its_busiest_link(size: int) -> None:
    """All links are equally busy in every step, so steps cost nothing; the first step has the most."""
    done = simulate_collective(A2A, 1.0, ring_grid((size,)))
    assert done.time_s(1.0, 0.0) == pytest.approx(done.busiest_link_bytes)
    assert done.num_steps == size // 2


@pytest.mark.parametrize("size", SIZES)
def test_a_line_transposes_at_the_pace_of_its_middle_link(size: int) -> None:
    """One chunk on a link in each step, the farthest first: floor(N^2/4) steps, no more than the middle link needs."""
    done = simulate_collective(A2A, float(size * size), ring_grid((size,), False), capacity=1, split=False)
    assert done.num_steps == done.busiest_link_bytes == size * size // 4


@pytest.mark.parametrize("size", [4, 8, 16])
def test_chunks_of_an_all_to_all_in_both_directions_equal_s3(size: int) -> None:
    """S3, C.4: N/2 + ... + 1 to the right, (N/2 - 1) + ... + 1 to the left; 10 and 6 for 8."""
    done = simulate_collective(A2A, float(size * size), ring_grid((size,)), split=False)
    chunks = all_to_all_chunks(size)
    assert done.link_bytes[0, 1] == chunks.right
    assert done.link_bytes[1, 0] == chunks.left


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("wraps", WRAPS)
def test_all_to_all_over_several_axes_equals_s2(shape: tuple[int, ...], wraps: bool) -> None:
    """S2: the longest axis sets the pace; hops are those of all axes."""
    done = simulate_collective(A2A, 1.0, ring_grid(shape, wraps))
    report = axes_report("all_to_all", 1.0, torus_of_axes(shape, 2.0, wraps=wraps, hop_latency_s=1e-9))
    assert done.busiest_link_bytes == pytest.approx(report.bandwidth_s)
    assert done.num_steps == report.hops


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("wraps", WRAPS)
@pytest.mark.parametrize("kind", [AG, RS])
def test_gathers_over_several_axes_are_near_the_closed_form(
    shape: tuple[int, ...], wraps: bool, kind: CollectiveKind
) -> None:
    """No schedule beats the closed form by more than the last hop of a ring; on equal lines it is met."""
    done = simulate_collective(kind, 1.0, ring_grid(shape, wraps), split=True)
    report = axes_report(OPERATION[kind], 1.0, torus_of_axes(shape, 2.0, wraps=wraps, hop_latency_s=1e-9))
    count = done.grid.num_devices
    assert done.num_steps == report.hops
    assert done.busiest_link_bytes >= report.bandwidth_s * (1 - 1 / count) - 1e-12
    if len(set(shape)) == 1 and (not wraps or shape[0] % 2):
        assert done.time_s(1.0, 0.0) == pytest.approx(report.bandwidth_s)
    if shape == (4, 4) and wraps:
        assert done.busiest_link_bytes == pytest.approx(15 / 16 / 4)


def test_the_simulator_detects_faulty_schedules() -> None:
    """Schedules that send between devices without a link, send an absent piece, or send a piece twice."""
    good = simulate_collective(AG, 1.0, ring_grid((4,)))
    first, *later = good.steps
    stranger = HopMessage(0, 2, ShardPiece(0, 0, 0), True)
    absent = HopMessage(0, 1, ShardPiece(3, 3, 0), True)
    for steps, fault in (
        ((*good.steps, (stranger,)), "no such link"),
        (((absent, *first), *later), "not there"),
        ((first, first, *later), "there already"),
    ):
        with pytest.raises(AssertionError, match=fault):
            list(dataclasses.replace(good, steps=steps).states())
    assert list(good.states()) == list(good.states())


def test_states_of_a_reduction_count_the_summands() -> None:
    """S1, ring all-reduce: after N-1 steps one way each device has one whole shard, after N-1 more all."""
    done = simulate_collective(AR, 1.0, ring_grid((5,), one_way=True))
    states = list(done.states())
    assert done.num_steps == 8
    assert all(len(state) == 5 for state in states)
    assert [sorted(len(summands) for summands in state.values()) for state in states[4]] == [[5]] * 5
    assert all(sorted(map(len, state.values())) == [5] * 5 for state in states[8])
    assert done.received_bytes == pytest.approx((2 * 4 / 5,) * 5)


@pytest.mark.parametrize(
    ("kind", "shape", "wraps", "parts"),
    [
        (CollectiveKind.PERMUTE, (4,), True, ["permute", "all_gather"]),
        (AG, (2, 2, 2, 2), True, ["1 to 3 axes"]),
        (AG, (0,), True, ["at least 1 device"]),
        (AG, (4, 4), (True,), ["1 wraps for 2 axes"]),
    ],
)
def test_invalid_input_is_refused(
    kind: CollectiveKind, shape: tuple[int, ...], wraps: tuple[bool, ...] | bool, parts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        simulate_collective(kind, 1.0, ring_grid(shape, wraps))
    assert all(part in str(caught.value) for part in parts)


def test_invalid_bytes_and_capacities_are_refused() -> None:
    with pytest.raises(InputError, match="more than 0"):
        simulate_collective(AG, 0.0, ring_grid((4,)))
    with pytest.raises(InputError, match="capacity of 0"):
        simulate_collective(A2A, 1.0, ring_grid((4,)), capacity=0)


def device_cells(frame: tuple[str, list[Cell]], device: int) -> list[Cell]:
    """The cells of a device."""
    return [cell for cell in frame[1] if cell.column == device]


def test_frames_mark_received_pieces() -> None:
    """AllGather on a ring of 4: own shard, both neighbours', then the opposite one."""
    titled_frames = list(frames(simulate_collective(AG, 1.0, ring_grid((4,)))))
    assert [title for title, _ in titled_frames] == ["start", "after step 1", "after step 2"]
    assert [[cell.row for cell in device_cells(frame, 0)] for frame in titled_frames] == [[0], [0, 1, 3], [0, 1, 2, 3]]
    assert [[cell.row for cell in device_cells(frame, 0) if cell.new] for frame in titled_frames] == [[], [1, 3], [2]]


def test_frames_of_a_reduction_and_an_all_to_all() -> None:
    reduced = list(frames(simulate_collective(RS, 1.0, ring_grid((4,), False))))
    assert [cell.lines for cell in device_cells(reduced[0], 0)] == [("1",)] * 4
    assert [(cell.row, cell.lines) for cell in device_cells(reduced[-1], 2)] == [(2, ("4",))]
    transposed = list(frames(simulate_collective(A2A, 1.0, ring_grid((2, 2)), split=False)))
    names = device_names(RingGrid((2, 2), (True, True)))
    assert [cell.lines for cell in device_cells(transposed[0], 1)] == [(f"0,1→{name}",) for name in names]
    arrived = [(f"series:{number}", (f"{name}→0,1",)) for number, name in enumerate(names)]
    assert [(cell.colour, cell.lines) for cell in device_cells(transposed[-1], 1)] == arrived


@pytest.mark.parametrize("kind", SIMULATED_KINDS)
def test_drawings_are_deterministic(kind: CollectiveKind) -> None:
    def to_svg(done: CollectiveSimulation) -> str:
        return draw(strip_of(done)).svg()

    first = to_svg(simulate_collective(kind, 34e6, ring_grid((4, 2), (True, False))))
    assert first == to_svg(simulate_collective(kind, 34e6, ring_grid((4, 2), (True, False))))
    assert "34 MB over a ring of 4 and a line of 2" in first


def test_too_many_devices_are_not_drawn() -> None:
    with pytest.raises(InputError, match="at most 16"):
        strip_of(simulate_collective(AG, 1.0, ring_grid((17,))))
