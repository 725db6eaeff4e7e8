"""Schedules played pass by pass: idle time and micro-batches in flight, against the closed forms of their sources."""

from __future__ import annotations

import itertools

import pytest

from shardwise.pipeline.clock import check_actions
from shardwise.pipeline.registry import ALL_SCHEDULES, OrderOptions, build_actions, find_problems, get_schedule
from shardwise.pipeline.schedule_definition import PassSeconds
from shardwise.pipeline.timeline import AWAITING_CHANGE, SAVED_CHANGE, Durations, PassTimes, Timeline, play_actions

PASSES = [
    (2, 1.0, 1.0, 1.0),
    (4, 1.0, 1.0, 1.0),
    (4, 1.0, 1.2, 0.8),
    (8, 1.0, 1.5, 0.6),
    (8, 1.0, 1.2, 1.0),
    (6, 2.0, 2.0, 1.0),
]


def play_schedule(schedule: str, p: int, m: int, v: int = 1, **seconds: float) -> Timeline:
    actions = build_actions(schedule, p, m, v)
    check_actions(actions)
    times = PassTimes(**{f"{name}_s": value for name, value in seconds.items()})
    return play_actions(actions, Durations.even(actions.num_stages, actions.num_virtual_stages, times))


@pytest.mark.parametrize("schedule", ["afab", "1f1b", "zb_h1", "zb_h2"])
@pytest.mark.parametrize(("pp", "forward", "input_", "weight"), PASSES)
@pytest.mark.parametrize("more", [0, 1, 7])
def test_idle_time_of_stages_equals_the_closed_form(
    schedule: str, pp: int, forward: float, input_: float, weight: float, more: int
) -> None:
    """From a stage's first pass to its last: the first stage waits longest. A step ends where its stage ends."""
    form = get_schedule(schedule)
    m = max(form.min_micro_batches(pp, 1), pp) + more
    line = play_schedule(schedule, pp, m, forward=forward, input=input_, weight=weight)
    expected = form.bubble_s(pp, 1, m, PassSeconds(forward, input_ + weight, weight))
    assert max(line.waits()) == pytest.approx(expected, abs=1e-9)
    for stage in range(pp):
        assert line.peak_activations[stage] == form.in_flight(pp, 1, m, stage)
        # beside the one that is being worked on
        assert max(line.peak_waiting[stage] - 1, 0) == form.num_awaiting_weight_grads(pp, 1, m, stage)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
def test_too_few_micro_batches_wait_longer_than_the_closed_form(schedule: str) -> None:
    """Too few micro-batches cut the warm-up short, so the closed forms require a minimum."""
    form = get_schedule(schedule)
    fewest = int(form.min_micro_batches(4, 1))
    waits = [play_schedule(schedule, 4, m).waits()[0] for m in (fewest, fewest - 2)]
    assert waits[0] == form.bubble_s(4, 1, fewest, PassSeconds(1.0, 2.0, 1.0)) < waits[1]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("backward", [2.0, 1.0, 3.5])
def test_bubble_and_memory_of_whole_passes_equal_the_closed_forms(p: int, v: int, rounds: int, backward: float) -> None:
    """S1: idle over ideal time is (p - 1) / (v m); p are in flight, and with interleaved stages p (1 + (p - 1) / (p v))."""
    m = p * rounds
    interleaved_schedules = ("interleaved", "looped_bfs", "interleaved_breadth_first")
    for schedule in interleaved_schedules if v > 1 else ("1f1b", "afab"):
        line = play_schedule(schedule, p, m, v, forward=1.0, input=backward / 2, weight=backward / 2)
        form = get_schedule(schedule)
        assert line.bubble == pytest.approx((p - 1) / (v * m))
        assert line.makespan == pytest.approx(m * (1 + backward) + form.bubble_s(p, v, m, PassSeconds(1.0, backward)))
        assert line.peak_activations == pytest.approx([form.in_flight(p, v, m, stage) for stage in range(p)])


@pytest.mark.parametrize("schedule", ["looped_bfs", "interleaved_breadth_first"])
@pytest.mark.parametrize("m", range(1, 9))
def test_breadth_first_waits_longer_with_fewer_micro_batches_than_stages(schedule: str, m: int) -> None:
    form, line = get_schedule(schedule), play_schedule(schedule, 4, m, 2)
    expected = form.bubble_s(4, 2, m, PassSeconds(1.0, 2.0))
    assert (line.makespan - 3.0 * m == pytest.approx(expected)) == (m >= form.min_micro_batches(4, 2))
    assert line.peak_activations == tuple(form.in_flight(4, 2, m, rank) for rank in range(4)) or m < 4


