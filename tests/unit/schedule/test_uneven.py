"""What uneven virtual stages add to a step, against the played list."""

from __future__ import annotations

import random

import pytest

from shardwise.pipeline.registry import build_actions, get_schedule
from shardwise.pipeline.timeline import Durations, play_actions
from shardwise.pipeline.uneven_stage_costs import EQUAL_THIRDS, NO_UNEVEN_BUBBLE, uneven_bubble, uneven_in_flight


def played(schedule: str, sizes: tuple[int, ...], p: int, m: int) -> float:
    """Its makespan in micro-batches of the fullest rank."""
    most = max(sum(sizes[rank::p]) for rank in range(p))
    seconds = tuple(size / most / 3 for size in sizes)
    durations = Durations(forward=seconds, input=seconds, weight=seconds)
    return play_actions(build_actions(schedule, p, m, len(sizes) // p), durations).makespan


@pytest.mark.parametrize(
    ("schedule", "limit"),
    [("interleaved", 1e-9), ("looped_bfs", 0.03), ("interleaved_breadth_first", 0.05), ("interleaved_zb", 0.003)],
)
@pytest.mark.parametrize("seed", range(12))
def test_the_line_is_that_of_the_played_list(schedule: str, limit: float, seed: int) -> None:
    """Of two and four micro-batches for each rank exactly; behind them within the limit, for with longer turns others wait."""
    draw = random.Random(seed)
    p, v = draw.choice((2, 4, 8)), draw.choice((2, 3, 4))
    sizes = (2, *(draw.choice((2, 2, 3)) for _ in range(p * v - 2)), 2)
    found = uneven_bubble(schedule, sizes, p)
    for times, off in ((2, 1e-9), (4, 1e-9), (8, limit)):
        m = times * p
        line = m + get_schedule(schedule).bubble_s(p, v, m, EQUAL_THIRDS) + found.fixed + found.per_micro_batch * m
        assert line == pytest.approx(played(schedule, sizes, p, m), rel=off)


def test_llama_3_405b_on_16_ranks() -> None:
    """With 7 virtual stages of one or two layers a step of 128 micro-batches is 11% longer than its slowest rank computes, with 8
    of one layer each 1.5%: played of all ranks, the embedding and the head beside."""
    seven = (1, *[2] * 16, *[1] * 95)
    assert played("interleaved", seven, 16, 128) / 128 == pytest.approx(1.11, abs=0.005)
    line = 128 + 15 / 7 + uneven_bubble("interleaved", seven, 16).for_micro_batches(128)
    assert line / 128 == pytest.approx(1.11, abs=0.03)
    assert uneven_bubble("interleaved", (0, *[1] * 126, 0), 16) == NO_UNEVEN_BUBBLE


@pytest.mark.parametrize(
    ("layers", "p"), [((4,), 1), ((7, 9, 9, 7), 4), ((1, 2, 2, 1), 2), ((2, 2, 2, 2), 2), ((3, 3, 3, 3, 3, 2), 2)]
)
def test_even_virtual_stages_add_nothing(layers: tuple[int, ...], p: int) -> None:
    """One for each rank, however uneven: the closed form of the slowest bounds it. Nor do ends with a layer less."""
    assert uneven_bubble("interleaved", layers, p) == NO_UNEVEN_BUBBLE


def test_of_more_ranks_some_are_played() -> None:
    sizes = (1, *[2] * 32, *[1] * 63)
    found, whole = uneven_bubble("interleaved", sizes, 32), played("interleaved", sizes, 32, 128)
    assert 128 + 31 / 3 + found.for_micro_batches(128) == pytest.approx(whole, rel=0.05)


def test_what_ranks_hold_by_hand() -> None:
    """Two ranks of two virtual stages, the first of which has two layers and the second one. Rank 0 holds 2 + 2 + 1 + 1 + 2 when
    it starts backward, and 9 when a forward pass of its first follows a backward pass of its second. Rank 1 holds 2 + 2 + 1, and
    6 likewise. Of virtual stages of a layer and a half they would hold five and three."""
    assert uneven_in_flight("interleaved", (2, 2, 1, 1), 2) == pytest.approx((9 / 7.5, 6 / 4.5))


@pytest.mark.parametrize("layers", [(2, 2, 2, 2), (3, 1)])
def test_nothing_more_is_held_of_stages_that_are_alike(layers: tuple[int, ...]) -> None:
    assert uneven_in_flight("interleaved", layers, 2) == (1.0, 1.0)


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_zb", "looped_bfs"])
def test_micro_batches_do_not_change_how_many_times_as_much_is_held(schedule: str) -> None:
    layers = (1, *[2] * 16, *[1] * 7)
    found = uneven_in_flight(schedule, layers, 8)
    form, most = get_schedule(schedule), 0
    for m in (32, 64):
        slots = build_actions(schedule, 8, m, 3).order[1]
        held = most = 0
        for action in (action for slot in slots for action in slot):
            held += layers[action.stage] * {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        assert found[1] * form.in_flight(8, 3, m, 1) * 5 == pytest.approx(most)


def test_a_rank_holds_more_of_the_nearer_of_two_copies_by_hand() -> None:
    """Four ranks from both ends: rank 0 holds 4 of stage 0 and 1 of stage 3, 14 layers, not 5 times two and a half."""
    assert uneven_in_flight("dualpipe", (3, 2, 2, 2), 4) == pytest.approx((14 / 12.5, 1.0, 1.0, 14 / 12.5))
    assert (
        uneven_in_flight("dualpipe", (3, 2, 2, 3), 4)
        == uneven_in_flight("1f1b", (3, 2, 2, 2), 4)
        == (1.0, 1.0, 1.0, 1.0)
    )
