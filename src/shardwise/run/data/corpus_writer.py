"""Write text as token shards: read documents, load or train a tokenizer, and write both splits, all or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.run.data.documents import Document, HeldOutSplit, TextFile, held_out_documents, read_documents
from shardwise.run.data.shard_index import (
    ENDS_DTYPE,
    INDEX_FILE,
    SHARD_FILE,
    SPLITS,
    TOKENIZER_FILE,
    BlockChecksums,
    ShardIndex,
    SplitIndex,
    TokenShard,
    index_payload,
)
from shardwise.run.data.tokenizer import Tokenizer, train_tokenizer
from shardwise.values import InputError, Progress, flush_to_disk, ignore_progress, write_synced

DEFAULT_VOCAB = 8192
DEFAULT_HELD_OUT = 0.01
SHARD_TOKENS = 2**28  # 512 MiB in 16 bits: few files, and each can be copied again in a minute
BATCH_CHARACTERS = 2**22  # characters that are encoded at once, on all cores


def write_corpus(
    sources: Sequence[TextFile], out: str | Path, *, tokenizer: Tokenizer | None = None, vocab_size: int = DEFAULT_VOCAB,
    held_out: float = DEFAULT_HELD_OUT, force: bool = False, shard_tokens: int = SHARD_TOKENS,
    progress: Progress = ignore_progress,
) -> ShardIndex:  # fmt: skip
    """Write the documents of `sources` as token shards into the folder `out`, and return their index.

    Without a tokenizer one of at most `vocab_size` tokens is trained on the training documents. The fraction `held_out`
    of the documents, at least one, goes to shards of its own; 0 holds out none. Raises `InputError` for text that
    cannot be read, too few documents for both splits, and a folder that cannot be written; nothing is left behind then.
    """
    with replace_folder(out, force=force) as folder:
        progress("reading the documents")
        split, num_documents = held_out_documents(read_documents(sources), held_out)
        if tokenizer is None:
            progress(f"training a tokenizer on {num_documents:,} documents")
            texts = (document.text for document in read_documents(sources) if document not in split)
            tokenizer = train_tokenizer(texts, vocab_size)

        def report(num_done: int) -> None:
            progress("documents encoded", num_done, num_documents)

        index = _write_shards(folder, read_documents(sources), tokenizer, split, shard_tokens, report)
        write_index(folder, index, tokenizer.text)
    return index


def _write_shards(
    folder: Path, documents: Iterator[Document], tokenizer: Tokenizer, split: HeldOutSplit, shard_tokens: int,
    report: Callable[[int], None],
) -> ShardIndex:  # fmt: skip
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    num_done = 0
    with ExitStack() as open_files:
        writers = {name: SplitWriter(folder, name, shard_tokens) for name in SPLITS}
        for writer in writers.values():
            open_files.callback(writer.abandon)
        for batch in _batches(documents):
            training_tokens = []
            for document, tokens in zip(batch, tokenizer.encode([document.text for document in batch]), strict=True):
                name = "held_out" if document in split else "train"
                writers[name].add(tokens, len(document.text.encode("utf-8")))
                training_tokens += [tokens] if name == "train" else []
            counts += np.bincount(np.concatenate(training_tokens), minlength=len(counts)) if training_tokens else 0
            num_done += len(batch)
            report(num_done)
        written = {name: writer.finish() for name, writer in writers.items()}
    return ShardIndex(
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
    """Return the entropy of token frequencies, -Σ p ln p, in nats per token (Shannon 1948)."""
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum()) + 0.0  # one token alone: 0, not -0


Tokens = np.ndarray[tuple[int], np.dtype[Any]]


class SplitWriter:
    """Writes the shards of one split into a folder, document by document; a document lies in one shard."""

    def __init__(self, folder: Path, name: str, shard_tokens: int) -> None:
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.shards: list[TokenShard] = []
        self.text_bytes = 0
        self._file: BinaryIO | None = None
        self._begin()

    def _begin(self) -> None:
        self._hash, self._blocks, self._ends = hashlib.sha256(), BlockChecksums(), array("q")

    def add(self, tokens: Tokens, text_bytes: int) -> None:
        """Append the tokens of a document, its end token included."""
        if self._file is not None and self._ends[-1] + len(tokens) > self.shard_tokens:
            self._close_shard()
        if self._file is None:
            self._file = (self.folder / f"{self._shard_name()}.tokens").open("wb")
        data = tokens.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._blocks.add(data)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(tokens))
        self.text_bytes += text_bytes

    def finish(self) -> SplitIndex:
        """Close the last shard and return the index of the split."""
        self._close_shard()
        return SplitIndex(shards=tuple(self.shards), text_bytes=self.text_bytes)

    def abandon(self) -> None:
        """Close the open file without finishing it."""
        if self._file is not None:
            self._file.close()

    def _shard_name(self) -> str:
        return f"{self.name}-{len(self.shards):05d}"

    def _close_shard(self) -> None:
        if self._file is None:
            return
        flush_to_disk(self._file)
        self._file.close()
        ends, sums = np.array(self._ends, ENDS_DTYPE).tobytes(), self._blocks.finish()
        shard = TokenShard(
            name=self._shard_name(), num_tokens=self._ends[-1], num_documents=len(self._ends),
            tokens_sha256=self._hash.hexdigest(), ends_crc32=zlib.crc32(ends), sums_crc32=zlib.crc32(sums),
        )  # fmt: skip
        write_synced(self.folder / shard.ends_file, ends)
        write_synced(self.folder / shard.sums_file, sums)
        self.shards.append(shard)
        self._file = None
        self._begin()


def write_index(folder: Path, index: ShardIndex, tokenizer: bytes) -> None:
    """Write the tokenizer and, as the last of all files, the index."""
    write_synced(folder / TOKENIZER_FILE, tokenizer)
    write_synced(folder / INDEX_FILE, (json.dumps(index_payload(index), indent=2) + "\n").encode("utf-8"))


@contextlib.contextmanager
def replace_folder(out: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a new folder beside `out` that replaces it when the block ends, and is removed when the block fails.

    Raises `InputError` before anything is written if `out` cannot be written, or is not empty; with `force` token
    shards are replaced, and nothing else ever is.
    """
    target = _resolve_target(Path(out))
    _require_free(target, force)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        try:
            draft.mkdir()
        except (OSError, ValueError) as error:
            raise _cannot_write(target, error) from None
        yield draft
        _replace_target(draft, target)
    except OSError as error:
        raise _cannot_write(target, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _resolve_target(path: Path) -> Path:
    """Return the folder itself if `path` is a link to it."""
    try:
        target = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, links in a circle
        raise _cannot_write(path, error) from None
    if Path.cwd().is_relative_to(target):
        raise InputError(f"--out: {path} is the folder that this runs in; a folder of its own is required")
    return target


def _replace_target(draft: Path, target: Path) -> None:
    """Rename the draft to its target; the folder that it replaces is renamed first and removed last."""
    replaced = draft.with_suffix(".old")
    had_target = target.is_dir()
    if had_target:
        os.rename(target, replaced)
    try:
        os.rename(draft, target)
    except OSError:
        if had_target:
            os.rename(replaced, target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _require_free(target: Path, force: bool) -> None:
    try:
        names = {path.name for path in target.iterdir()} if target.is_dir() else set()
        is_file = target.exists() and not target.is_dir()
    except (OSError, ValueError) as error:
        raise _cannot_write(target, error) from None
    if is_file:
        raise InputError(f"--out: {target} is a file; a folder is required: choose another name")
    if not names:
        return
    foreign_names = sorted(name for name in names - {INDEX_FILE, TOKENIZER_FILE} if not SHARD_FILE.fullmatch(name))
    if not any(map(SHARD_FILE.fullmatch, names)):
        raise InputError(f"--out: {target} holds files that tokenize did not write; choose a new folder")
    if not force:
        raise InputError(
            f"--out: {target} holds token shards already; choose a new folder, or replace them with --force"
        )
    if foreign_names:
        raise InputError(
            f"--out: {target} holds {foreign_names[0]!r} beside token shards; only these are replaced: "
            "move it, or choose a new folder"
        )


def _cannot_write(target: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"--out: cannot write {target}: {reason}; choose a folder that can be written")
