"""`shardwise tokenize` as a user meets it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from number_paths import require_payload_numbers

import shardwise as sw
from shardwise.present.command_line import main
from shardwise.present.verbs.training import tokenize
from shardwise.run.data.corpus_writer import write_corpus
from shardwise.run.data.documents import find_text_files
from shardwise.run.data.token_shard_reader import TokenShards


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Eight documents, one of them a line."""
    place = tmp_path / "text"
    place.mkdir()
    for number in range(7):
        (place / f"{number}.txt").write_text(f"chapter {number}: " + "once upon a time " * (number + 1))
    (place / "more.jsonl").write_text(json.dumps({"text": "the end of the story"}) + "\n")
    return place


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["tokenize", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_report_says_what_was_written(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    code, out, err = run(capsys, text, "--out", tmp_path / "data", "--vocab-size", "0.3K")
    assert (code, err) == (0, "")
    shards = TokenShards(tmp_path / "data")
    assert f"tokenizer trained on this text: {shards.vocab_size} tokens, <|endoftext|> ends a document" in out
    assert re.search(rf"train +{shards.num_tokens} tokens of 7 documents, .* in 1 shard of uint16", out)
    assert re.search(r"held_out +\d+ tokens of 1 document, ", out)
    assert f"unigram entropy {shards.index.unigram_entropy_nats:.3f} nats per token" in out


def test_the_payload_is_the_index_with_its_sums(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    code, out, _ = run(capsys, text, "--out", tmp_path / "data", "--vocab-size", "300", "--held-out", "0.3", "--json")
    payload = json.loads(out)
    shards, held_out = (TokenShards(tmp_path / "data", split) for split in ("train", "held_out"))
    assert code == 0
    assert payload["schema"] == "shardwise.tokens/2"
    assert payload["train"]["num_tokens"] == shards.num_tokens
    assert payload["held_out"]["num_documents"] == held_out.num_documents == 8 - shards.num_documents
    for split in ("train", "held_out"):
        del payload[split]["num_tokens"], payload[split]["num_documents"]
    assert payload == json.loads((tmp_path / "data" / "index.json").read_text())


def test_a_tokenizer_and_patterns_are_taken(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    write_corpus(find_text_files([text]), tmp_path / "first", vocab_size=290)
    tokenizer = tmp_path / "first" / "tokenizer.json"
    code, out, _ = run(capsys, text, text / "0.txt", "--glob", "[12].txt", "--glob", "3.*", "--tokenizer", tokenizer,
                       "--end-of-document", "<|endoftext|>", "--held-out", "0", "--out", tmp_path / "data")  # fmt: skip
    assert code == 0
    assert "tokenizer of a file: 290 tokens" in out
    assert re.search(r"train +\d+ tokens of 4 documents", out)
    assert "  held_out  none" in out
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_the_library_is_taken_beside_other_text(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    with_text = run(
        capsys, text, "--python-library", "200kB", "--vocab-size", "300", "--out", tmp_path / "both", "--json"
    )
    library_only = run(
        capsys, "--python-library", "200kB", "--vocab-size", "300", "--out", tmp_path / "alone", "--json"
    )
    sums = [
        sum(json.loads(out)[split]["num_documents"] for split in ("train", "held_out"))
        for _, out, _ in (with_text, library_only)
    ]
    assert sums[0] == sums[1] + 8


def test_an_existing_folder_needs_force(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    arguments = [text, "--out", tmp_path / "data", "--vocab-size", "300"]
    first = run(capsys, *arguments)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "holds token shards already; choose a new folder, or replace them with --force" in err
    assert run(capsys, *arguments, "--force") == first


WRONG = [
    (["--out", "data"], "found no text; a folder, a file or --python-library SIZE is required"),
    (["none", "--out", "data"], "none: no such file or folder"),
    (["text", "--out", "data", "--glob", "*.rst"], "no file matches *.rst"),
    (["text", "--out", "none/data"], "--out: cannot write"),
    (["text", "--out", "text"], "holds files that tokenize did not write"),
    (["text", "--out", "text/0.txt"], "is a file; a folder is required"),
    (["text", "--out", "."], "the folder that this runs in"),
    (["text", "--out", "data", "--vocab-size", "lots"], "--vocab-size: found 'lots'"),
    (["text", "--out", "data", "--vocab-size", "100"], "found 100; at least 257"),
    (["text", "--out", "data", "--held-out", "much"], "--held-out: found 'much'"),
    (["text", "--out", "data", "--held-out", "1"], "found 1; a fraction"),
    (["text/0.txt", "--out", "data"], "holds out every document of 1"),
    (["text", "--out", "data", "--tokenizer", "none.json"], "tokenizer: cannot read none.json"),
    (["text", "--out", "data", "--tokenizer", "text/0.txt"], "is not a tokenizer.json"),
    (["text", "--out", "data", "--tokenizer", "x.json", "--vocab-size", "300"], "has its own vocabulary"),
    (["text", "--out", "data", "--end-of-document", "</s>"], "it is for a --tokenizer"),
    (["--out", "data", "--python-library", "4 hours"], "--python-library: found '4 hours'"),
    (["--out", "data", "--python-library", "0"], "python-library: found 0 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "part"), WRONG, ids=[part[:40] for _, part in WRONG])
def test_wrong_input_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: Path, arguments: list[str], part: str
) -> None:
    monkeypatch.chdir(text.parent)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert part in err
    assert [path.name for path in text.parent.iterdir()] == ["text"]


def test_all_problems_are_reported_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, _, err = run(capsys, tmp_path / "none", "--out", "data", "--vocab-size", "0", "--held-out", "x")
    assert len(err.splitlines()) == 3


def test_a_missing_tokenizers_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = run(capsys, text, "--out", tmp_path / "data")
    assert code == 2
    assert 'tokenizers is not installed; pip install "shardwise[train]"' in err


def test_python_result_reports_the_numbers_of_the_payload(text: Path, tmp_path: Path) -> None:
    corpus = tokenize([text], out=tmp_path / "data", vocab_size=300, held_out=0.2)
    assert corpus.is_tokenizer_trained
    assert require_payload_numbers(corpus) == 3
    with pytest.raises(sw.InputError, match="vocab_size: tokenizer has its own vocabulary"):
        tokenize([text], out=tmp_path / "other", tokenizer="x.json", vocab_size=300)
