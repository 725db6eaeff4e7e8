"""Text to token shards and back: the tokens are the text's, the folder is whole or not there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from shardwise.run.data import corpus_writer
from shardwise.run.data.corpus_writer import unigram_entropy, write_corpus
from shardwise.run.data.documents import TextFile, find_text_files, python_library, read_documents
from shardwise.run.data.shard_index import read_index
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.data.tokenizer import END_OF_DOCUMENT, load_tokenizer, train_tokenizer
from shardwise.values.errors import InputError

TEXTS = [
    f"Document {number} says {'na ' * number}and ends.\r\n{END_OF_DOCUMENT} is text here. ü 中" for number in range(12)
]
FILES = {"index.json", "tokenizer.json", "train-00000.tokens", "train-00000.ends", "train-00000.crc32"}


@pytest.fixture
def sources(tmp_path: Path) -> tuple[TextFile, ...]:
    place = tmp_path / "text"
    place.mkdir()
    for number, text in enumerate(TEXTS):
        (place / f"{number:02d}.txt").write_bytes(text.encode("utf-8"))
    return find_text_files([place])


def texts_of(shards: TokenShards) -> list[str]:
    """The documents of a split, decoded."""
    tokenizer = shards.tokenizer()
    texts, start = [], 0
    for number in range(shards.num_documents):
        *ids, last = shards.tokens(start, shards.end(number)).tolist()
        assert last == tokenizer.end_id
        assert tokenizer.end_id not in ids, "what a text says ends no document"
        texts.append(tokenizer.engine.decode(ids, skip_special_tokens=False))
        start = shards.end(number)
    assert start == shards.num_tokens
    return texts


@pytest.mark.parametrize("shard_tokens", [1, 100, 10**6])
def test_shards_hold_the_text(tmp_path: Path, sources: tuple[TextFile, ...], shard_tokens: int) -> None:
    index = write_corpus(sources, tmp_path / "data", vocab_size=300, held_out=0.2, shard_tokens=shard_tokens)
    train, held_out = (TokenShards(tmp_path / "data", split) for split in ("train", "held_out"))
    held_out_texts, kept = texts_of(held_out), texts_of(train)
    assert sorted(kept + held_out_texts) == sorted(TEXTS)
    assert kept == [text for text in TEXTS if text in kept], "in the order of the text"
    assert index == read_index(tmp_path / "data")
    assert (index.dtype, index.vocab_size) == ("uint16", 300)
    assert index.train.text_bytes == sum(len(text.encode()) for text in kept)
    assert len(index.train.shards) == {1: len(kept), 10**6: 1}.get(shard_tokens, len(index.train.shards))
    assert all(shard.num_tokens <= shard_tokens or shard.num_documents == 1 for shard in index.train.shards)


def test_the_entropy_is_that_of_the_training_tokens(tmp_path: Path, sources: tuple[TextFile, ...]) -> None:
    index = write_corpus(sources, tmp_path / "data", vocab_size=300)
    shards = TokenShards(tmp_path / "data")
    counts = Counter(shards.tokens(0, shards.num_tokens).tolist())
    expected = sum(n / shards.num_tokens * math.log(shards.num_tokens / n) for n in counts.values())
    assert index.unigram_entropy_nats == pytest.approx(expected, rel=1e-12)


def test_the_entropy_of_known_frequencies() -> None:
    assert unigram_entropy(np.array([7, 7, 0, 7, 7])) == pytest.approx(math.log(4), rel=1e-15)
    assert str(unigram_entropy(np.array([0, 5]))) == "0.0"


def test_the_same_text_gives_the_same_files_on_any_number_of_threads(tmp_path: Path) -> None:
    """Another hash seed and other threads: what a parallel trainer could depend on."""
    script = (
        "from shardwise.run.data.corpus_writer import write_corpus\n"
        "from shardwise.run.data.documents import python_library\n"
        "import sys\n"
        "write_corpus(python_library(400_000), sys.argv[1], vocab_size=600)\n"
        "assert not {'torch', 'jax'} & set(sys.modules)\n"
    )
    contents = []
    for threads in ("1", "4"):
        out = tmp_path / threads
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", script, str(out)], check=True, env=environment)
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert contents[0] == contents[1]
    assert contents[0].keys() >= FILES


def test_the_tokenizer_knows_nothing_of_what_is_held_out(tmp_path: Path, sources: tuple[TextFile, ...]) -> None:
    write_corpus(sources, tmp_path / "data", vocab_size=400, held_out=0.2)
    kept = texts_of(TokenShards(tmp_path / "data"))
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == train_tokenizer(kept, 400).text


def test_a_tokenizer_of_a_file_is_used_and_kept(tmp_path: Path, sources: tuple[TextFile, ...]) -> None:
    """One that cuts, fills up and adds tokens of its own around a text, as published ones may."""
    engine = tokenizers.Tokenizer.from_str(train_tokenizer(TEXTS, 280).text.decode())
    engine.add_special_tokens(["<s>", "</s>"])
    engine.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 280)])
    engine.enable_truncation(4)
    engine.enable_padding(length=4)
    file = tmp_path / "mine.json"
    engine.save(str(file))
    index = write_corpus(sources, tmp_path / "data", tokenizer=load_tokenizer(file, "</s>"), held_out=0)
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert (index.end_token, index.end_id, index.vocab_size) == ("</s>", 281, 282)
    assert texts_of(TokenShards(tmp_path / "data")) == TEXTS


def test_a_large_vocabulary_takes_32_bits(tmp_path: Path, sources: tuple[TextFile, ...]) -> None:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(letters)} | {"</s>": 70_000}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.save(str(tmp_path / "wide.json"))
    index = write_corpus(sources, tmp_path / "data", tokenizer=load_tokenizer(tmp_path / "wide.json"), held_out=0)
    assert (index.dtype, index.vocab_size, index.end_id) == ("uint32", 70_001, 70_000)
    assert texts_of(TokenShards(tmp_path / "data")) == TEXTS


@pytest.mark.parametrize(
    ("text", "end", "part"),
    [
        (b"{", None, "is not a tokenizer.json"),
        (b"\xff", None, "is not a tokenizer.json"),
        (b'{"model": {"type": "none"}}', None, "is not a tokenizer.json"),
        (None, "</s>", "'</s>' is not one of its tokens"),
    ],
)
def test_an_invalid_tokenizer_is_refused(tmp_path: Path, text: bytes | None, end: str | None, part: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(train_tokenizer(TEXTS, 260).text if text is None else text)
    with pytest.raises(InputError, match=part):
        load_tokenizer(file, end)
    with pytest.raises(InputError, match="cannot read"):
        load_tokenizer(tmp_path / "none.json")


def test_a_tokenizer_without_a_known_end_asks_for_it(tmp_path: Path) -> None:
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "[SEP]": 1}, merges=[]))
    engine.save(str(tmp_path / "own.json"))
    with pytest.raises(InputError, match=r"has none of <\|endoftext\|>.*--end-of-document"):
        load_tokenizer(tmp_path / "own.json")
    assert load_tokenizer(tmp_path / "own.json", "[SEP]").end_id == 1


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(InputError, match="found 256; at least 257"):
        train_tokenizer(TEXTS, 256)
    assert train_tokenizer(TEXTS, 257).vocab_size == 257


def test_a_failure_leaves_nothing(
    tmp_path: Path, sources: tuple[TextFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while it writes, for the first time or over shards that are there: these stay as they were."""
    before = sorted(tmp_path.iterdir())

    def stopped(*operands: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus_writer, "write_index", stopped)
        with pytest.raises(KeyboardInterrupt):
            write_corpus(sources, tmp_path / "data", vocab_size=300)
    assert sorted(tmp_path.iterdir()) == before
    write_corpus(sources, tmp_path / "data", vocab_size=300)
    files_before = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(corpus_writer, "write_index", stopped)
        with pytest.raises(KeyboardInterrupt):
            write_corpus(sources, tmp_path / "data", vocab_size=280, force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == files_before
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "data"])


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, sources: tuple[TextFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*operands: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_writer, "write_index", full)
    with pytest.raises(InputError, match=r"cannot write .*data: No space left on device"):
        write_corpus(sources, tmp_path / "data", vocab_size=300)
    assert not (tmp_path / "data").exists()


