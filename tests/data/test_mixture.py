"""Weighted mixtures: shares within one sample, each source in its own order, the same for any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.batch_size.batch_schedule import BatchRamp
from shardwise.run.data.batches import Batches
from shardwise.run.data.sample_order import Mixture
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.values.errors import InputError

Shards = Callable[..., TokenShards]
WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)
SIZES, SEQ_LEN = (31, 101, 7), 4  # tokens of each source
RAMP = BatchRamp(((0, 3), (2, 7), (5, 4)))


@pytest.fixture(scope="module")
def sources(shards_of: Shards) -> list[TokenShards]:
    """Three sources whose tokens differ: those of source i are 300·i and more."""
    return [
        shards_of([range(300 * number + 1, 300 * number + size + 1)], shard_tokens=20)
        for number, size in enumerate(SIZES)
    ]


@given(weights=WEIGHTS, start=st.integers(0, 500), count=st.integers(0, 500))
def test_shares_are_those_of_the_weights_within_rounding(weights: list[int], start: int, count: int) -> None:
    """Of the first samples less than one off; of any others, the difference of two such counts, less than two."""
    sources, _ = Mixture(weights).draw(np.arange(start + count))
    for source, weight in enumerate(weights):
        share = Fraction(weight, sum(weights))
        drawn = np.cumsum(sources == source).tolist()
        assert all(abs(num_drawn - share * number) < 1 for number, num_drawn in enumerate(drawn, start=1))
        assert abs(int((sources[start:] == source).sum()) - share * count) < 2


@given(weights=WEIGHTS, start=st.integers(0, 10**12), count=st.integers(1, 200))
def test_each_source_is_counted_through(weights: list[int], start: int, count: int) -> None:
    mixture = Mixture(weights)
    sources, positions = mixture.draw(np.arange(start, start + count))
    before, after = mixture.counts(start), mixture.counts(start + count)
    assert (sum(before), sum(after)) == (start, start + count)
    for source in range(len(weights)):
        assert positions[sources == source].tolist() == list(range(before[source], after[source]))


@pytest.mark.parametrize(
    ("weights", "num_draws"),
    [([0.7, 0.3], (7, 3)), ([0.1, 0.2, 0.3], (1, 2, 3)), ([2, 6], (1, 3)), ([1e-3, 0.999], (1, 999)), ([5.0], (1,))],
)
def test_weights_are_read_as_they_are_written(weights: Sequence[float], num_draws: tuple[int, ...]) -> None:
    mixture = Mixture(weights)
    assert mixture.num_draws == num_draws
    assert mixture.shares == pytest.approx(np.array(weights) / sum(weights))


def test_invalid_weights_are_refused() -> None:
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"weights: found {weight}; a number above 0 is required"):
            Mixture([1.0, weight])
    with pytest.raises(
        InputError, match="repeats after 1,000,000 samples; at most 100,000 is required: give shares of"
    ):
        Mixture([0.333333, 0.666667])


@given(
    step=st.integers(0, 40), num_replicas=st.integers(1, 5), micro_batch_seqs=st.integers(1, 4), seed=st.integers(0, 99),
    weights=st.tuples(*[st.integers(1, 9)] * 3),
)  # fmt: skip
def test_any_number_of_replicas_takes_the_same_mixture(
    sources: list[TokenShards], step: int, num_replicas: int, micro_batch_seqs: int, seed: int, weights: tuple[int, ...]
) -> None:
    """A step that is asked for first is the one that comes in its turn: nothing is kept between steps."""
    settings = {"seq_len": SEQ_LEN, "batch": RAMP, "seed": seed, "weights": weights}
    batches = Batches(sources, **settings)
    whole = [batches.batch(earlier_step) for earlier_step in range(step + 1)][-1]
    fresh = Batches(sources, **settings)
    parts = [list(fresh.sequences(step, replica, num_replicas, micro_batch_seqs)) for replica in range(num_replicas)]
    inputs = np.concatenate([np.concatenate([part.inputs_BT for part in micro]) for micro in zip(*parts, strict=True)])
    assert inputs.tolist() == whole.inputs_BT.tolist()
    assert fresh.num_targets(step) == RAMP.sequences(step) * SEQ_LEN == whole.num_targets


def test_each_source_is_passed_through_in_the_order_that_it_has_alone(sources: list[TokenShards]) -> None:
    batches = Batches(sources, seq_len=SEQ_LEN, batch=10, seed=3, weights=[0.5, 0.3, 0.2])
    rows = np.concatenate([batches.batch(step).inputs_BT for step in range(30)])
    for number, shards in enumerate(sources):
        source_rows = rows[rows[:, 0] // 300 == number]
        single_source = Batches(shards, seq_len=SEQ_LEN, batch=len(source_rows), seed=3)
        assert source_rows.tolist() == single_source.batch(0).inputs_BT.tolist()
    assert batches.epochs(30) == (150 / 7, 90 / 25, 60 / 1)


def test_documents_of_two_sources_have_numbers_of_their_own(shards_of: Shards) -> None:
    pair = [shards_of([[1, 0]] * 6), shards_of([[2, 0]] * 6)]
    batch = Batches(pair, seq_len=2, batch=10, ignore_boundaries=True).batch(0)
    assert sorted(batch.documents_BT[:, 0].tolist()) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert batch.num_targets == 10


def test_sources_of_different_tokenizers_are_refused(sources: list[TokenShards], shards_of: Shards) -> None:
    other_tokenizer = shards_of([range(1, 9)], tokenizer_sha256="a" * 64)
    with pytest.raises(InputError) as caught:
        Batches([sources[0], other_tokenizer], seq_len=SEQ_LEN, batch=1, weights=[1, -2])
    assert caught.value.problems == (
        "weights: found -2; a number above 0 is required",
        f"{other_tokenizer.folder}: its tokenizer's hash is aaaaaaaaaaaa; 000000000000 is required, that of {sources[0].folder}: "
        f"tokenize again with --tokenizer {sources[0].folder / 'tokenizer.json'}",
    )
