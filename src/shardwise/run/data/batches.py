"""Batches: packed sequences of token shards, the same global batch for any number of replicas.

Sequence k of a split is tokens k·T to (k + 1)·T as inputs, and the ones behind them as targets. Letters: B sequences,
T positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from shardwise.batch_size.batch_schedule import BatchRamp
from shardwise.run.data.sample_order import Int64s, Mixture, sequence_numbers
from shardwise.run.data.token_shards import TokenShards, require_one_tokenizer
from shardwise.values.errors import InputError, raise_problems, run_all


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
        return int((self.targets_BT != IGNORE_INDEX).sum())


class Batches:
    """Sequences of `seq_len` tokens of one or several sources, and which of them each step and each replica takes.

    Sources are drawn by their weights (`Mixture`), and each is taken in the order that it has alone, epoch after epoch. Sequences
    and documents of a source are numbered behind those of the sources before it. Nothing is kept between steps: any step can be
    asked for first, so a run resumes at its step's number, on any number of replicas. `ramp` may be replaced by one with the same
    steps before those that are still to come.
    """

    def __init__(
        self, shards: TokenShards | Sequence[TokenShards], *, seq_len: int, batch: BatchRamp | int, seed: int | None = 0,
        ignore_boundaries: bool = False, weights: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """`batch`: sequences of the global batch. `seed`: of the order in each epoch; None: that of the text. `weights`: one for
        each source, by which its sequences are drawn; (): as many of each.

        `ignore_boundaries`: the target behind a document's end, which is the start of another, is `IGNORE_INDEX`. Raises
        `InputError` for a split that is too short for one sequence, sources of different tokenizers, and weights that are not
        positive.
        """
        shards = (shards,) if isinstance(shards, TokenShards) else tuple(shards)
        self.ramp = BatchRamp(((0, batch),)) if isinstance(batch, int) else batch
        self.seq_len, self.seed = seq_len, seed
        *sources, self.mixture, _ = run_all(
            *(
                partial(Sequences, source_shards, seq_len, ignore_boundaries=ignore_boundaries)
                for source_shards in shards
            ),
            lambda: Mixture(weights or [1] * len(shards)),
            lambda: require_one_tokenizer(shards),
        )
        self.sources: tuple[Sequences, ...] = tuple(sources)
        counts = [(len(source), source.shards.num_documents) for source in self.sources]
        starts = np.cumsum([(0, 0), *counts], axis=0, dtype=np.int64)
        self._sequence_starts, self._document_starts = starts[:-1, 0], starts[:-1, 1]

    @property
    def num_sequences(self) -> int:
        """Sequences of all sources, each counted once."""
        return sum(map(len, self.sources))

    def global_batch_seqs(self, step: int) -> int:
        """Sequences of the global batch of a step."""
        return self.ramp.sequences(step)

    def epochs(self, step: int) -> tuple[float, ...]:
        """How often every sequence of each source has been taken before a step."""
        counts = self.mixture.counts(self.ramp.first_sample(step))
        return tuple(count / len(source) for count, source in zip(counts, self.sources, strict=True))

    def sequence_numbers(self, step: int) -> Int64s:
        """The sequences of the global batch of a step, in order."""
        first = self.ramp.first_sample(step)
        source_indices, sample_indices = self.mixture.draw(
            np.arange(first, first + self.ramp.sequences(step), dtype=np.int64)
        )
        numbers: Int64s = self._sequence_starts[source_indices]
        for source in np.unique(source_indices):
            mask = source_indices == source
            numbers[mask] += sequence_numbers(sample_indices[mask], len(self.sources[source]), self.seed)
        return numbers

    def batch(self, step: int) -> Batch:
        """The global batch of a step."""
        return self._read(self.sequence_numbers(step))

    def num_micro_batches(self, step: int, num_replicas: int, micro_batch_seqs: int) -> int:
        """Micro-batches that every replica runs in a step: its accumulation."""
        _require_replicas(0, num_replicas, micro_batch_seqs)
        return -(-self.ramp.sequences(step) // (num_replicas * micro_batch_seqs))

    def sequences(
        self,
        step: int,
        replica: int,
        num_replicas: int,
        micro_batch_seqs: int,
        position_ranges: PositionRanges | None = None,
    ) -> Iterator[Batch]:
        """The micro-batches of one replica in a step, as many for every replica.

        Of their sequences some `position_ranges` (None: all): no other token is read but the one behind each part, its last target.

        The global batch is cut into global micro-batches of `num_replicas` x `micro_batch_seqs` sequences, and each of these
        among the replicas: one process with micro-batches of that size runs the same ones. The last one is dealt out evenly
        where it is short, and some replicas then have a sequence less in it, or none.
        """
        _require_replicas(replica, num_replicas, micro_batch_seqs)
        numbers = self.sequence_numbers(step)
        size = num_replicas * micro_batch_seqs
        for start in range(0, len(numbers), size):
            yield self._read(np.array_split(numbers[start : start + size], num_replicas)[replica], position_ranges)

    def num_targets(self, step: int) -> int:
        """Targets of the global batch that count in the loss: every replica knows them without asking the others."""
        return self._count_targets(self.sequence_numbers(step))

    def targets_of_replicas(self, step: int, num_replicas: int, micro_batch_seqs: int) -> Iterator[list[int]]:
        """Of each global micro-batch of a step the targets of each replica's part, likewise."""
        numbers, size = self.sequence_numbers(step), num_replicas * micro_batch_seqs
        for start in range(0, len(numbers), size):
            yield [self._count_targets(part) for part in np.array_split(numbers[start : start + size], num_replicas)]

    def _count_targets(self, numbers: Int64s) -> int:
        sources = self._sources_of(numbers)
        return sum(
            source.num_targets(numbers[sources == number] - self._sequence_starts[number])
            for number, source in enumerate(self.sources)
        )

    def _sources_of(self, numbers: Int64s) -> Int64s:
        indices: Int64s = np.searchsorted(self._sequence_starts, numbers, side="right") - 1
        return indices

    def _read(self, numbers: Int64s, position_ranges: PositionRanges | None = None) -> Batch:
        num_positions = self.seq_len if position_ranges is None else sum(count for _, count in position_ranges)
        inputs, targets, documents = np.empty((3, len(numbers), num_positions), np.int64)
        begins = []
        for row, (number, source) in enumerate(zip(numbers, self._sources_of(numbers), strict=True)):
            sequence = self.sources[source].read(int(number - self._sequence_starts[source]), position_ranges)
            inputs[row], targets[row] = sequence.inputs_T, sequence.targets_T
            documents[row] = self._document_starts[source] + sequence.documents_T
            begins.append(sequence.begins_N)
        return Batch(
            sequences_B=numbers,
            inputs_BT=inputs,
            targets_BT=targets,
            documents_BT=documents,
            begins_BN=_pad_rows(begins, self.seq_len + 1),
        )


