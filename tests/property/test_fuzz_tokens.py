"""Malformed indices and files of text: what is wrong is said in a sentence, and no other exception gets out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from property.test_fuzz import FUZZED, VALUES, WORDS, check, mutate, paths
from shardwise.run.data.corpus_writer import write_corpus
from shardwise.run.data.documents import find_text_files
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.values.durable_files import add_checksum
from shardwise.values.errors import InputError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokens")
    for number in range(6):
        (place / f"{number}.txt").write_text("words in a document " * (number + 1))
    write_corpus(find_text_files([place]), place / "data", vocab_size=260, held_out=0.2, shard_tokens=200)
    return place / "data"


@pytest.fixture(scope="module")
def payload(folder: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return parsed


def opened_or_refused(folder: Path, text: str) -> list[str]:
    """Open an index as it may be, and use what was opened; of each split what was said against it, nothing if it was used."""
    (folder / "index.json").write_text(text, encoding="utf-8")
    problems = []
    for split in ("train", "held_out"):
        try:
            shards = TokenShards(folder, split)
            assert len(shards.tokens(0, shards.num_tokens)) == shards.num_tokens
            assert shards.documents(0, shards.num_tokens)[-1] == shards.num_documents - 1
            shards.tokenizer()
            problems.append("")
        except InputError as error:
            problems.append(str(error))
    return problems


def test_the_index_before_mutation_is_accepted(folder: Path, payload: dict[str, Any]) -> None:
    assert opened_or_refused(folder, json.dumps(payload)) == ["", ""]


@FUZZED
@given(data=st.data(), how=st.sampled_from(["replace", "replace", "replace", "remove", "add"]), value=VALUES)
def test_mutated_indices_open_or_are_refused(
    folder: Path, payload: dict[str, Any], data: st.DataObject, how: str, value: Any
) -> None:
    changed = mutate(payload, data.draw(st.sampled_from(paths(payload))), how, value)
    if isinstance(changed, dict) and changed.get("crc32") == payload["crc32"]:  # as who means it would seal it
        changed = add_checksum({key: part for key, part in changed.items() if key != "crc32"})
    text = json.dumps(changed)
    for words in opened_or_refused(folder, text):
        assert not words or str(folder) in words or "required" in words


@FUZZED
@given(text=st.one_of(WORDS, st.sampled_from(["[]", "null", "{", "[" * 100_000, "1" * 5000])))
def test_indices_that_are_no_objects_are_refused(folder: Path, text: str) -> None:
    assert all(str(folder) in words for words in opened_or_refused(folder, text))


@FUZZED
@given(
    lines=st.lists(st.one_of(st.binary(max_size=20), st.builds(lambda value: json.dumps({"text": value}).encode(), VALUES))),
    vocab_size=st.sampled_from([257, 300]), held_out=st.sampled_from(["0", "0.5", "1e-9"]),
)  # fmt: skip
def test_mutated_files_of_lines_are_read_or_refused(
    folder: Path, lines: list[bytes], vocab_size: int, held_out: str
) -> None:
    file = folder.parent / "lines.jsonl"
    file.write_bytes(b"\n".join(lines))
    out = folder.parent / "out"
    check(["tokenize", str(file), f"--out={out}", "--force", f"--vocab-size={vocab_size}", f"--held-out={held_out}"])
