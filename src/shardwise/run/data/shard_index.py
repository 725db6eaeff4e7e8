"""The index of a folder of token shards, the check of its files' sizes, and checksums of a shard's tokens, block by block:
computed when written, verified once when first read.

index.json                   this index
tokenizer.json               what made the tokens
train-00000.tokens           token ids, little-endian, one document after the other, each with the token that ends it
train-00000.ends             where each document of the shard ends: 64-bit token counts from the start of the shard
train-00000.crc32            the CRC-32 of each block of 64 KiB of the shard's tokens, 32 bits each
held_out-00000.tokens ...    the same for the held-out split
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from shardwise.values import (
    CHECKSUM_KEY,
    FileMessages,
    InputError,
    MergedFields,
    describe_checksum_problem,
    parse_dataclass,
    parse_json,
    raise_problems,
    read_bytes,
)
from shardwise.values.durable_files import add_checksum

# Bytes with one CRC-32: the size of a few sequences, so that reading one verifies few other bytes; sums add 0.006%.
BLOCK_BYTES = 2**16
SUMS_DTYPE = np.dtype("<u4")

Array = np.ndarray[Any, np.dtype[Any]]


class BlockChecksums:
    """Computes the CRC-32 of each block of a stream of bytes."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._crc = self._filled = 0

    def add(self, data: bytes) -> None:
        """Append bytes."""
        remaining = memoryview(data)
        while remaining:
            part, remaining = remaining[: BLOCK_BYTES - self._filled], remaining[BLOCK_BYTES - self._filled :]
            self._crc, self._filled = zlib.crc32(part, self._crc), self._filled + len(part)
            if self._filled == BLOCK_BYTES:
                self._end()

    def _end(self) -> None:
        self._sums.append(self._crc)
        self._crc = self._filled = 0

    def finish(self) -> bytes:
        """Return the checksums of all blocks, the last of which may be short."""
        if self._filled:
            self._end()
        return np.array(self._sums, SUMS_DTYPE).tobytes()


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks of so many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


class VerifiedBlocks:
    """The bytes of a file with the checksums of its blocks; a block is read when it is first required."""

    def __init__(self, path: Path, data: Array, sums: Array) -> None:
        self.path, self.data, self.sums = path, data.view(np.uint8), sums
        self._good = bytearray(len(sums))

    def require(self, start: int, stop: int, fix: str) -> None:
        """Raise `InputError` if a block of bytes `start` to `stop` is damaged."""
        for block in range(start // BLOCK_BYTES, num_blocks(stop)):
            if self._good[block]:
                continue
            first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(self.data))
            if zlib.crc32(self.data[first:last].data) != self.sums[block]:
                raise InputError(
                    f"{self.path} is damaged (CRC-32 mismatch, bytes {first:,} to {last:,}); what was written is required: {fix}"
                )
            self._good[block] = 1


