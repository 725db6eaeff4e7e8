"""Time that uneven virtual stages add to a step, against the played list."""

from __future__ import annotations

import random

import pytest

from shardwise.pipeline.registry import build_actions, get_schedule
from shardwise.pipeline.timeline import Durations, play_actions
from shardwise.pipeline.uneven_stage_costs import EQUAL_THIRDS, NO_UNEVEN_BUBBLE, uneven_bubble, uneven_in_flight


def play_makespan(schedule: str, sizes: tuple[int, ...], p: int, m: int) -> float:
    """The makespan in micro-batches of the fullest rank."""
    fullest = max(sum(sizes[rank::p]) for rank in range(p))
    seconds = tuple(size / fullest / 3 for size in sizes)
    durations = Durations(forward=seconds, input=seconds, weight=seconds)
    return play_actions(build_actions(schedule, p, m, len(sizes) // p), durations).makespan


@pytest.mark.parametrize(
    ("schedule", "limit"),
    [("interleaved", 1e-9), ("looped_bfs", 0.03), ("interleaved_breadth_first", 0.05), ("interleaved_zb", 0.003)],
)
@pytest.mark.parametrize("seed", range(12))
def test_the_linear_model_equals_the_played_list(schedule: str, limit: float, seed: int) -> None:
    """With 2 and 4 micro-batches per rank exactly; with 8 within the limit, since other ranks wait in longer rounds."""
    draw = random.Random(seed)
    p, v = draw.choice((2, 4, 8)), draw.choice((2, 3, 4))
    sizes = (2, *(draw.choice((2, 2, 3)) for _ in range(p * v - 2)), 2)
    bubble = uneven_bubble(schedule, sizes, p)
    for times, tolerance in ((2, 1e-9), (4, 1e-9), (8, limit)):
        m = times * p
        line = m + get_schedule(schedule).bubble_s(p, v, m, EQUAL_THIRDS) + bubble.fixed + bubble.per_micro_batch * m
        assert line == pytest.approx(play_makespan(schedule, sizes, p, m), rel=tolerance)


def test_uneven_stages_of_llama_3_405b_on_16_ranks() -> None:
    """With 7 virtual stages of one or two layers a step of 128 micro-batches is 11% longer than its slowest rank computes, with 8
    of one layer each 1.5%: all ranks are played, with the embedding and the head."""
    seven = (1, *[2] * 16, *[1] * 95)
    assert play_makespan("interleaved", seven, 16, 128) / 128 == pytest.approx(1.11, abs=0.005)
    line = 128 + 15 / 7 + uneven_bubble("interleaved", seven, 16).for_micro_batches(128)
    assert line / 128 == pytest.approx(1.11, abs=0.03)
    assert uneven_bubble("interleaved", (0, *[1] * 126, 0), 16) == NO_UNEVEN_BUBBLE


@pytest.mark.parametrize(
    ("layers", "p"), [((4,), 1), ((7, 9, 9, 7), 4), ((1, 2, 2, 1), 2), ((2, 2, 2, 2), 2), ((3, 3, 3, 3, 3, 2), 2)]
)
def test_even_virtual_stages_add_nothing(layers: tuple[int, ...], p: int) -> None:
    """One for each rank, however uneven: the closed form of the slowest bounds it. Nor do ends with a layer less."""
    assert uneven_bubble("interleaved", layers, p) == NO_UNEVEN_BUBBLE


def test_a_sample_of_many_ranks_is_played() -> None:
    sizes = (1, *[2] * 32, *[1] * 63)
    bubble, makespan = uneven_bubble("interleaved", sizes, 32), play_makespan("interleaved", sizes, 32, 128)
    assert 128 + 31 / 3 + bubble.for_micro_batches(128) == pytest.approx(makespan, rel=0.05)


def test_layers_in_flight_by_hand() -> None:
    """Two ranks of two virtual stages with two layers and one. Rank 0 has 2 + 2 + 1 + 1 + 2 in flight when its first backward
    pass starts, and 9 when a forward pass of its first virtual stage follows a backward pass of its second. Rank 1 has 2 +
    2 + 1, and later 6. With virtual stages of one and a half layers they would have five and three."""
    assert uneven_in_flight("interleaved", (2, 2, 1, 1), 2) == pytest.approx((9 / 7.5, 6 / 4.5))


@pytest.mark.parametrize("layers", [(2, 2, 2, 2), (3, 1)])
def test_equal_stages_add_nothing_in_flight(layers: tuple[int, ...]) -> None:
    assert uneven_in_flight("interleaved", layers, 2) == (1.0, 1.0)


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_zb", "looped_bfs"])
def test_the_factor_in_flight_does_not_depend_on_micro_batches(schedule: str) -> None:
    layers = (1, *[2] * 16, *[1] * 7)
    factors = uneven_in_flight(schedule, layers, 8)
    form, peak = get_schedule(schedule), 0
    for m in (32, 64):
        slots = build_actions(schedule, 8, m, 3).order[1]
        in_flight = peak = 0
        for action in (action for slot in slots for action in slot):
            in_flight += layers[action.stage] * {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, in_flight)
        assert factors[1] * form.in_flight(8, 3, m, 1) * 5 == pytest.approx(peak)


def test_a_rank_keeps_more_of_the_nearer_of_two_copies_in_flight_by_hand() -> None:
    """Four ranks from both ends: rank 0 holds 4 of stage 0 and 1 of stage 3, 14 layers, not 5 times two and a half."""
    assert uneven_in_flight("dualpipe", (3, 2, 2, 2), 4) == pytest.approx((14 / 12.5, 1.0, 1.0, 14 / 12.5))
    assert (
        uneven_in_flight("dualpipe", (3, 2, 2, 3), 4)
        == uneven_in_flight("1f1b", (3, 2, 2, 2), 4)
        == (1.0, 1.0, 1.0, 1.0)
    )
