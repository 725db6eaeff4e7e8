"""Schedules of the global batch: their text forms, and the batch of every step, against a loop over samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.batch_size.batch_schedule import (
    BatchRamp,
    LinearBatches,
    NoiseScaleBatches,
    PhasedBatches,
    parse_batch_schedule,
    ramp_from_phases,
    steps_per_phase,
)
from shardwise.values.errors import InputError

SEQ = 4
PHASES = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9)), max_size=5, unique_by=lambda phase: phase[0]).map(
    lambda later: [(0, 3 * SEQ), *((start, seqs * SEQ) for start, seqs in sorted(later))]
)


def batches(phases: list[tuple[int, int]], num_steps: int) -> list[int]:
    """Tokens of each step's batch, step by step: that of the last phase whose tokens have been seen."""
    tokens_per_step, seen_tokens = [], 0
    for _ in range(num_steps):
        tokens_per_step.append(next(batch for start, batch in reversed(phases) if start <= seen_tokens))
        seen_tokens += tokens_per_step[-1]
    return tokens_per_step


@given(phases=PHASES)
def test_each_step_has_the_batch_of_the_tokens_before_it(phases: list[tuple[int, int]]) -> None:
    ramp = ramp_from_phases(phases, SEQ)
    assert [ramp.sequences(step) * SEQ for step in range(200)] == batches(phases, 200)


@given(phases=PHASES, step=st.integers(0, 60))
def test_a_resumed_run_has_the_batches_of_an_uninterrupted_run(phases: list[tuple[int, int]], step: int) -> None:
    uninterrupted = ramp_from_phases(phases, SEQ)
    resumed = ramp_from_phases(phases, SEQ, uninterrupted.until(step), step)
    assert [resumed.sequences(index) for index in range(200)] == [
        uninterrupted.sequences(index) for index in range(200)
    ]


@given(phases=PHASES, new_phases=PHASES, step=st.integers(1, 60))
def test_another_schedule_takes_over_at_the_next_sample(
    phases: list[tuple[int, int]], new_phases: list[tuple[int, int]], step: int
) -> None:
    before = ramp_from_phases(phases, SEQ)
    after = ramp_from_phases(new_phases, SEQ, before.until(step), step)
    assert after.first_sample(step) == before.first_sample(step)
    seen_tokens = before.first_sample(step) * SEQ
    assert after.sequences(step) * SEQ == next(batch for start, batch in reversed(new_phases) if start <= seen_tokens)


@given(phases=PHASES, tokens=st.integers(1, 3000))
def test_the_steps_of_a_run_use_all_tokens(phases: list[tuple[int, int]], tokens: int) -> None:
    phase_steps = steps_per_phase(phases, tokens, SEQ)
    assert sum(batch * count for batch, count in phase_steps) == pytest.approx(tokens)
    tokens_per_step = [batch for batch, count in phase_steps for _ in range(math.ceil(count))]
    assert tokens_per_step == batches(phases, len(tokens_per_step))