def test_the_naive_schedule_runs_a_single_stage_at_a_time() -> None:
    """S1: the bubble of a pipeline that takes one micro-batch at a time is p - 1."""
    for p, m in ((4, 1), (4, 8), (8, 3)):
        line = play_schedule("naive", p, m)
        assert line.bubble == p - 1
        assert line.idle_fraction == pytest.approx(1 - 1 / p)
        assert line.peak_activations == (1.0,) * p


@pytest.mark.parametrize("pp", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("more", [0, 2, 20])
@pytest.mark.parametrize("pair_s", [3.0, 2.6])
def test_idle_time_of_dualpipe_equals_the_closed_form(pp: int, more: int, pair_s: float) -> None:
    """On the middle ranks, for F, the input's part of B and W of one second each; other ranks wait no longer."""
    form = get_schedule("dualpipe")
    m = 2 * pp + more
    line = play_schedule("dualpipe", pp, m, overlapped=pair_s)
    expected = form.bubble_s(pp, 1, m, PassSeconds(1.0, 2.0, 1.0, pair_s))
    assert max(line.idle()) <= expected + 1e-9
    for middle in (pp // 2 - 1, pp // 2):
        assert sum(len(slot) == 2 for slot in line.actions.order[middle]) == form.num_overlapped(pp, 1, m)
        assert line.idle()[middle] == pytest.approx(expected, abs=1e-9)
    for rank in range(pp):
        assert line.peak_activations[rank] == form.in_flight(pp, 1, m, rank) == pp + 1
        assert line.peak_waiting[rank] == form.num_awaiting_weight_grads(pp, 1, m, rank)


def test_dualpipe_waits_no_longer_where_weight_gradients_are_short() -> None:
    line = play_schedule("dualpipe", 8, 24, input=1.4, weight=0.8, overlapped=2.6)
    assert 0 < max(line.idle()) < get_schedule("dualpipe").bubble_s(8, 1, 24, PassSeconds(1.0, 2.2, 0.8, 2.6))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 9])
@pytest.mark.parametrize("pair_s", [3.0, 2.6])
def test_dualpipe_v_equals_dualpipe_of_twice_the_ranks(p: int, more: int, pair_s: float) -> None:
    """(p - 1) (F&B + B - 3W) of one of its 2p stages, and 2p + 1 of these held: the table of the published implementation."""
    m = 2 * p + more
    line = play_schedule("dualpipe_v", p, m, 2, overlapped=pair_s)
    twice = play_schedule("dualpipe", 2 * p, 2 * m, overlapped=pair_s)
    expected = (p - 1) * (pair_s + 2.0 - 3.0) / 2
    assert max(line.idle()) == pytest.approx(max(twice.idle()) / 2) == pytest.approx(expected, abs=1e-9)
    assert line.peak_activations == (p + 0.5,) * p
    kinds = [[[action.kind for action in slot] for slot in slots] for slots in line.actions.order]
    assert kinds == [[[action.kind for action in slot] for slot in slots] for slots in twice.actions.order[:p]]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_zb_v_waits_for_nothing_with_the_memory_of_1f1b(p: int, more: int) -> None:
    """Qi et al. 2023, section 6: where F, I and W take alike, no rank waits between its first pass and its last."""
    line = play_schedule("zb_v", p, 2 * p - 1 + more, 2)
    assert line.local_bubble == pytest.approx(0.0, abs=1e-9)
    assert line.makespan == pytest.approx(3.0 * (2 * p - 1 + more) + (p - 1) / 2)
    assert max(line.peak_activations) == p


