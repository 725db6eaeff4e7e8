"""Batches: packed sequences of token shards, the same global batch for any number of replicas; and a thread that reads those of
coming steps ahead.

Sequence k of a split has tokens k·T to (k + 1)·T as inputs, and the tokens one further as targets. Letters: B
sequences, T positions of a sequence.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from shardwise.batch_size import BatchRamp
from shardwise.run.data.sample_order import Int64s, Mixture, sequence_numbers
from shardwise.run.data.token_shard_reader import TokenShards, require_same_tokenizer
from shardwise.values import InputError, raise_problems, run_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some sequences of a step; all arrays are int64.

    `inputs_BT`, `targets_BT`: token ids; the target of a position is the next token. `documents_BT`: the number of the
    input's document; attention within documents joins positions of equal number. `sequences_B`: numbers of the
    sequences in the split. T are all positions of a sequence, or those that were asked for.

    `begins_BN`: positions of the whole sequence, and of the token after it, at which another document begins than that
    of the position before, padded with a number above all positions.
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
    """Sequences of `seq_len` tokens of one or several sources, and which of them each step and replica takes.

    Sources are drawn by weight (`Mixture`); each is read in the order that it has alone, epoch after epoch. Sequences
    and documents of a source are numbered after those of the sources before it. No state is kept between steps: any
    step can be read first, so that a run resumes at its step's number on any number of replicas. `ramp` may be replaced
    by one with the same past steps.
    """

    def __init__(
        self, shards: TokenShards | Sequence[TokenShards], *, seq_len: int, batch: BatchRamp | int, seed: int | None = 0,
        ignore_boundaries: bool = False, weights: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """`batch`: sequences of the global batch. `seed`: of the order in each epoch; None: the order of the text.
        `weights`: one for each source, by which its sequences are drawn; (): equal weights.

        `ignore_boundaries`: the target after a document's end, the start of another, is `IGNORE_INDEX`. Raises
        `InputError` for a split too short for one sequence, sources of different tokenizers, and weights that are not
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
            lambda: require_same_tokenizer(shards),
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
        """Return the number of sequences in the global batch of a step."""
        return self.ramp.sequences(step)

    def epochs(self, step: int) -> tuple[float, ...]:
        """Return how many epochs of each source have been taken before a step."""
        counts = self.mixture.counts(self.ramp.first_sample(step))
        return tuple(count / len(source) for count, source in zip(counts, self.sources, strict=True))

    def sequence_numbers(self, step: int) -> Int64s:
        """Return the numbers of the sequences in the global batch of a step, in order."""
        first = self.ramp.first_sample(step)
        samples = np.arange(first, first + self.ramp.sequences(step), dtype=np.int64)
        source_indices, sample_indices = self.mixture.draw(samples)
        numbers: Int64s = self._sequence_starts[source_indices]
        for source in np.unique(source_indices):
            mask = source_indices == source
            numbers[mask] += sequence_numbers(sample_indices[mask], len(self.sources[source]), self.seed)
        return numbers

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step."""
        return self._read(self.sequence_numbers(step))

    def num_micro_batches(self, step: int, num_replicas: int, micro_batch_seqs: int) -> int:
        """Return the micro-batches that every replica runs in a step (gradient accumulation)."""
        _require_replicas(0, num_replicas, micro_batch_seqs)
        return -(-self.ramp.sequences(step) // (num_replicas * micro_batch_seqs))

    def sequences(
        self, step: int, replica: int, num_replicas: int, micro_batch_seqs: int,
        position_ranges: PositionRanges | None = None,
    ) -> Iterator[Batch]:  # fmt: skip
        """Yield the micro-batches of one replica in a step, equally many for every replica.

        With `position_ranges` only these positions are read (None: all), and the token after each range, its last
        target.

        The global batch is cut into global micro-batches of `num_replicas` x `micro_batch_seqs` sequences, and each of
        these among the replicas, so that one process with micro-batches of that size runs the same ones. The last one,
        if short, is divided evenly: some replicas have one sequence less in it, or none.
        """
        _require_replicas(replica, num_replicas, micro_batch_seqs)
        numbers = self.sequence_numbers(step)
        size = num_replicas * micro_batch_seqs
        for start in range(0, len(numbers), size):
            yield self._read(np.array_split(numbers[start : start + size], num_replicas)[replica], position_ranges)

    def num_targets(self, step: int) -> int:
        """Return the targets of the global batch that count in the loss; every replica computes them without
        communication."""
        return self._count_targets(self.sequence_numbers(step))

    def targets_of_replicas(self, step: int, num_replicas: int, micro_batch_seqs: int) -> Iterator[list[int]]:
        """Yield, for each global micro-batch of a step, the number of targets of each replica's part."""
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
            sequences_B=numbers, inputs_BT=inputs, targets_BT=targets, documents_BT=documents,
            begins_BN=_pad_rows(begins, self.seq_len + 1),
        )  # fmt: skip


def _pad_rows(rows: Sequence[Int64s], fill: int) -> Int64s:
    """Return rows of different lengths as one array, padded with `fill`."""
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


PositionRanges = Sequence[tuple[int, int]]  # parts of each sequence: first position and length
IGNORE_INDEX = -100  # PyTorch's default `ignore_index` of cross_entropy