def _pad_rows(rows: Sequence[Int64s], fill: int) -> Int64s:
    """Rows of different lengths as one array, the shorter ones filled up with a value."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), fill, np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _require_replicas(replica: int, num_replicas: int, micro_batch_seqs: int) -> None:
    problems = []
    if num_replicas < 1 or not 0 <= replica < num_replicas:
        problems.append(
            f"replica: found {replica} of {num_replicas}; a number from 0, below that of the replicas, is required"
        )
    if micro_batch_seqs < 1:
        problems.append(f"micro_batch_seqs: found {micro_batch_seqs}; at least 1 is required")
    raise_problems(problems)


PositionRanges = Sequence[tuple[int, int]]  # parts of each sequence: the first place of each, and how many
IGNORE_INDEX = -100  # the target that PyTorch's cross_entropy leaves out (its `ignore_index`)


class SequenceRow(NamedTuple):
    """A sequence, or some places of it, with the names of a `Batch`."""

    inputs_T: Int64s
    targets_T: Int64s
    documents_T: Int64s
    begins_N: Int64s


class Sequences:
    """Sequences of `seq_len` tokens; documents follow on each other, and tokens at the end that fill no sequence are left out."""

    def __init__(self, shards: TokenShards, seq_len: int, *, ignore_boundaries: bool = False) -> None:
        """Raises `InputError` for a split that is too short for one sequence."""
        if seq_len < 1:
            raise InputError(f"seq_len: found {seq_len}; at least 1 is required")
        if shards.num_tokens <= seq_len:
            raise InputError(
                f"{shards.folder}: {shards.name} has {shards.num_tokens:,} tokens; sequences of {seq_len:,} require at least "
                f"{seq_len + 1:,}: give more text"
                f"{', a larger --held-out' if shards.name == 'held_out' else ''} or shorter sequences"
            )
        self.shards, self.seq_len, self.ignore_boundaries = shards, seq_len, ignore_boundaries

    def __len__(self) -> int:
        """Sequences of one epoch."""
        return (self.shards.num_tokens - 1) // self.seq_len

    def num_targets(self, numbers: Int64s) -> int:
        """Targets of these sequences that count in the loss; no token is read."""
        starts = numbers * self.seq_len
        num_boundaries = 0
        if self.ignore_boundaries:
            num_boundaries = (self.shards.document_of(starts + self.seq_len) - self.shards.document_of(starts)).sum()
        return len(starts) * self.seq_len - int(num_boundaries)

    def read(self, number: int, position_ranges: PositionRanges | None = None) -> SequenceRow:
        """A sequence, or some `position_ranges` of it: no other token is read but the one behind each part, its last target."""
        ranges, start = position_ranges or ((0, self.seq_len),), number * self.seq_len
        position_T = np.concatenate([np.arange(first, first + count) for first, count in ranges])
        tokens = [self.shards.tokens(start + first, start + first + count + 1) for first, count in ranges]
        inputs, targets = (np.concatenate([chunk[part] for chunk in tokens]) for part in (np.s_[:-1], np.s_[1:]))
        document, ends = self.shards.document_starts(start, start + self.seq_len + 1)
        begins = ends - start
        if self.ignore_boundaries:
            targets[np.isin(position_T + 1, begins)] = IGNORE_INDEX
        return SequenceRow(inputs, targets, document + np.searchsorted(begins, position_T, side="right"), begins)