def test_shards_are_replaced_when_forced_and_nothing_else(tmp_path: Path, sources: tuple[TextFile, ...]) -> None:
    out = tmp_path / "data"
    write_corpus(sources, out, vocab_size=300)
    with pytest.raises(InputError, match=r"holds token shards already; .*--force"):
        write_corpus(sources, out, vocab_size=280)
    assert write_corpus(sources, out, vocab_size=280, force=True).vocab_size == 280
    assert {path.name for path in tmp_path.iterdir()} == {"text", "data"}
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"holds 'thesis\.tex' beside token shards"):
        write_corpus(sources, out, vocab_size=280, force=True)
    with pytest.raises(InputError, match="holds files that tokenize did not write"):
        write_corpus(sources, tmp_path / "text", force=True)


@pytest.mark.parametrize(
    ("name", "data"), [("index.json", b"{}"), ("train-00000.tokens", b""), ("tokenizer.json", None)]
)
def test_damaged_shards_can_be_replaced(
    tmp_path: Path, sources: tuple[TextFile, ...], name: str, data: bytes | None
) -> None:
    """As the error that says so promises."""
    out = tmp_path / "data"
    write_corpus(sources, out, vocab_size=300)
    (out / name).unlink()
    if data is not None:
        (out / name).write_bytes(data)
    with pytest.raises(InputError, match="tokenize again, with --force"):
        TokenShards(out).tokenizer()
    write_corpus(sources, out, vocab_size=300, force=True)
    assert TokenShards(out).tokenizer().vocab_size == 300


