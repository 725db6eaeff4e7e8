"""First tokens at a concurrency against a simulation of passes."""

import dataclasses
from heapq import heapify, heappop, heappush

import numpy as np
import pytest

import shardwise as sw
from shardwise.serve import BatchLimits, ServingLayout, ServingProblem, Workload, estimate_serving
from shardwise.serve.first_tokens import Arrivals, queued_passes, wave_crowding

INPUT_S, DECODE_S = 0.2, 0.02


def play(concurrency: int, num_waves: int, spread: float, *, shares: bool, osl: int = 1000, seed: int = 0) -> float:
    """Return the mean time to first token of inputs that take a pass each, at fixed seconds per pass with and without inputs."""
    rng = np.random.default_rng(seed)
    lengths = np.round(osl * (1 - spread * rng.random(concurrency * num_waves))).astype(int)
    coming = [(0.0, index) for index in range(concurrency)]
    heapify(coming)
    now, next_index, waiting, remaining_tokens, first = 0.0, concurrency, [], {}, []
    while len(first) < len(lengths):
        while coming and coming[0][0] <= now:
            waiting.append(heappop(coming))
        if not waiting and not remaining_tokens:
            now = coming[0][0]
            continue
        started = waiting.pop(0) if waiting else None
        now += INPUT_S if started else DECODE_S
        if shares or not started:
            for index in list(remaining_tokens):
                remaining_tokens[index] -= 1
                if remaining_tokens[index] <= 0:
                    del remaining_tokens[index]
                    if next_index < len(lengths):
                        heappush(coming, (now + 1e-3, next_index))
                        next_index += 1
        if started:
            first.append(now - started[0])
            remaining_tokens[started[1]] = int(lengths[started[1]])
    return float(np.mean(first))


@pytest.mark.parametrize("concurrency", [16, 64])
def test_the_first_wave_dominates_the_mean_of_a_short_run(concurrency):
    later = play(concurrency, 40, 0.2, shares=True) * 40 / 39 - play(concurrency, 1, 0.2, shares=True) / 39
    share = 0.1
    predicted = share * INPUT_S * (concurrency + 1) / 2 + (1 - share) * later
    assert predicted == pytest.approx(play(concurrency, 10, 0.2, shares=True), rel=0.1)


def test_equal_requests_stay_together_where_inputs_have_priority():
    assert play(32, 4, 0.0, shares=False) == pytest.approx(INPUT_S * 33 / 2, rel=0.05)
    crowding, randomness = wave_crowding(np.array(0.0), 0.0)
    arrivals = Arrivals(life_passes=1000.0, crowding=crowding, randomness=randomness)
    assert arrivals.num_inputs(31.0) == pytest.approx(32.0)


def test_inputs_that_share_passes_take_turns():
    # With passes shared, a wave's inputs start one pass after the other, and so do their successors.
    assert play(32, 40, 0.0, shares=True) < 3 * INPUT_S
    crowding, randomness = wave_crowding(np.array(0.0), 32 / 1000)
    assert Arrivals(life_passes=1000.0, crowding=crowding, randomness=randomness).num_inputs(31.0) < 2.0
    assert queued_passes(0.95, randomness, 32.0) == 0.0


def test_polls_wait_half_an_interval_and_batches_for_their_first_token():
    polls = Arrivals(life_passes=1000.0, crowding=2.0, randomness=1.0, admission_passes=31.0, polls=True)
    holds = dataclasses.replace(polls, polls=False)
    assert polls.admission_wait(1.0) == 15.0
    assert holds.admission_wait(1.0) == 30.0
    assert holds.admission_wait(1e9) == pytest.approx(15.0)


def test_polls_delay_only_first_tokens():
    problem = ServingProblem(
        architecture=sw.load_model("deepseek-v3"), cluster=sw.load_cluster("b200:8"), engine="sglang",
        workload=Workload(isl=1024, osl=1024, concurrency=4),
    )  # fmt: skip
    rare = dataclasses.replace(problem, batch_limits=BatchLimits(admission_passes=30))
    often, seldom = (estimate_serving(p, ServingLayout(tp=8)) for p in (problem, rare))
    added = seldom.ttft_s.value - often.ttft_s.value
    assert added == pytest.approx(0.9 * 29 / 2 * often.decode_pass_s, rel=0.15)
    assert seldom.tpot_s.value == pytest.approx(often.tpot_s.value, rel=0.02)