def megatron_batch(start: int, increment: int, samples: int, last: int, consumed: int) -> int:
    """The batch by Megatron-Core's RampupBatchsizeNumMicroBatchesCalculator (update), in sequences."""
    if samples == 0 or consumed > samples:
        return last
    per_increment = samples / ((last - start) // increment)
    return start + int(consumed / per_increment) * increment


@pytest.mark.parametrize(
    ("start", "increment", "samples", "last"),
    [(3072, 1536, 114_501_953, 15360), (32, 32, 65_536_000 // 32, 1536), (16, 8, 1000, 64)],
    ids=["DeepSeek-V3's 469B tokens at 4096", "GPT-3's 12B tokens at 2048, a 32nd", "small"],
)
def test_a_linear_ramp_equals_megatrons(start: int, increment: int, samples: int, last: int) -> None:
    ramp = ramp_from_phases(LinearBatches(first=start, increment=increment, over=samples).resolve(last, 1).phases, 1)
    step, consumed = 0, 0
    while consumed <= samples + 2 * last:
        assert ramp.sequences(step) == megatron_batch(start, increment, samples, last, consumed)
        consumed, step = consumed + ramp.sequences(step), step + 1
    assert ramp.first_sample(step) == consumed
    assert ramp.values[-1][1] == last


def test_the_ramp_of_deepseek_v3_is_built_in_tokens() -> None:
    """3072 to 15360 sequences of 4096 over 469B tokens (DeepSeek-AI 2025, section 4.2): 12.6M to 62.9M tokens."""
    schedule = parse_batch_schedule("linear:from=12Mi,by=6Mi,over=469G").resolve(15360 * 4096, 1)
    assert isinstance(schedule, PhasedBatches)
    assert (schedule.phases[0], schedule.phases[-1]) == ((0, 12_582_912), (469_000_000_000, 62_914_560))
    count, batch = len(schedule.phases) - 1, 12_582_912
    # the mean batch of the ramp, each held for as many tokens: steps are those of the harmonic mean
    exact = sum(469e9 / count / (batch + k * 6 * 2**20) for k in range(count))
    steps = ramp_from_phases(schedule.phases, 4096).values[-1][0]
    assert exact <= steps <= exact + count


def test_batches_by_noise_scale_stay_within_limits_and_increments() -> None:
    schedule = parse_batch_schedule("noise:lambda=1M,from=8Ki,to=60000,by=1Ki")
    settled = schedule.resolve(2**20, 2048)
    assert isinstance(settled, NoiseScaleBatches)
    for noise in (0.0, 1.0, 900.0, 1e3, 1e4, 1e6, math.inf):
        batch = settled.batch(noise)
        assert 8192 <= batch <= 60_000
        assert batch % 1024 == 0
        if 8192**2 < 1e6 * noise < 59_000**2:
            assert abs(batch - math.sqrt(1e6 * noise)) <= 512


def test_defaults_of_a_noise_scale_schedule_come_from_the_plan() -> None:
    schedule = parse_batch_schedule("noise:lambda=1M").resolve(65536, 2048)
    assert schedule == NoiseScaleBatches(exchange_tokens=1e6, smallest=2048, largest=65536, increment=2048, every=100)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("much", "found 'much'"),
        ("0:4Ki,8Ki", "TOKENS:BATCH,... is required"),
        ("100:4Ki", "found phases from 100 tokens on; the first from 0"),
        ("0:4Ki,5:8Ki,5:16Ki", "each later than the one before"),
        ("0:4Ki,1000:0", "found '0'; a whole number of at least 1"),
        ("liner:from=1", "did you mean 'linear'?"),
        ("linear:from=4Ki,by=4Ki", "linear has no over"),
        ("linear:from=4Ki,by=4Ki,until=9", "found 'until=9' for linear; from=N, by=N, over=N, to=N is known"),
        ("noise:from=4Ki", "noise has no lambda"),
        ("noise:lambda=0", "found lambda=0; a number of tokens above 0"),
        ("noise:lambda=1M,from=8Ki,to=4Ki", "found from=8,192 to=4,096; from at most to"),
    ],
)
def test_an_invalid_schedule_is_refused(text: str, part: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_batch_schedule(text)
    assert part in str(caught.value)
    assert "--batch-schedule" in str(caught.value)


def test_increments_that_lead_past_the_last_batch_are_refused() -> None:
    with pytest.raises(
        InputError, match="found from=4,096 by=3,000 to a batch of 10,240 tokens; a larger batch at the end"
    ):
        LinearBatches(first=4096, increment=3000, over=10).resolve(10240, 1)
    with pytest.raises(InputError, match="a larger batch at the end"):
        LinearBatches(first=4096, increment=1024, over=10).resolve(4096, 1)


def test_a_batch_of_partial_sequences_is_refused_with_the_nearest_valid_one() -> None:
    with pytest.raises(InputError, match="a batch of 5,000 tokens is not a whole number of sequences of 1,024; the nearest are "
                       "4,096 and 5,120"):  # fmt: skip
        ramp_from_phases([(0, 5000)], 1024)
    with pytest.raises(InputError, match="the smallest is 1,024 tokens"):
        ramp_from_phases([(0, 1000)], 1024)


def test_a_ramp_can_be_cut_at_a_step_and_extended() -> None:
    ramp = BatchRamp(((0, 2), (3, 4), (7, 8)))
    assert [ramp.until(step).values[-1] for step in (0, 2, 3, 6, 7, 8)] == [
        (0, 2),
        (0, 2),
        (3, 4),
        (3, 4),
        (7, 8),
        (7, 8),
    ]
    assert ramp.then(5, 4).values == ((0, 2), (3, 4))
    assert ramp.then(0, 9).values == ((0, 9),)
