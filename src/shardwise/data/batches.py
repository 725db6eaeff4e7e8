"""Batches: packed sequences of token shards, the same global batch for any number of replicas.

Letters: B sequences, T positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.data.order import BatchRamp, Int64s, sequence_numbers
from shardwise.data.shards import TokenShards
from shardwise.errors import InputError, require

Places = Sequence[tuple[int, int]]  # parts of each sequence: the first place of each, and how many
IGNORED = -100  # the target that PyTorch's cross_entropy leaves out (its `ignore_index`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some sequences of a step; all arrays are int64.

    `inputs_BT` and `targets_BT`: token ids, the target of a position being the next token. `documents_BT`: the number of the
    document that the input is of; attention that respects boundaries joins positions of one number. `sequences_B`: which
    sequences of the split these are. T are all places of a sequence, or those that were asked for.

    `begins_BN`: the places of the whole sequence, and of the token behind it, at which another document begins than that of the
    place before, filled up with a number above all places.
    """

    sequences_B: Int64s
    inputs_BT: Int64s
    targets_BT: Int64s
    documents_BT: Int64s
    begins_BN: Int64s

    @property
    def num_targets(self) -> int:
        """Targets that count in the loss."""
        return int((self.targets_BT != IGNORED).sum())


class Batches:
    """Sequences of `seq_len` tokens, and which of them each step and each replica takes.

    Sequence k is tokens k·T to (k + 1)·T of the split as inputs and the ones behind them as targets; documents follow on
    each other, and tokens at the end that fill no sequence are left out. Nothing is kept between steps: any step can be
    asked for first, so a run resumes at its step's number, on any number of replicas.
    """

    def __init__(
        self, shards: TokenShards, *, seq_len: int, batch: BatchRamp | int, seed: int | None = 0, ignore_boundaries: bool = False
    ) -> None:  # fmt: skip
        """`batch`: sequences of the global batch. `seed`: of the order in each epoch; None: that of the text.

        `ignore_boundaries`: the target behind a document's end, which is the start of another, is `IGNORED`. Raises
        `InputError` for a split that is too short for one sequence.
        """
        ramp = BatchRamp(((0, batch),)) if isinstance(batch, int) else batch
        if seq_len < 1:
            raise InputError(f"seq_len: found {seq_len}; at least 1 is required")
        if shards.num_tokens <= seq_len:
            raise InputError(
                f"{shards.folder}: {shards.name} has {shards.num_tokens:,} tokens; sequences of {seq_len:,} require at least "
                f"{seq_len + 1:,}: give more text"
                f"{', a larger --held-out' if shards.name == 'held_out' else ''} or shorter sequences"
            )
        self.shards, self.seq_len, self.ramp, self.seed = shards, seq_len, ramp, seed
        self.ignore_boundaries = ignore_boundaries

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        return (self.shards.num_tokens - 1) // self.seq_len

    def global_batch_seqs(self, step: int) -> int:
        """Sequences of the global batch of a step."""
        return self.ramp.sequences(step)

    def epoch(self, step: int) -> float:
        """How often every sequence has been taken before a step."""
        return self.ramp.first_sample(step) / self.num_sequences

    def sequence_numbers(self, step: int) -> Int64s:
        """The sequences of the global batch of a step, in order."""
        first = self.ramp.first_sample(step)
        samples = np.arange(first, first + self.ramp.sequences(step), dtype=np.int64)
        return sequence_numbers(samples, self.num_sequences, self.seed)

    def batch(self, step: int) -> Batch:
        """The global batch of a step."""
        return self._read(self.sequence_numbers(step))

    def num_micro_batches(self, step: int, num_replicas: int, micro_batch_seqs: int) -> int:
        """Micro-batches that every replica runs in a step: its accumulation."""
        _require_replicas(0, num_replicas, micro_batch_seqs)
        return -(-self.ramp.sequences(step) // (num_replicas * micro_batch_seqs))

    def sequences(
        self, step: int, replica: int, num_replicas: int, micro_batch_seqs: int, places: Places | None = None
    ) -> Iterator[Batch]:
        """The micro-batches of one replica in a step, as many for every replica.

        Of their sequences some `places` (None: all): no other token is read but the one behind each part, its last target.

        The global batch is cut into global micro-batches of `num_replicas` x `micro_batch_seqs` sequences, and each of these
        among the replicas: one process with micro-batches of that size runs the same ones. The last one is dealt out evenly
        where it is short, and some replicas then have a sequence less in it, or none.
        """
        _require_replicas(replica, num_replicas, micro_batch_seqs)
        numbers = self.sequence_numbers(step)
        size = num_replicas * micro_batch_seqs
        for start in range(0, len(numbers), size):
            yield self._read(np.array_split(numbers[start : start + size], num_replicas)[replica], places)

    def num_targets(self, step: int) -> int:
        """Targets of the global batch that count in the loss: every replica knows them without asking the others."""
        starts = self.sequence_numbers(step) * self.seq_len
        num_boundaries = 0
        if self.ignore_boundaries:
            num_boundaries = (self.shards.num_ends(starts + self.seq_len) - self.shards.num_ends(starts)).sum()
        return len(starts) * self.seq_len - int(num_boundaries)

    def _read(self, numbers: Int64s, places: Places | None = None) -> Batch:
        parts = places or ((0, self.seq_len),)
        place_T = np.concatenate([np.arange(first, first + count) for first, count in parts])
        inputs, targets, documents = np.empty((3, len(numbers), len(place_T)), np.int64)
        begins = []
        for row, number in enumerate(numbers.tolist()):
            start = number * self.seq_len
            tokens = [self.shards.tokens(start + first, start + first + count + 1) for first, count in parts]
            inputs[row], targets[row] = (
                np.concatenate([one[cut] for one in tokens]) for cut in (np.s_[:-1], np.s_[1:])
            )
            document, ends = self.shards.begins(start, start + self.seq_len + 1)
            begins.append(ends - start)
            documents[row] = document + np.searchsorted(begins[row], place_T, side="right")
            if self.ignore_boundaries:
                targets[row, np.isin(place_T + 1, begins[row])] = IGNORED
        return Batch(
            sequences_B=numbers,
            inputs_BT=inputs,
            targets_BT=targets,
            documents_BT=documents,
            begins_BN=_filled(begins, self.seq_len + 1),
        )


def _filled(rows: Sequence[Int64s], value: int) -> Int64s:
    """Rows of different lengths as one array, the shorter ones filled up with a value."""
    found = np.full((len(rows), max(map(len, rows), default=0)), value, np.int64)
    for into, row in zip(found, rows, strict=True):
        into[: len(row)] = row
    return found


def _require_replicas(replica: int, num_replicas: int, micro_batch_seqs: int) -> None:
    problems = []
    if num_replicas < 1 or not 0 <= replica < num_replicas:
        problems.append(
            f"replica: found {replica} of {num_replicas}; a number from 0, below that of the replicas, is required"
        )
    if micro_batch_seqs < 1:
        problems.append(f"micro_batch_seqs: found {micro_batch_seqs}; at least 1 is required")
    require(problems)
