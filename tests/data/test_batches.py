"""What a step trains on: the same for any number of replicas, each sample once an epoch, from the step's number alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.batch_size.batch_schedule import BatchRamp
from shardwise.run.data.batches import IGNORE_INDEX, Batch, Batches
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.values.errors import InputError

Shards = Callable[..., TokenShards]
LENGTHS = [3, 1, 7, 2, 12, 5, 1, 1, 9, 4, 30, 2, 6, 8]  # of documents, the token that ends each included
NUM_TOKENS = sum(LENGTHS)
RAMP = BatchRamp(((0, 3), (2, 7), (5, 4)))


@pytest.fixture(scope="module")
def shards(shards_of: Shards) -> TokenShards:
    """Tokens that say where they are: token i is i + 1, but for the ends, which are 0."""
    tokens = np.arange(1, NUM_TOKENS + 1)
    ends = np.cumsum(LENGTHS)
    tokens[ends - 1] = 0
    return shards_of(np.split(tokens, ends[:-1]), shard_tokens=20)


def stack_batches(batches: list[Batch]) -> dict[str, list[object]]:
    """The rows of several batches, in order of their sequences and not of their batches."""
    names = Batch.__dataclass_fields__.keys() - {"begins_BN"}  # as wide as the fullest sequence of a batch needs it
    rows = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in names}
    order = np.argsort(rows["sequences_B"], kind="stable")
    return {name: values[order].tolist() for name, values in rows.items()}


@given(
    step=st.integers(0, 40), num_replicas=st.integers(1, 9), micro_batch_seqs=st.integers(1, 5), seed=st.integers(0, 99),
    seq_len=st.integers(1, 20), ignore=st.booleans(),
)  # fmt: skip
def test_any_number_of_replicas_takes_the_same_global_batch(
    shards: TokenShards, step: int, num_replicas: int, micro_batch_seqs: int, seed: int, seq_len: int, ignore: bool
) -> None:
    batches = Batches(shards, seq_len=seq_len, batch=RAMP, seed=seed, ignore_boundaries=ignore)
    whole = batches.batch(step)
    parts = [list(batches.sequences(step, replica, num_replicas, micro_batch_seqs)) for replica in range(num_replicas)]
    assert stack_batches([batch for part in parts for batch in part]) == stack_batches([whole])
    assert {len(part) for part in parts} == {batches.num_micro_batches(step, num_replicas, micro_batch_seqs)}
    assert max(len(batch.sequences_B) for part in parts for batch in part) <= micro_batch_seqs
    taken = [sum(len(batch.sequences_B) for batch in part) for part in parts]
    assert max(taken) == -(-batches.global_batch_seqs(step) // num_replicas), "the fullest replica, as plans price it"
    assert batches.num_targets(step) == whole.num_targets == sum(batch.num_targets for part in parts for batch in part)
    assert whole.inputs_BT.shape == whole.targets_BT.shape == whole.documents_BT.shape
    assert whole.inputs_BT.shape == (RAMP.sequences(step), seq_len)


@given(num_replicas=st.integers(1, 4), micro_batch_seqs=st.integers(1, 3), step=st.integers(0, 8))
def test_one_process_can_run_the_same_micro_batches(
    shards: TokenShards, num_replicas: int, micro_batch_seqs: int, step: int
) -> None:
    """Statistics of a micro-batch over all replicas, such as the balance of experts, need the same ones."""
    batches = Batches(shards, seq_len=4, batch=RAMP)
    single = batches.sequences(step, 0, 1, num_replicas * micro_batch_seqs)
    together = zip(
        *(batches.sequences(step, r, num_replicas, micro_batch_seqs) for r in range(num_replicas)), strict=True
    )
    for micro_batch, several in zip(single, together, strict=True):
        assert micro_batch.sequences_B.tolist() == np.concatenate([part.sequences_B for part in several]).tolist()


@given(seq_len=st.integers(1, 30), seed=st.one_of(st.none(), st.integers(0, 99)), batch=st.integers(1, 25))
def test_every_sample_comes_exactly_once_an_epoch(
    shards: TokenShards, seq_len: int, seed: int | None, batch: int
) -> None:
    batches = Batches(shards, seq_len=seq_len, batch=batch, seed=seed)
    size = batches.num_sequences
    steps = -(-2 * size // batch)
    taken = np.concatenate([batches.sequence_numbers(step) for step in range(steps)])[: 2 * size].reshape(2, size)
    assert (np.sort(taken, axis=1) == np.arange(size)).all()
    targets = [batches.batch(step).targets_BT for step in range(-(-size // batch))]
    targets_of_epoch = np.sort(np.concatenate(targets)[:size].ravel()).tolist()
    everything = shards.tokens(1, size * seq_len + 1)
    assert targets_of_epoch == np.sort(everything).tolist(), (
        "every token but the first, and the rest that fills no sequence"
    )
    assert NUM_TOKENS - 1 - len(everything) < seq_len


def test_a_run_that_resumes_goes_on_as_if_it_had_not_stopped(shards: TokenShards) -> None:
    """In another process, on other replicas, across changes of the batch and of the epoch."""
    straight = Batches(shards, seq_len=5, batch=RAMP, seed=3)
    expected = [straight.batch(step).inputs_BT.tolist() for step in range(12)]
    assert sum(RAMP.sequences(step) for step in range(4, 12)) > straight.num_sequences
    script = (
        "import sys\n"
        "from shardwise.run.data.batches import Batches\n"
        "from shardwise.batch_size.batch_schedule import BatchRamp\n"
        "from shardwise.run.data.token_shard_reader import TokenShards\n"
        f"batches = Batches(TokenShards({str(shards.folder)!r}), seq_len=5, batch=BatchRamp({RAMP.values}), seed=3)\n"
        "print([batches.batch(step).inputs_BT.tolist() for step in range(4, 12)])\n"
        "assert not {'torch', 'jax', 'tokenizers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected[4:])


def test_inputs_and_targets_are_neighbours_in_the_text(shards: TokenShards) -> None:
    batch = Batches(shards, seq_len=6, batch=4, seed=None).batch(1)
    assert batch.sequences_B.tolist() == [4, 5, 6, 7]
    everything = shards.tokens(0, NUM_TOKENS)
    for row, number in enumerate(batch.sequences_B):
        start = 6 * number
        assert batch.inputs_BT[row].tolist() == everything[start : start + 6].tolist()
        assert batch.targets_BT[row].tolist() == everything[start + 1 : start + 7].tolist()


def test_documents_and_targets_at_their_boundaries(shards_of: Shards) -> None:
    shards = shards_of([[5, 6, 0], [7, 0], [0], [8, 9, 4, 0]])
    kept = Batches(shards, seq_len=9, batch=1, seed=None).batch(0)
    assert kept.inputs_BT.tolist() == [[5, 6, 0, 7, 0, 0, 8, 9, 4]]
    assert kept.targets_BT.tolist() == [[6, 0, 7, 0, 0, 8, 9, 4, 0]]
    assert kept.documents_BT.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 3]]
    batches = Batches(shards, seq_len=9, batch=1, seed=None, ignore_boundaries=True)
    assert batches.batch(0).targets_BT.tolist() == [[6, 0, IGNORE_INDEX, 0, IGNORE_INDEX, IGNORE_INDEX, 9, 4, 0]]
    assert batches.num_targets(0) == 6


def test_one_step_can_be_the_whole_held_out_split(shards: TokenShards) -> None:
    batches = Batches(shards, seq_len=8, batch=1, seed=None)
    whole = Batches(shards, seq_len=8, batch=batches.num_sequences, seed=None)
    taken = [part.sequences_B for replica in range(3) for part in whole.sequences(0, replica, 3, 2)]
    assert sorted(np.concatenate(taken).tolist()) == list(range(batches.num_sequences))
    assert whole.epochs(1) == (1.0,)


def test_a_split_that_is_too_short_is_refused(shards_of: Shards) -> None:
    shards = shards_of([[1, 2, 3, 0]], [[1, 2, 0]])
    assert Batches(shards, seq_len=3, batch=1).num_sequences == 1
    with pytest.raises(InputError, match="train has 4 tokens; sequences of 4 require at least 5: give more text or"):
        Batches(shards, seq_len=4, batch=1)
    with pytest.raises(InputError, match=r"held_out has 3 tokens; .*a larger --held-out or shorter"):
        Batches(TokenShards(shards.folder, "held_out"), seq_len=3, batch=1)


def test_impossible_requests_are_refused(shards: TokenShards) -> None:
    batches = Batches(shards, seq_len=4, batch=2)
    for replica, num_replicas in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InputError, match=f"replica: found {replica} of {num_replicas}"):
            list(batches.sequences(0, replica, num_replicas, 1))
    with pytest.raises(InputError, match="micro_batch_seqs: found 0"):
        list(batches.sequences(0, 0, 1, 0))
    with pytest.raises(InputError, match="step: found -1"):
        batches.batch(-1)
    with pytest.raises(InputError, match="seq_len: found 0"):
        Batches(shards, seq_len=0, batch=2)
    with pytest.raises(InputError, match="at least one sequence"):
        Batches(shards, seq_len=4, batch=0)


@given(
    step=st.integers(0, 9), seq_len=st.integers(2, 24), ignore=st.booleans(), cuts=st.lists(st.integers(0, 24), max_size=6),
)  # fmt: skip
def test_chosen_positions_equal_those_of_the_whole_batch(
    shards: TokenShards, step: int, seq_len: int, ignore: bool, cuts: list[int]
) -> None:
    """Targets and documents at a cut too; of tokens what is asked for, and one behind each part."""
    bounds = sorted({min(cut, seq_len) for cut in cuts})
    places = [(first, end - first) for first, end in zip(bounds[::2], bounds[1::2], strict=False)] or [(0, seq_len)]
    batches, count, read = Batches(shards, seq_len=seq_len, batch=RAMP, ignore_boundaries=ignore), [0], shards.tokens
    whole = next(batches.sequences(step, 0, 1, 9))
    shards.tokens = lambda start, stop: count.append(stop - start) or read(start, stop)  # type: ignore[method-assign]
    try:
        partial = next(batches.sequences(step, 0, 1, 9, places))
    finally:
        del shards.tokens  # type: ignore[method-assign]
    columns = np.concatenate([np.arange(first, first + length) for first, length in places])
    for name in ("inputs_BT", "targets_BT", "documents_BT"):
        assert getattr(partial, name).tolist() == getattr(whole, name)[:, columns].tolist()
    assert sum(count) == len(whole.sequences_B) * (len(columns) + len(places))
    for begins, documents, number in zip(partial.begins_BN, whole.documents_BT, whole.sequences_B, strict=True):
        counted = np.searchsorted(begins, np.arange(seq_len), side="right")
        assert (documents - documents[0]).tolist() == counted.tolist()
        behind = shards.documents(number * seq_len, (number + 1) * seq_len + 1)
        assert (seq_len in begins) == (behind[-1] != behind[-2])
