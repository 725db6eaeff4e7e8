"""Text to token shards: reads documents, finds or trains the tokenizer, writes both splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shardwise.data.documents import Document, HeldOut, Source, held_out_documents, read_documents
from shardwise.data.index import SPLITS, Index
from shardwise.data.tokenizer import Tokenizer, train_tokenizer
from shardwise.data.writer import SplitWriter, whole_folder, write_index
from shardwise.progress import Progress, silent

DEFAULT_VOCAB = 8192
DEFAULT_HELD_OUT = 0.01
SHARD_TOKENS = 2**28  # 512 MiB in 16 bits: few files, and each can be copied again in a minute
BATCH_CHARACTERS = 2**22  # of text that is encoded at once, on all cores


def write_corpus(
    sources: Sequence[Source], out: str | Path, *, tokenizer: Tokenizer | None = None, vocab_size: int = DEFAULT_VOCAB,
    held_out: float = DEFAULT_HELD_OUT, force: bool = False, shard_tokens: int = SHARD_TOKENS,
    progress: Progress = silent,
) -> Index:  # fmt: skip
    """Write the documents of `sources` as token shards into the folder `out`; the index that is written.

    Without a tokenizer one of at most `vocab_size` tokens is trained on the training documents. The part `held_out` of the
    documents, and at least one, is in shards of its own; 0 holds out none. Raises `InputError` for text that cannot be read,
    too few documents for both splits, and a place that cannot be written, where nothing is then left.
    """
    with whole_folder(out, force=force) as folder:
        progress("reading the documents")
        split, num_documents = held_out_documents(read_documents(sources), held_out)
        if tokenizer is None:
            progress(f"training a tokenizer on {num_documents:,} documents")
            texts = (document.text for document in read_documents(sources) if document not in split)
            tokenizer = train_tokenizer(texts, vocab_size)
        index = _write_shards(folder, sources, tokenizer, split, shard_tokens, progress, num_documents)
        write_index(folder, index, tokenizer.text)
    return index


def _write_shards(
    folder: Path, sources: Sequence[Source], tokenizer: Tokenizer, split: HeldOut, shard_tokens: int, progress: Progress,
    num_documents: int,
) -> Index:  # fmt: skip
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    num_done = 0
    with ExitStack() as open_files:
        writers = {name: SplitWriter(folder, name, shard_tokens) for name in SPLITS}
        for writer in writers.values():
            open_files.callback(writer.abandon)
        for batch in _batches(read_documents(sources)):
            trained_on = []
            for document, tokens in zip(batch, tokenizer.encode([one.text for one in batch]), strict=True):
                name = "held_out" if document in split else "train"
                writers[name].add(tokens, len(document.text.encode("utf-8")))
                trained_on += [tokens] if name == "train" else []
            counts += np.bincount(np.concatenate(trained_on), minlength=len(counts)) if trained_on else 0
            num_done += len(batch)
            progress("documents encoded", num_done, num_documents)
        written = {name: writer.finish() for name, writer in writers.items()}
    return Index(
        dtype=tokenizer.dtype.name, vocab_size=tokenizer.vocab_size, end_token=tokenizer.end_token, end_id=tokenizer.end_id,
        tokenizer_sha256=tokenizer.sha256, held_out_fraction=split.fraction, unigram_entropy_nats=unigram_entropy(counts),
        **written,
    )  # fmt: skip


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def unigram_entropy(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    """Entropy of the frequencies of tokens, -Σ p ln p, in nats per token (Shannon 1948)."""
    parts = counts[counts > 0] / counts.sum()
    return float(-(parts * np.log(parts)).sum()) + 0.0  # one token alone: 0, not -0
