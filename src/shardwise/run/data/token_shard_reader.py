"""Token shards as one sequence of tokens, read from memory-mapped files."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.run.data.sample_order import Int64s
from shardwise.run.data.shard_index import (
    DTYPES,
    ENDS_DTYPE,
    REMEDY,
    SUMS_DTYPE,
    TOKENIZER_FILE,
    Array,
    ShardIndex,
    TokenShard,
    VerifiedBlocks,
    read_index,
)
from shardwise.run.data.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer, parse_tokenizer
from shardwise.values import FileMessages, InputError, raise_problems, read_bytes


@dataclass(frozen=True, slots=True)
class _MappedShard:
    """The mapped files of a shard, and which blocks of its tokens are verified."""

    tokens: Array
    ends: Array
    blocks: VerifiedBlocks

    def read(self, start: int, stop: int) -> Array:
        """Return tokens `start` to `stop`, cut at the end of the shard. Raises `InputError` if they are damaged."""
        tokens = self.tokens[start:stop]
        self.blocks.require(start * tokens.itemsize, start * tokens.itemsize + tokens.nbytes, REMEDY)
        return tokens


class TokenShards:
    """The tokens of a split, document after document, numbered from 0 across its shards."""

    def __init__(self, folder: str | Path, split: str = "train") -> None:
        """Open a folder that `tokenize` wrote. Raises `InputError` for a folder that is damaged, and for an empty
        split."""
        self.folder, self.name = Path(folder), split
        self.index: ShardIndex = read_index(folder)
        self.split = self.index.split(split)
        if not self.split.shards:
            raise InputError(f"{folder}: no document is held out; one is required: tokenize again with --held-out 0.01")
        self._shards = [self._map_shard(shard) for shard in self.split.shards]
        sizes = [(shard.num_tokens, shard.num_documents) for shard in self.split.shards]
        starts = np.cumsum([(0, 0), *sizes], axis=0, dtype=np.int64)
        self._token_starts, self._document_starts = starts[:, 0], starts[:, 1]

    @property
    def num_tokens(self) -> int:
        return self.split.num_tokens

    @property
    def num_documents(self) -> int:
        return self.split.num_documents

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    def require_vocabulary(self, model_vocab_size: int) -> None:
        """Raise `InputError` if the model's vocabulary is smaller than that of the tokens."""
        if self.vocab_size > model_vocab_size:
            raise InputError(
                f"{self.folder}: the tokens have a vocabulary of {self.vocab_size:,}, the model one of {model_vocab_size:,}; at "
                f"most that of the model is required: tokenize with --vocab-size {model_vocab_size}, or give the model "
                f"vocab_size={self.vocab_size}"
            )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the tokens. Raises `InputError` if the folder holds another tokenizer, or none."""
        path = self.folder / TOKENIZER_FILE
        text = read_bytes(
            path, FileMessages(fix=f"the tokenizer of the shards is required: {REMEDY}"), MAX_TOKENIZER_BYTES
        )
        actual_hash = hashlib.sha256(text).hexdigest()
        if actual_hash != self.index.tokenizer_sha256:
            raise InputError(
                f"{path}: its hash is {actual_hash[:12]}; {self.index.tokenizer_sha256[:12]} is required, "
                f"that of the shards: {REMEDY}"
            )
        return parse_tokenizer(text, str(path), self.index.end_token)

    def tokens(self, start: int, stop: int) -> Int64s:
        """Return tokens `start` to `stop` of the split. Raises `InputError` for a range outside it, and for damaged
        tokens: each block is checked when it is first read."""
        self._require_range(start, stop)
        first, last = np.searchsorted(self._token_starts, [start, stop - 1], side="right") - 1
        parts = []
        for shard_number in range(first, last + 1):
            shard_start = int(self._token_starts[shard_number])
            parts.append(self._shards[shard_number].read(max(start - shard_start, 0), stop - shard_start))
        tokens = np.concatenate(parts).astype(np.int64)
        if tokens.max() >= self.vocab_size:
            raise InputError(
                f"{self.folder}: found token {tokens.max()} in {self.name}; ids below {self.vocab_size} are required: {REMEDY}"
            )
        return tokens

    def documents(self, start: int, stop: int) -> Int64s:
        """Return the number of the document, within the split, of each of the tokens `start` to `stop`."""
        first, boundaries = self.document_starts(start, stop)
        return np.repeat(np.arange(first, first + len(boundaries) + 1), np.diff([start, *boundaries, stop]))

    def document_starts(self, start: int, stop: int) -> tuple[int, Int64s]:
        """Return the document of token `start`, and the positions up to `stop` at which the next ones begin. No token
        is read. Raises `InputError` for a range outside the split."""
        self._require_range(start, stop)
        first, last = self.document_of(np.array([start, stop - 1])).tolist()
        return first, np.array([self.end(number) for number in range(first, last)], np.int64)

    def document_of(self, positions: Int64s) -> Int64s:
        """Return the number of the document of each of the tokens at `positions`: how many documents end at or before
        it."""
        shard_numbers = np.minimum(np.searchsorted(self._token_starts, positions, side="right"), len(self._shards)) - 1
        documents: Int64s = self._document_starts[shard_numbers]
        for shard_number in np.unique(shard_numbers):
            mask = shard_numbers == shard_number
            documents[mask] += np.searchsorted(
                self._shards[shard_number].ends, positions[mask] - self._token_starts[shard_number], side="right"
            )
        return documents

    def end(self, document: int) -> int:
        """Return the end of a document: the position of the first token after it."""
        shard = int(np.searchsorted(self._document_starts, document, side="right")) - 1
        offset = self._shards[shard].ends[document - int(self._document_starts[shard])]
        return int(self._token_starts[shard]) + int(offset)

    def _require_range(self, start: int, stop: int) -> None:
        if not 0 <= start < stop <= self.num_tokens:
            raise InputError(
                f"{self.folder}: found tokens {start:,} to {stop:,}; a range in 0 to {self.num_tokens:,} is required"
            )

    def _map_shard(self, shard: TokenShard) -> _MappedShard:
        tokens, ends, sums = (
            self._map_file(name, dtype)
            for name, dtype in (
                (shard.tokens_file, DTYPES[self.index.dtype]), (shard.ends_file, ENDS_DTYPE), (shard.sums_file, SUMS_DTYPE),
            )
        )  # fmt: skip
        for name, array, crc in ((shard.ends_file, ends, shard.ends_crc32), (shard.sums_file, sums, shard.sums_crc32)):
            if zlib.crc32(array.data) != crc:
                raise InputError(
                    f"{self.folder / name} is damaged (CRC-32 mismatch); what was written is required: {REMEDY}"
                )
        if int(ends[-1]) != shard.num_tokens:
            raise InputError(
                f"{self.folder / shard.ends_file}: the last document ends at {int(ends[-1])}; {shard.num_tokens} is required: "
                f"{REMEDY}"
            )
        return _MappedShard(tokens, ends, VerifiedBlocks(self.folder / shard.tokens_file, tokens, sums))

    def _map_file(self, name: str, dtype: np.dtype[Any]) -> Array:
        try:
            # A plain view of the mapping: a memmap's own indexing is several times slower.
            return np.asarray(np.memmap(self.folder / name, dtype=dtype, mode="r"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{self.folder / name}: cannot read: {reason}; {REMEDY}") from None


def require_same_tokenizer(sources: Sequence[TokenShards]) -> None:
    """Raise `InputError` that names each source whose tokenizer differs from the first one's."""
    required = sources[0].index.tokenizer_sha256
    raise_problems(
        [
            f"{source.folder}: its tokenizer's hash is {source.index.tokenizer_sha256[:12]}; {required[:12]} is required, "
            f"that of {sources[0].folder}: tokenize again with --tokenizer {sources[0].folder / TOKENIZER_FILE}"
            for source in sources
            if source.index.tokenizer_sha256 != required
        ]
    )