class SequenceRow(NamedTuple):
    """A sequence, or some positions of it; the fields are those of a `Batch`."""

    inputs_T: Int64s
    targets_T: Int64s
    documents_T: Int64s
    begins_N: Int64s


class Sequences:
    """Packed sequences of `seq_len` tokens; the tokens at the end that fill no sequence are left out."""

    def __init__(self, shards: TokenShards, seq_len: int, *, ignore_boundaries: bool = False) -> None:
        """Raises `InputError` for a split too short for one sequence."""
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
        """Return the sequences of one epoch."""
        return (self.shards.num_tokens - 1) // self.seq_len

    def num_targets(self, numbers: Int64s) -> int:
        """Return the targets of these sequences that count in the loss; no token is read."""
        starts = numbers * self.seq_len
        num_boundaries = 0
        if self.ignore_boundaries:
            num_boundaries = (self.shards.document_of(starts + self.seq_len) - self.shards.document_of(starts)).sum()
        return len(starts) * self.seq_len - int(num_boundaries)

    def read(self, number: int, position_ranges: PositionRanges | None = None) -> SequenceRow:
        """Return a sequence, or its `position_ranges` only; the token after each range is read too, its last target."""
        ranges, start = position_ranges or ((0, self.seq_len),), number * self.seq_len
        position_T = np.concatenate([np.arange(first, first + count) for first, count in ranges])
        tokens = [self.shards.tokens(start + first, start + first + count + 1) for first, count in ranges]
        inputs, targets = (np.concatenate([chunk[part] for chunk in tokens]) for part in (np.s_[:-1], np.s_[1:]))
        document, ends = self.shards.document_starts(start, start + self.seq_len + 1)
        begins = ends - start
        if self.ignore_boundaries:
            targets[np.isin(position_T + 1, begins)] = IGNORE_INDEX
        return SequenceRow(inputs, targets, document + np.searchsorted(begins, position_T, side="right"), begins)


Item = TypeVar("Item")
END_S = 10.0  # seconds that the end of a process waits for a read of a file system that may hang
DEPTH = 2  # items in the queue: one ready while the next is read


class _StepEnd:
    """The end of a step's items in the queue, with the error that ended it, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _ReaderThread(Generic[Item]):
    """A thread that reads step by step, as far ahead as the queue has room."""

    def __init__(self, read: Callable[[int], Iterable[Item]], steps: range) -> None:
        self.items: Queue[Item | _StepEnd] = Queue(DEPTH)
        self.steps, self.closed = steps, False
        self._thread = threading.Thread(target=self._run, args=(read, steps), name="data", daemon=True)
        self._thread.start()

    def _run(self, read: Callable[[int], Iterable[Item]], steps: range) -> None:
        for step in steps:
            error: BaseException | None = None
            try:
                for item in read(step):
                    self.items.put(item)
                    if self.closed:
                        return
            except BaseException as caught:
                error = caught
            self.items.put(_StepEnd(error))
            if error or self.closed:
                return

    def close(self) -> None:
        """Have the thread end, and wake it if it waits for room."""
        self.closed = True
        with suppress(Empty):
            while True:
                self.items.get_nowait()

    def end(self) -> None:
        """Close, and wait until the thread has ended: one that frees a tensor while the interpreter ends aborts the
        process."""
        self.close()
        self._thread.join(END_S)


class ReadAhead(Generic[Item]):
    """The items that `read` returns for each of the steps up to `stop`, read by a thread ahead of their use.

    Steps are requested in order; after any other step reading starts again from there. An error of `read` is raised
    where the step's next item is requested. `num_taken` counts requests, the end of each step included, and `num_waits`
    those that had to wait for the thread.

    >>> ahead = ReadAhead(lambda step: (f"{step}.{number}" for number in range(2)), stop=10)
    >>> list(ahead.step(0)), list(ahead.step(1)), list(ahead.step(7))
    (['0.0', '0.1'], ['1.0', '1.1'], ['7.0', '7.1'])
    """

    def __init__(self, read: Callable[[int], Iterable[Item]], stop: int) -> None:
        self.read, self.stop = read, stop
        self._reader: _ReaderThread[Item] | None = None
        self._finalizer: weakref.finalize[..., ReadAhead[Item]] | None = None
        self._next = 0
        self.num_taken = self.num_waits = 0

    def step(self, step: int) -> Iterator[Item]:
        """Yield the items of a step; all of the step before must have been taken."""
        if self._reader is None or step != self._next or step not in self._reader.steps:
            self._begin(step)
        reader, self._next = self._reader, -1
        assert reader is not None
        while not isinstance(item := self._take(reader.items), _StepEnd):
            yield item
        if item.error is not None:
            raise item.error
        self._next = step + 1

    def restart(self) -> None:
        """Discard what was read ahead: the next step is read when it is requested."""
        self._next = -1

    def _take(self, items: Queue[Item | _StepEnd]) -> Item | _StepEnd:
        """Return the next item, counting it and whether it had to be waited for."""
        self.num_waits += items.empty()
        self.num_taken += 1
        return items.get()

    def _begin(self, step: int) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._finalizer is not None:
            self._finalizer.detach()  # it would keep the closed reader for as long as this object lives
        self._reader = _ReaderThread(self.read, range(step, max(self.stop, step + 1)))
        self._finalizer = weakref.finalize(self, self._reader.end)
