"""How often a step waits for its data: a mixture of many shards, read by a thread beside steps that compute.

    python benchmarks/reading.py [--steps 200] [--sources 3] [--shards 50]

Each step takes its micro-batches from `ReadAhead` and multiplies matrices meanwhile. Prints what was taken and how often it had
not been read when it was asked for: counts, of which the first is always one, as nothing is read before it is asked for.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from shardwise.run.data.batches import Batch, Batches, ReadAhead
from shardwise.run.data.corpus_writer import SplitWriter, replace_folder, write_index
from shardwise.run.data.shard_index import ShardIndex
from shardwise.run.data.token_shard_reader import TokenShards

SEQ_LEN, BATCH_SEQS, MICRO_BATCH_SEQS = 1024, 16, 4
SHARD_TOKENS, VOCAB = 100_000, 50_000
WIDTH = 1024  # of the matrices, whose product takes some milliseconds on a core


def shards(place: Path, count: int, seed: int) -> TokenShards:
    """Random tokens in so many shards."""
    drawn = np.random.default_rng(seed)
    with replace_folder(place) as folder:
        writer = SplitWriter(folder, "train", SHARD_TOKENS)
        for _ in range(count):
            writer.add(drawn.integers(0, VOCAB, SHARD_TOKENS).astype("<u2"), SHARD_TOKENS)
        index = ShardIndex(
            dtype="uint16", vocab_size=VOCAB, end_token="</s>", end_id=0, tokenizer_sha256="0" * 64, held_out_fraction=0.0,
            unigram_entropy_nats=float(np.log(VOCAB)), train=writer.finish(),
            held_out=SplitWriter(folder, "held_out", SHARD_TOKENS).finish(),
        )  # fmt: skip
        write_index(folder, index, b"{}")
    return TokenShards(place)


def counted(batches: Batches, steps: int) -> tuple[int, int]:
    """What was taken, and how often it was waited for."""
    ahead: ReadAhead[Batch] = ReadAhead(lambda step: batches.sequences(step, 0, 1, MICRO_BATCH_SEQS), steps)
    matrix = np.ones((WIDTH, WIDTH), np.float32)
    for step in range(steps):
        for _ in ahead.step(step):
            matrix @ matrix
    return ahead.num_taken, ahead.num_waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("--steps", 200), ("--sources", 3), ("--shards", 50)):
        parser.add_argument(flag, type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        sources = [shards(Path(place) / str(number), arguments.shards, number) for number in range(arguments.sources)]
        weights = range(1, arguments.sources + 1)
        taken, waits = counted(Batches(sources, seq_len=SEQ_LEN, batch=BATCH_SEQS, weights=weights), arguments.steps)
    print(f"{taken:,} items taken, {waits:,} waited for: {waits / taken:.2%}")


if __name__ == "__main__":
    main()
