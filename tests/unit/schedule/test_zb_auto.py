"""The automatic zero-bubble scheduler against an exact solver, ZB-H1, ZB-H2 and its memory limit."""

from __future__ import annotations

import random

import pytest

from shardwise.pipeline import zero_bubble_search
from shardwise.pipeline.clock import check_actions
from shardwise.pipeline.registry import OrderOptions, build_actions
from shardwise.pipeline.timeline import Durations, PassTimes, Timeline, play_actions
from shardwise.pipeline.zero_bubble_search import BeamSearch, BeamState

from .exact import least_makespan

NUM_CASES = 200
WITHIN = 1.02  # of the least makespan


def automatic(p: int, m: int, durations: Durations, limit: int) -> Timeline:
    actions = build_actions("zb_auto", p, m, 1, durations, OrderOptions(limit / p))
    check_actions(actions)
    line = play_actions(actions, durations)
    assert max(line.peak_activations) <= limit
    return line


def uneven(draw: random.Random, p: int) -> Durations:
    """Quarters of a second, so that sums are exact."""

    def seconds(max_quarters: int) -> tuple[float, ...]:
        return tuple(draw.randint(1, max_quarters) / 4 for _ in range(p))

    return Durations(forward=seconds(8), input=seconds(8), weight=seconds(8), message=draw.randint(0, 4) / 4)


@pytest.mark.parametrize(
    ("durations", "bound"),
    [
        # the second rank's four F and I, then the first's last I and its W: 4 + 4 + 1 + 0.25; own work alone is 9
        (Durations(forward=(1.0, 1.0), input=(1.0, 1.0), weight=(0.25, 0.25)), 9.25),
        # the first rank's four F, the last one's F and I on the second with two messages, its I and W: 16 + 4 + 0.25 + 0.25
        (Durations(forward=(4.0, 1.0), input=(0.25, 1.0), weight=(0.25, 0.25), message=1.0), 20.5),
        # the work of one rank: four F, I and W
        (Durations(forward=(1.0, 1.0), input=(1.0, 1.0), weight=(3.0, 3.0)), 20.0),
    ],
)
def test_the_lower_bound_is_the_work_of_the_busiest_rank_and_what_must_follow(
    durations: Durations, bound: float
) -> None:
    beam = BeamSearch(2, 4, durations, 8)
    first = BeamState((0.0, 0.0), ((), ()), ((), ()), (0, 0), 0.0)
    assert beam.bound(first) == bound
    assert bound <= automatic(2, 4, durations, 8).makespan


def test_the_automatic_order_is_near_the_best_of_all_orders() -> None:
    draw = random.Random(2026)
    ratios = []
    for _ in range(NUM_CASES):
        p, m = draw.choice((2, 3)), draw.randint(2, 4)
        durations, limit = uneven(draw, p), draw.randint(1, 2 * p)
        makespan = automatic(p, m, durations, limit).makespan
        ratios.append(makespan / least_makespan(p, m, durations, limit, makespan))
    assert max(ratios) <= WITHIN


@pytest.mark.parametrize("seed", range(6))
def test_the_exact_solver_needs_no_known_makespan(seed: int) -> None:
    draw = random.Random(seed)
    durations = uneven(draw, 2)
    best = least_makespan(2, 3, durations, 2, float("inf"))
    assert best == least_makespan(2, 3, durations, 2, best + 0.25)
    assert best <= play_actions(build_actions("zb_h1", 2, 3), durations).makespan


def test_the_exact_solver_by_hand() -> None:
    """Two stages, one micro-batch: F F I I W in sequence, the second W beside them; two micro-batches with a limit of one:
    twice that."""
    even = Durations.even(2)
    assert least_makespan(2, 1, even, 1, float("inf")) == 5.0
    assert least_makespan(2, 2, even, 1, float("inf")) == 10.0
    assert least_makespan(2, 2, even, 2, float("inf")) == 7.0


@pytest.mark.parametrize("seed", range(12))
def test_the_automatic_order_is_never_worse_than_zb_h1_within_its_memory(seed: int) -> None:
    draw = random.Random(seed)
    p, m = draw.randint(2, 8), draw.randint(1, 24)
    durations = uneven(draw, p)
    assert automatic(p, m, durations, p).makespan <= play_actions(build_actions("zb_h1", p, m), durations).makespan
    assert automatic(p, m, durations, 2 * p).makespan <= play_actions(build_actions("zb_h2", p, m), durations).makespan


def test_twice_the_memory_leaves_no_bubble_with_equal_passes() -> None:
    """Qi et al. 2023, table 1; from a stage's first pass to its last."""
    line = automatic(4, 12, Durations.even(4), 8)
    assert line.local_bubble == pytest.approx(0.0, abs=1e-9)
    assert automatic(4, 12, Durations.even(4), 4).makespan == line.makespan == 36.0 + 3.0


def test_the_automatic_order_beats_zb_h1_with_unequal_passes() -> None:
    """Long messages and short weights' gradients: more passes ahead, as far as memory allows, wait for less."""
    durations = Durations.even(8, times=PassTimes(1.0, 1.2, 0.7, message_s=0.1))
    h1 = play_actions(build_actions("zb_h1", 8, 32), durations).makespan
    limits = [automatic(8, 32, durations, limit).makespan for limit in (4, 6, 8, 12, 16)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < h1 - 5.0


def test_a_low_memory_limit_is_kept() -> None:
    line = automatic(4, 8, Durations.even(4), 1)
    assert line.peak_activations == (1.0,) * 4


@pytest.mark.parametrize(("budget", "tried"), [(1, 3), (7, 7), (10**6, 36)])
def test_only_the_first_orders_of_a_large_pipeline_are_tried(
    budget: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least three, one for each least gap; if there is room for all, those of six slopes, with and without one more ahead."""
    p, m = 5, 60
    monkeypatch.setattr(zero_bubble_search, "FILL_BUDGET", budget * 3 * p * m)
    durations = Durations(forward=(1.0,) * p, input=(1.0,) * p, weight=(1.0,) * p, message=0.0)
    assert len(list(zero_bubble_search.gap_filling_orders(p, m, durations, max_in_flight=m))) == tried
