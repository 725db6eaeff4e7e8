"""The order of samples: permutations that are whole and unlike each other, ramps that count exactly."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.batch_size.batch_schedule import BatchRamp
from shardwise.run.data.sample_order import _mix, permute, sequence_numbers
from shardwise.values.errors import InputError

SEEDS = st.integers(-(2**70), 2**70)
RAMPS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=5).map(
    lambda spans: BatchRamp(
        tuple(zip(np.cumsum([0, *(n for n, _ in spans[1:])]).tolist(), (b for _, b in spans), strict=True))
    )
)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_takes_every_place_once(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(size=st.integers(1, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
def test_each_position_is_computed_independently(size: int, key: int, data: st.DataObject) -> None:
    """In any company, and of sizes that no list could hold."""
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5)))
    together = permute(places, size, key).tolist()
    assert together == [int(permute(places[i : i + 1], size, key)[0]) for i in range(len(places))]
    assert all(0 <= place < size for place in together)


def test_orders_of_four_are_uniform() -> None:
    """Chi-squared of 4,800 seeds over the 24 orders of four: below 49.7 in all but one of 1,000 such draws of a fair die."""
    counts = Counter(tuple(sequence_numbers(np.arange(4), 4, seed).tolist()) for seed in range(4800))
    assert counts.keys() == set(permutations(range(4)))
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 49.7


def test_orders_pass_tests_of_randomness() -> None:
    """Of 5,000: neighbours are no nearer than chance has it (5000/3 apart), and about one place keeps its own."""
    order = sequence_numbers(np.arange(5000), 5000, 7)
    assert np.abs(np.diff(order)).mean() == pytest.approx(5000 / 3, rel=0.05)
    assert (order == np.arange(5000)).sum() < 8
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05


@given(size=st.integers(2, 200), seed=SEEDS)
def test_every_epoch_takes_each_sequence_once_in_its_own_order(size: int, seed: int) -> None:
    epochs = sequence_numbers(np.arange(3 * size), size, seed).reshape(3, size)
    assert (np.sort(epochs, axis=1) == np.arange(size)).all()
    if size > 20:  # two of 20! orders: never alike
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
        assert epochs[0].tolist() != sequence_numbers(np.arange(size), size, seed + 1).tolist()


def test_without_a_seed_the_order_is_that_of_the_text() -> None:
    assert sequence_numbers(np.arange(7), 3, None).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_of_a_seed_never_changes() -> None:
    """A run that resumes with a later version goes on where it was: the order is a part of the format."""
    assert sequence_numbers(np.arange(12), 10, 1).tolist() == [5, 9, 2, 0, 1, 6, 7, 4, 3, 8, 2, 1]


def test_the_mixing_is_that_of_splitmix64() -> None:
    """The first two outputs of the generator from seed 1234567, as in the test vectors of Rosetta Code's task Splitmix64."""
    states = np.array([1234567, 1234567 + 0x9E3779B97F4A7C15], np.uint64)
    assert _mix(states).tolist() == [6457827717110365317, 3203168211198807973]


@given(ramp=RAMPS, step=st.integers(0, 120))
def test_a_ramp_counts_the_samples_of_every_step_before(ramp: BatchRamp, step: int) -> None:
    assert ramp.first_sample(step) == sum(ramp.sequences(before) for before in range(step))


def test_a_ramp_of_two_sizes() -> None:
    ramp = BatchRamp(((0, 64), (1000, 128)))
    assert [ramp.sequences(step) for step in (0, 999, 1000, 10**9)] == [64, 64, 128, 128]
    assert ramp.first_sample(1001) == 64_128


@pytest.mark.parametrize(
    "values", [(), ((1, 8),), ((0, 8), (0, 9)), ((0, 8), (5, 9), (4, 9)), ((0, 0),), ((0, 8), (3, -1))]
)
def test_an_invalid_ramp_is_refused(values: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InputError, match="batch: found"):
        BatchRamp(values)


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(InputError, match="found -1; a step of at least 0"):
        BatchRamp(((0, 8),)).first_sample(-1)