SCHEMA = "shardwise.tokens/2"
IDENTITY = "shardwise.tokens/1"  # hashed into fingerprints: unchanged in later schemas, so that runs can go on
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
SPLITS = ("train", "held_out")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS_DTYPE = np.dtype("<i8")  # signed like NumPy's indices: searchsorted would copy unsigned ones
SHARD_NAME = re.compile(rf"(?:{'|'.join(SPLITS)})-[0-9]{{5,}}")
SHARD_FILE = re.compile(rf"{SHARD_NAME.pattern}\.(?:tokens|ends|crc32)")
REMEDY = "tokenize again, with --force"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """Three files, `name`.tokens, `name`.ends and `name`.crc32, what they hold, the first one's hash, the others' CRC-32."""

    name: str
    num_tokens: int
    num_documents: int
    tokens_sha256: str
    ends_crc32: int
    sums_crc32: int

    def __post_init__(self) -> None:
        required = f"{SPLITS[0]}-00000 or the like, and at least one token in each of at least one document"
        if not SHARD_NAME.fullmatch(self.name) or not 1 <= self.num_documents <= self.num_tokens:
            raise InputError(
                f"shard: found {self.name!r} of {self.num_tokens} tokens and {self.num_documents} documents; {required} are "
                f"required: {REMEDY}"
            )

    @property
    def tokens_file(self) -> str:
        return f"{self.name}.tokens"

    @property
    def ends_file(self) -> str:
        return f"{self.name}.ends"

    @property
    def sums_file(self) -> str:
        return f"{self.name}.crc32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitIndex:
    """The shards of a split, in order, and the bytes of the text that they were made from (UTF-8)."""

    shards: tuple[TokenShard, ...]
    text_bytes: int

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """Index of a folder of token shards.

    `unigram_entropy_nats`: entropy of the frequencies of the training tokens, in nats per token: the loss of a model that
    knows how often each token comes, and nothing of its context. `tokenizer_sha256`: hash of the tokenizer.json.
    """

    dtype: str
    vocab_size: int
    end_token: str
    end_id: int
    tokenizer_sha256: str
    held_out_fraction: float
    unigram_entropy_nats: float
    train: SplitIndex
    held_out: SplitIndex

    def __post_init__(self) -> None:
        problems = []
        if self.dtype not in DTYPES:
            problems.append(f"dtype is {self.dtype!r}; {' or '.join(DTYPES)} is required")
        elif not 0 <= self.end_id < self.vocab_size <= 2 ** (8 * DTYPES[self.dtype].itemsize):
            problems.append(
                f"end_id is {self.end_id} and vocab_size {self.vocab_size}; ids below vocab_size, in {self.dtype}, are required"
            )
        if not 0 <= self.unigram_entropy_nats < math.inf:
            problems.append(f"unigram_entropy_nats is {self.unigram_entropy_nats}; a number of at least 0 is required")
        if not self.train.shards:
            problems.append("train has no shards; at least one is required")
        names = [shard.name for shard in (*self.train.shards, *self.held_out.shards)]
        if len(set(names)) < len(names):
            problems.append("two shards have one name; names of their own are required")
        raise_problems([f"{INDEX_FILE}: {problem}: {REMEDY}" for problem in problems])

    def split(self, name: str) -> SplitIndex:
        """Return the split of a name. Raises `InputError` for one that is not in `SPLITS`."""
        if name not in SPLITS:
            raise InputError(f"split: found {name!r}; {' or '.join(SPLITS)} is required")
        split: SplitIndex = getattr(self, name)
        return split

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens and of how they were made: equal for equal data, wherever and in however many files it
        lies."""
        identity = {"schema": IDENTITY, **_without_sums(asdict(self))}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode("utf-8")).hexdigest()

    def expected_sizes(self) -> dict[str, int]:
        """Return the bytes of each file of the shards."""
        sizes = {}
        for shard in (*self.train.shards, *self.held_out.shards):
            sizes[shard.tokens_file] = shard.num_tokens * DTYPES[self.dtype].itemsize
            sizes[shard.ends_file] = shard.num_documents * ENDS_DTYPE.itemsize
            sizes[shard.sums_file] = num_blocks(sizes[shard.tokens_file]) * SUMS_DTYPE.itemsize
        return sizes


def index_payload(index: ShardIndex) -> dict[str, Any]:
    """Return the payload of the index file."""
    return add_checksum({"schema": SCHEMA, **asdict(index)})


# The index of token shards, its own CRC-32, and of each split the sums over its shards.
SplitPayload = Annotated[dict[str, Any], MergedFields(SplitIndex, num_tokens=int, num_documents=int)]
CorpusPayload = Annotated[
    dict[str, Any],
    MergedFields(
        ShardIndex, schema=Literal["shardwise.tokens/2"], crc32=int, train=SplitPayload, held_out=SplitPayload
    ),
]


def _without_sums(payload: Any) -> Any:
    if isinstance(payload, dict):
        return {key: _without_sums(value) for key, value in payload.items() if not key.endswith("_crc32")}
    return [_without_sums(value) for value in payload] if isinstance(payload, (list, tuple)) else payload


def read_index(folder: str | Path) -> ShardIndex:
    """Return the index of a folder after checking that its files have their full sizes.

    Raises `InputError` for a folder without an index, an index that is damaged (by its own checksum) or of another
    version, and shards of other sizes.
    """
    root = Path(folder)
    index = _parse(_payload(root / INDEX_FILE), root / INDEX_FILE)
    problems = []
    for name, size in index.expected_sizes().items():
        try:
            actual_size = os.stat(root / name).st_size
        except OSError as error:
            problems.append(f"{root / name}: cannot read: {error.strerror}; {size:,} bytes are required: {REMEDY}")
            continue
        if actual_size != size:
            problems.append(f"{root / name}: found {actual_size:,} bytes; {size:,} are required: {REMEDY}")
    raise_problems(problems)
    return index


def _payload(path: Path) -> Any:
    text = read_bytes(path, FileMessages(fix="a folder that `shardwise tokenize` wrote is required"))
    return parse_json(text, str(path), FileMessages(fix=REMEDY))


def _parse(payload: Any, path: Path) -> ShardIndex:
    schema = payload.get("schema") if isinstance(payload, dict) else type(payload).__name__
    if schema != SCHEMA:
        raise InputError(f"{path}: found schema {schema!r}; {SCHEMA!r} is required: {REMEDY}")
    if fault := describe_checksum_problem(payload):
        raise InputError(f"{path} {fault}; what was written is required: {REMEDY}")
    fields = {key: value for key, value in payload.items() if key not in ("schema", CHECKSUM_KEY)}
    return parse_dataclass(ShardIndex, fields, str(path))
