"""Shards read as one row of tokens; what is damaged is said, in one sentence."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.run.data.shard_index import BLOCK_BYTES, SUMS_DTYPE, BlockChecksums
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.values.durable_files import add_checksum
from shardwise.values.errors import InputError

Shards = Callable[..., TokenShards]
DOCUMENTS = st.lists(st.lists(st.integers(1, 999), max_size=9).map(lambda ids: [*ids, 0]), min_size=1, max_size=12)


@given(documents=DOCUMENTS, shard_tokens=st.integers(1, 30), data=st.data())
def test_any_range_is_that_of_the_documents_in_a_row(
    shards_of: Shards, documents: list[list[int]], shard_tokens: int, data: st.DataObject
) -> None:
    shards = shards_of(documents, shard_tokens=shard_tokens)
    tokens = [token for document in documents for token in document]
    numbers = [number for number, document in enumerate(documents) for _ in document]
    assert (shards.num_tokens, shards.num_documents) == (len(tokens), len(documents))
    start = data.draw(st.integers(0, len(tokens) - 1))
    stop = data.draw(st.integers(start + 1, len(tokens)))
    assert shards.tokens(start, stop).tolist() == tokens[start:stop]
    assert shards.documents(start, stop).tolist() == numbers[start:stop]
    ends = np.cumsum([len(document) for document in documents])
    assert [shards.end(number) for number in range(len(documents))] == ends.tolist()
    positions = np.array([len(tokens), start, stop])
    assert shards.document_of(positions).tolist() == [(ends <= position).sum() for position in positions]


def test_shards_are_mapped_and_not_read(shards_of: Shards) -> None:
    shards = shards_of([[1, 2, 0], [3, 0]], shard_tokens=3)
    assert [type(shard.tokens.base) for shard in shards._shards] == [np.memmap, np.memmap]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 6), (3, 3), (4, 2)])
def test_a_range_outside_is_refused(shards_of: Shards, start: int, stop: int) -> None:
    shards = shards_of([[1, 2, 0], [3, 0]])
    for read in (shards.tokens, shards.documents):
        with pytest.raises(InputError, match="a range in 0 to 5 is required"):
            read(start, stop)


def test_each_split_has_its_own_shards(shards_of: Shards) -> None:
    train = shards_of([[1, 2, 0]], [[3, 0], [4, 0]])
    held_out = TokenShards(train.folder, "held_out")
    assert (train.num_tokens, held_out.num_tokens, held_out.num_documents) == (3, 4, 2)
    with pytest.raises(InputError, match=r"no document is held out; .*--held-out"):
        TokenShards(shards_of([[1, 0]]).folder, "held_out")
    with pytest.raises(InputError, match="found 'test'; train or held_out is required"):
        TokenShards(train.folder, "test")


def test_the_fingerprint_is_of_the_tokens_and_not_of_the_place(shards_of: Shards) -> None:
    """What a run that resumes compares: equal sizes are not equal data."""
    first, again, different = (shards_of([[1, token, 0]]).index for token in (2, 2, 3))
    assert first.fingerprint == again.fingerprint != different.fingerprint
    assert first.train.shards[0].sums_crc32 != different.train.shards[0].sums_crc32
    assert shards_of([[1, 2, 0], [3, 0]], shard_tokens=3).index.fingerprint.startswith("8c57f4b62cf02c96"), (
        "as of tokens/1"
    )
    assert first.train.shards[0].tokens_sha256 == hashlib.sha256(np.array([1, 2, 0], "<u2").tobytes()).hexdigest()


def test_a_model_needs_a_row_for_each_token(shards_of: Shards) -> None:
    shards = shards_of([[1, 0]])
    shards.require_vocabulary(1000)
    with pytest.raises(
        InputError, match=r"vocabulary of 1,000, the model one of 999; .*--vocab-size 999.*vocab_size=1000"
    ):
        shards.require_vocabulary(999)


def test_damage_is_found_when_the_folder_is_opened(shards_of: Shards, tmp_path: Path) -> None:
    whole = shards_of([[1, 2, 0], [3, 0]], shard_tokens=3).folder

    def damaged(name: str, data: bytes | None) -> str:
        place = tmp_path / "data"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        (place / name).unlink()
        if data is not None:
            (place / name).write_bytes(data)
        with pytest.raises(InputError) as caught:
            TokenShards(place)
        return str(caught.value)

    assert "train-00001.tokens: found 3 bytes; 4 are required: tokenize again" in damaged("train-00001.tokens", b"abc")
    assert "train-00001.tokens: found 6 bytes; 4 are required" in damaged("train-00001.tokens", b"longer")
    for lost in ("train-00001.tokens", "train-00000.ends", "train-00001.crc32"):
        assert re.search(rf"{lost}: cannot read: No such file .*tokenize again, with --force$", damaged(lost, None))
    damaged_file = r"is damaged (CRC-32 mismatch); what was written is required: tokenize again"
    assert f"train-00000.ends {damaged_file}" in damaged("train-00000.ends", np.array([2], "<i8").tobytes())
    assert f"train-00001.crc32 {damaged_file}" in damaged("train-00001.crc32", bytes(4))
    index = (whole / "index.json").read_bytes()
    assert f"index.json {damaged_file}" in damaged("index.json", index.replace(b'"end_id": 0', b'"end_id": 1'))
    assert "index.json has no CRC-32 of its own" in damaged("index.json", index.replace(b'"crc32"', b'"crc"'))
    assert "index.json: cannot read: No such file" in damaged("index.json", None)
    assert "index.json is not JSON" in damaged("index.json", b"{")
    assert "index.json is not text" in damaged("index.json", b"\xff")
    assert "found schema 'list'" in damaged("index.json", b"[]")


@pytest.mark.parametrize("block", [0, 1, 3])
def test_damaged_tokens_are_found_when_they_are_read(shards_of: Shards, block: int) -> None:
    """Of blocks of 64 KiB, 32Ki tokens each; the rest of the shard can be read."""
    documents = np.append(np.arange(1, 100_001) % 999, 0)
    whole = shards_of([documents.tolist()], shard_tokens=2**20)
    file = whole.folder / "train-00000.tokens"
    content = bytearray(file.read_bytes())
    content[block * BLOCK_BYTES + 100] ^= 1
    file.write_bytes(content)
    shards = TokenShards(whole.folder)
    per_block = BLOCK_BYTES // 2
    for sound_block in set(range(4)) - {block}:
        start = sound_block * per_block
        stop = min(start + per_block, len(documents))
        assert shards.tokens(start, stop).tolist() == documents[start:stop].tolist()
    last = min((block + 1) * BLOCK_BYTES, len(content))
    text = rf"train-00000\.tokens is damaged \(CRC-32 mismatch, bytes {block * BLOCK_BYTES:,} to {last:,}\)"
    start = block * per_block
    for first, stop in ((start + 5, start + 6), (start + 50, start + 51), (max(start - 9, 0), start + 9)):
        with pytest.raises(InputError, match=text):
            shards.tokens(first, stop)


def test_each_block_is_checked_once(shards_of: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of([[*([1] * 70_000), 0]])
    looked: list[int] = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data: looked.append(len(data)) or crc32(data))
    for start in (0, 3, 40_000, 69_000, 0):
        shards.tokens(start, start + 10)
    assert looked == [BLOCK_BYTES, BLOCK_BYTES, 2 * 70_001 - 2 * BLOCK_BYTES]


@given(data=st.lists(st.binary(max_size=3 * BLOCK_BYTES // 2), max_size=5))
def test_sums_of_blocks_do_not_depend_on_how_the_bytes_come(data: list[bytes]) -> None:
    writer, whole = BlockChecksums(), b"".join(data)
    for part in data:
        writer.add(part)
    expected = [zlib.crc32(whole[start : start + BLOCK_BYTES]) for start in range(0, len(whole), BLOCK_BYTES)]
    assert np.frombuffer(writer.finish(), SUMS_DTYPE).tolist() == expected


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(shards_of: Shards) -> None:
    shards = shards_of([[1, 1500, 0], [3, 0]])
    assert shards.tokens(2, 5).tolist() == [0, 3, 0]
    with pytest.raises(InputError, match="found token 1500 in train; ids below 1000"):
        shards.tokens(0, 2)


def test_another_tokenizer_is_refused(shards_of: Shards) -> None:
    shards = shards_of([[1, 0]])
    with pytest.raises(InputError, match="its hash is 44136fa355b3; 000000000000 is required"):  # SHA-256 of "{}"
        shards.tokenizer()
    (shards.folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="cannot read: No such file"):
        shards.tokenizer()


def shard(name: str, num_tokens: int, num_documents: int) -> dict[str, object]:
    sums = {"tokens_sha256": "", "ends_crc32": 0, "sums_crc32": 0}
    return {"name": name, "num_tokens": num_tokens, "num_documents": num_documents, **sums}


def make_split(*shards: object) -> dict[str, object]:
    return {"shards": shards, "text_bytes": 0}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; uint16 or uint32"),
        ({"dtype": "uint32"}, "found 6 bytes; 12 are required"),
        ({"vocab_size": 70_000}, "ids below vocab_size, in uint16"),
        ({"end_id": 1000}, "end_id is 1000 and vocab_size 1000"),
        ({"unigram_entropy_nats": float("nan")}, "unigram_entropy_nats is nan"),
        ({"train": make_split()}, "train has no shards"),
        ({"train": make_split(shard("../train-00000", 3, 1))}, "'../train"),
        ({"train": make_split(shard("train-00000", 0, 0))}, "of 0 tokens"),
        ({"train": make_split({"name": "train-00000"})}, "train.shards.0.num_tokens"),
        ({"train": make_split(shard("train-00000", 3, 1), shard("train-00000", 3, 1))}, "two shards have one name"),
        ({"schema": "shardwise.tokens/9"}, "found schema 'shardwise.tokens/9'; 'shardwise.tokens/2' is required"),
        ({"schema": "shardwise.tokens/1"}, "'shardwise.tokens/2' is required: tokenize again, with --force"),
    ],
)
def test_an_impossible_index_is_refused(shards_of: Shards, changes: dict[str, object], part: str) -> None:
    file = shards_of([[1, 2, 0]]).folder / "index.json"
    payload = json.loads(file.read_text()) | changes
    del payload["crc32"]
    file.write_text(json.dumps(add_checksum(payload)))
    with pytest.raises(InputError) as caught:
        TokenShards(file.parent)
    assert part in str(caught.value)