# I and W in F: as transformers have them, with full recomputation (a long I), and over long sequences (a short W).
V_PASSES = [(1.0, 1.0), (0.8, 0.6), (0.8, 1.2), (1.2, 0.6), (1.6, 0.6), (1.6, 1.2), (2.1, 1.0), (0.9, 0.2), (3.0, 0.4)]


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v"])
@pytest.mark.parametrize(("input_", "weight"), V_PASSES)
@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_a_step_of_a_v_schedule_equals_its_closed_form(schedule: str, p: int, input_: float, weight: float) -> None:
    """The micro-batches of a rank, those in pairs together, and the bubble: no rank waits less."""
    form, passes_s = get_schedule(schedule), 1.0 + input_ + weight
    for m, pair_s in ((2 * p, passes_s), (2 * p + 1, 0.85 * passes_s), (2 * p + 9, 0.95 * passes_s)):
        line = play_schedule(schedule, p, m, 2, forward=1.0, input=input_, weight=weight, overlapped=pair_s)
        paired = form.num_overlapped(p, 2, m)
        work = (m - paired) * passes_s + paired * pair_s
        bubble = form.bubble_s(p, 2, m, PassSeconds(1.0, input_ + weight, weight, pair_s))
        assert line.makespan == pytest.approx(work + bubble, rel=1e-12)
        assert sum(len(slot) == 2 for slot in line.actions.order[-1]) == 2 * paired
        assert line.peak_activations == (form.in_flight(p, 2, m, 0),) * p
        # ZB-V has another micro-batch in progress
        waiting = [peak - 0.5 * (schedule == "zb_v") for peak in line.peak_waiting]
        assert waiting == [form.num_awaiting_weight_grads(p, 2, m, rank) for rank in range(p)]


@pytest.mark.parametrize(("input_", "weight"), V_PASSES)
@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_zb_v_of_few_micro_batches_equals_its_closed_form(p: int, input_: float, weight: float) -> None:
    """From 1 to 2p - 1 micro-batches, after which nothing changes; those that await W are at most the closed form's."""
    form, passes_s = get_schedule("zb_v"), 1.0 + input_ + weight
    for m in range(1, 2 * p):
        line = play_schedule("zb_v", p, m, 2, forward=1.0, input=input_, weight=weight)
        bubble = form.bubble_s(p, 2, m, PassSeconds(1.0, input_ + weight, weight))
        assert line.makespan == pytest.approx(m * passes_s + bubble, rel=1e-12)
        assert line.peak_activations == tuple(form.in_flight(p, 2, m, rank) for rank in range(p))
        assert all(
            peak - 0.5 <= form.num_awaiting_weight_grads(p, 2, m, rank) for rank, peak in enumerate(line.peak_waiting)
        )
    passes = PassSeconds(1.0, input_ + weight, weight)
    assert form.bubble_s(p, 2, 2 * p - 1, passes) == pytest.approx(form.bubble_s(p, 2, 10_000, passes))


def test_unequal_passes_of_a_v_schedule_take_little_longer_than_the_closed_form() -> None:
    for schedule in ("zb_v", "dualpipe_v"):
        form = get_schedule(schedule)
        for p, m in ((2, 4), (3, 6), (8, 16)) + ((2, 2), (3, 4), (8, 9)) * (schedule == "zb_v"):
            for input_, weight in itertools.product((0.8, 1.0, 1.5, 2.5, 4.0), (0.0, 0.1, 0.5, 1.0, 1.6, 2.0)):
                line = play_schedule(schedule, p, m, 2, forward=1.0, input=input_, weight=weight)
                passes_s = 1.0 + input_ + weight
                closed = m * passes_s + form.bubble_s(p, 2, m, PassSeconds(1.0, input_ + weight, weight, passes_s))
                assert -1e-12 <= line.makespan / closed - 1 <= (0.016 if m >= 2 * p else 0.035), (p, input_, weight)


@pytest.mark.parametrize("p", [2, 3, 4, 7])
@pytest.mark.parametrize("v", [2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_interleaved_zb_equals_its_closed_form(p: int, v: int, rounds: int) -> None:
    """For equal and unequal passes. Every rank has as many in flight as the first stage of 1F1B."""
    form, m = get_schedule("interleaved_zb"), rounds * p
    for input_, weight in itertools.product((0.3, 1.0, 1.5, 4.0), (0.0, 0.5, 1.0, 2.0, 4.0)):
        line = play_schedule("interleaved_zb", p, m, v, forward=1.0, input=input_, weight=weight)
        bubble = form.bubble_s(p, v, m, PassSeconds(1.0, input_ + weight, weight))
        assert line.makespan == pytest.approx(m * (1.0 + input_ + weight) + bubble, rel=1e-12)
    assert line.peak_activations == pytest.approx([p] * p) == [form.in_flight(p, v, m, rank) for rank in range(p)]
    # beside the one that is being worked on
    waiting = [form.num_awaiting_weight_grads(p, v, m, rank) for rank in range(p)]
    assert [peak - 1 / v for peak in line.peak_waiting] == pytest.approx(waiting)


def test_interleaved_zb_of_equal_passes_waits_for_the_last_rank_to_start() -> None:
    """ZB-H1's (p - 1) (F + B - 2W), of passes of a virtual stage; ZB-V's with two of them."""
    assert play_schedule("interleaved_zb", 4, 8, 3).makespan == pytest.approx(3 * 8 + 3 / 3)
    assert play_schedule("interleaved_zb", 4, 8, 2).makespan == pytest.approx(play_schedule("zb_v", 4, 8, 2).makespan)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 6), (4, 7), (8, 16)])