def test_a_link_to_a_folder_is_kept(tmp_path: Path, sources: tuple[TextFile, ...]) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    for vocab_size in (300, 280):
        write_corpus(sources, tmp_path / "data", vocab_size=vocab_size, force=True)
        assert (tmp_path / "data").is_symlink()
        assert read_index(tmp_path / "disk").vocab_size == vocab_size


@pytest.mark.parametrize("out", ["none/data", "file", "file/data", "a\0b"])
def test_an_unwritable_folder_is_refused(tmp_path: Path, sources: tuple[TextFile, ...], out: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out: .*choose"):
        write_corpus(sources, tmp_path / out)


def test_the_working_folder_is_not_replaced(
    tmp_path: Path, sources: tuple[TextFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="the folder that this runs in"):
        write_corpus(sources, ".")


def test_progress_is_reported(tmp_path: Path, sources: tuple[TextFile, ...]) -> None:
    reports: list[tuple[str, int, int]] = []
    write_corpus(
        sources, tmp_path / "data", vocab_size=300,
        progress=lambda stage, done=0, total=0: reports.append((stage, done, total)),
    )  # fmt: skip
    assert reports == [
        ("reading the documents", 0, 0), ("training a tokenizer on 12 documents", 0, 0), ("documents encoded", 12, 12),
    ]  # fmt: skip


def test_documents_are_encoded_in_batches_that_end(
    tmp_path: Path, sources: tuple[TextFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_corpus(sources, tmp_path / "whole", vocab_size=300)
    monkeypatch.setattr(corpus_writer, "BATCH_CHARACTERS", 1)
    assert write_corpus(sources, tmp_path / "single", vocab_size=300) == whole
    for name in FILES:
        assert (tmp_path / "single" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_library_is_text_to_train_on(tmp_path: Path) -> None:
    """What the demo does: source of this Python, a small vocabulary, a loss to beat."""
    chosen = python_library(300_000)
    index = write_corpus(chosen, tmp_path / "data", vocab_size=512, held_out=0.1)
    assert index.train.text_bytes + index.held_out.text_bytes == sum(
        len(document.text.encode()) for document in read_documents(chosen)
    )
    assert 4 < index.unigram_entropy_nats < math.log(512)
    payload = json.loads((tmp_path / "data" / "index.json").read_text())
    assert payload["schema"] == "shardwise.tokens/2"
