"""Token shards that are given, without a text or a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardwise.run.data.corpus_writer import SplitWriter, replace_folder, write_index
from shardwise.run.data.shard_index import ShardIndex
from shardwise.run.data.token_shard_reader import TokenShards

Documents = Sequence[Sequence[int]]


def write_shards(
    out: Path, documents: Documents, held_out: Documents = (), *, shard_tokens: int = 2**20, vocab_size: int = 1000,
    tokenizer_sha256: str = "0" * 64,
) -> TokenShards:  # fmt: skip
    with replace_folder(out) as folder:
        splits = {}
        for name, texts in (("train", documents), ("held_out", held_out)):
            writer = SplitWriter(folder, name, shard_tokens)
            for tokens in texts:
                writer.add(np.array(tokens, "<u2"), 1)
            splits[name] = writer.finish()
        index = ShardIndex(
            dtype="uint16", vocab_size=vocab_size, end_token="</s>", end_id=0, tokenizer_sha256=tokenizer_sha256,
            held_out_fraction=0.0, unigram_entropy_nats=1.0, **splits,
        )  # fmt: skip
        write_index(folder, index, b"{}")
    return TokenShards(out)