def test_the_automatic_order_of_equal_passes_is_that_of_zb_h2(p: int, m: int) -> None:
    """Within 1F1B's memory it takes as long as ZB-H1: as a layout's schedule it would be one of the two by another name."""
    assert build_actions("zb_auto", p, m).order == build_actions("zb_h2", p, m).order
    within = play_actions(build_actions("zb_auto", p, m, options=OrderOptions(memory_limit=1.0)))
    assert within.makespan == play_actions(build_actions("zb_h1", p, m)).makespan


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_placement_of_a_schedule_equals_that_of_its_list(name: str, p: int) -> None:
    for v in (1, 2, 3):
        m = 4 * p
        if not find_problems(name, p, m, v):
            assert build_actions(name, p, m, v).placement == ALL_SCHEDULES[name].placement(p, v)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 4), (4, 6), (8, 3), (8, 14)])
def test_zb_v_accepts_few_micro_batches(p: int, m: int) -> None:
    line = play_schedule("zb_v", p, m, 2)
    assert sum(len(slots) for slots in line.actions.order) == 6 * p * m
    assert line.local_bubble > 0


@pytest.mark.parametrize("size", [4, 6, 8, 12, 16])
def test_rounds_interpolate_between_depth_first_and_breadth_first(size: int) -> None:
    """Llama 3.1's tunable: micro-batches of a virtual stage in a row. The bubble stays; the number in flight grows with them."""
    actions = build_actions("interleaved", 4, 16, 3, options=OrderOptions(round_size=size))
    line = play_actions(actions)
    assert line.bubble == pytest.approx(3 / (3 * 16))
    assert line.peak_activations[0] == (2 * size + 2 * 3 + 1) / 3
    breadth = build_actions("interleaved_breadth_first", 4, 16, 3)
    assert (line.actions.order == breadth.order) == (size == 16)


def test_messages_lengthen_the_bubble_of_the_closed_form() -> None:
    """A message of 0.1 is on the way of each of 2 (p - 1) passes: the closed form, which has none, is under the played list."""
    without, with_messages = play_schedule("1f1b", 4, 8), play_schedule("1f1b", 4, 8, message=0.1)
    assert without.makespan == 33.0
    assert with_messages.makespan > without.makespan + 2 * 3 * 0.1 - 1e-9


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v", "zb_v"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 7), (4, 12), (6, 12), (8, 32)])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.5, 1.9, 2.5, 8.0])
def test_peaks_with_waiting_tensors_equal_those_of_the_list(schedule: str, p: int, m: int, ratio: float) -> None:
    """Bytes where W's inputs take `ratio` times the saved bytes: from the list's order, and by the moments of the closed form."""
    form, v = get_schedule(schedule), 1 if schedule == "dualpipe" else 2
    if m < form.min_micro_batches(p, v) or m % 2:
        m = max(form.min_micro_batches(p, v), m + 1)
    for rank, slots in enumerate(build_actions(schedule, p, m, v).order):
        saved, waiting, peak = 0, 0, 0.0
        for slot in slots:
            for kind, _, _ in slot:
                saved, waiting = saved + SAVED_CHANGE[kind], waiting + AWAITING_CHANGE[kind]
                peak = max(peak, saved + waiting * ratio)
        more = max(ratio - 1, 0.0)
        moments = (v * in_flight + more * (v * waits + 1) for in_flight, waits in form.other_peaks(p, v, m, rank))
        assert max(v * form.in_flight(p, v, m, rank), *moments) == pytest.approx(peak), rank
