"""Which files are read, in which order, as which documents; which of these are held out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.run.data.documents import Document, find_text_files, held_out_documents, python_library, read_documents
from shardwise.values.errors import InputError


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def make_documents(*names: str) -> list[Document]:
    return [Document(name=name, text="text") for name in names]


def test_a_folder_is_walked_in_the_order_of_its_paths(tmp_path: Path) -> None:
    write(tmp_path, b_txt="2", a__z_md="1", a__b_txt="0", c_bin="no", _hidden_txt="no", _git__x_txt="no")
    names = [source.name for source in find_text_files([tmp_path])]
    assert names == ["a/b.txt", "a/z.md", "b.txt"]


def test_patterns_match_names_or_ends_of_paths(tmp_path: Path) -> None:
    write(tmp_path, a_txt="", docs__b_md="", other__b_md="", c_rst="")
    sources = find_text_files([tmp_path], ["*.txt", "docs/*.md"])
    assert [source.name for source in sources] == ["a.txt", "docs/b.md"]


def test_a_file_that_is_given_is_read_whatever_its_name(tmp_path: Path) -> None:
    write(tmp_path, notes_log="hello")
    assert list(read_documents(find_text_files([tmp_path / "notes.log"]))) == [Document(name="notes.log", text="hello")]


def test_equal_names_of_two_folders_are_numbered(tmp_path: Path) -> None:
    write(tmp_path, one__a_txt="1", two__a_txt="2")
    sources = find_text_files([tmp_path / "one", tmp_path / "two"])
    assert [source.name for source in sources] == ["a.txt", "a.txt#2"]


def test_lines_are_documents_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one\ntwo", "id": 1}), "", json.dumps({"text": ""}), json.dumps({"text": "ü"})]
    write(tmp_path, corpus_jsonl="\n".join(lines), empty_txt="")
    assert list(read_documents(find_text_files([tmp_path]))) == [
        Document(name="corpus.jsonl:1", text="one\ntwo"), Document(name="corpus.jsonl:4", text="ü"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not valid JSON"),
        ("[1]", "found list"),
        ("3", "found int"),
        ('{"body": "x"}', "found keys 'body'"),
        ('{"text": 3}', "found keys 'text'"),
        ('{"text": "\\ud800"}', "half a surrogate pair"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_line_without_a_text_is_named(tmp_path: Path, line: str, part: str) -> None:
    write(tmp_path, corpus_jsonl='{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=rf"corpus\.jsonl:2: .*{part}"):
        list(read_documents(find_text_files([tmp_path])))


def test_invalid_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.txt: byte 0xe9 is not UTF-8"):
        list(read_documents(find_text_files([tmp_path])))


def test_every_place_without_text_is_named(tmp_path: Path) -> None:
    write(tmp_path, empty__x_bin="")
    with pytest.raises(InputError) as caught:
        find_text_files([tmp_path / "none", tmp_path / "empty"])
    assert len(caught.value.problems) == 2
    assert "no such file or folder" in caught.value.problems[0]
    assert "no file matches *.txt" in caught.value.problems[1]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside another, too: what it holds would be missing without a word."""
    write(tmp_path, a_txt="1", secret__b_txt="2")
    scan = os.scandir

    def refused(path: str) -> object:
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(InputError, match="secret: cannot read: Permission denied"):
        find_text_files([tmp_path])


def test_the_library_is_source_and_a_size_takes_the_first_of_it() -> None:
    whole, part = python_library(), python_library(1_000_000)
    assert whole[: len(part)] == part
    sizes = [source.path.stat().st_size for source in whole]
    assert sum(sizes[: len(part)]) <= 1_000_000 < sum(sizes[: len(part) + 1])
    names = {source.name for source in whole}
    assert {"os.py", "json/decoder.py"} <= names
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in names)
    assert {source.path for source in whole} <= set(Path(os.__file__).parent.rglob("*.py"))


def test_a_library_of_any_size_has_a_file() -> None:
    assert len(python_library(1)) == 1
    with pytest.raises(InputError, match="found 0 bytes"):
        python_library(0)


NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=40, unique=True)


@given(names=NAMES, fraction=st.sampled_from([1e-9, 1e-6]))
def test_both_splits_have_a_document_however_small_the_part(names: list[str], fraction: float) -> None:
    documents = make_documents(*names)
    split, count = held_out_documents(documents, fraction)
    assert count == len(names)
    assert sum(document in split for document in documents) == 1


def test_the_part_that_is_held_out_is_that_asked_for_and_is_in_any_order() -> None:
    documents = make_documents(*(f"{number}.txt" for number in range(4000)))
    split, again = (held_out_documents(order, 0.1)[0] for order in (documents, documents[::-1]))
    held_out = {document.name for document in documents if document in split}
    assert 0.08 * 4000 < len(held_out) < 0.12 * 4000
    assert {document.name for document in documents if document in again} == held_out


def test_a_sample_of_the_library_is_held_out_like_any_text() -> None:
    """The first of the library are those of the lowest hashes: held out by the same hash they all would be."""
    documents = [Document(name=source.name, text="text") for source in python_library(4_000_000)]
    split, _ = held_out_documents(documents, 0.1)
    assert 0.03 < sum(document in split for document in documents) / len(documents) < 0.2


def test_none_is_held_out_by_a_fraction_of_none() -> None:
    split, _ = held_out_documents(make_documents("a"), 0)
    assert make_documents("a")[0] not in split


@pytest.mark.parametrize(
    ("names", "fraction", "part"),
    [
        (["a"], 0.01, "holds out every document of 1"),
        ([], 0.01, "no document that is not empty"),
        (["a", "b"], 1.0, "found 1; a fraction"),
        (["a", "b"], -0.1, "found -0.1; a fraction"),
        (["a", "b"], float("nan"), "found nan; a fraction"),
    ],
)
def test_an_impossible_split_is_refused(names: list[str], fraction: float, part: str) -> None:
    with pytest.raises(InputError, match=part):
        held_out_documents(make_documents(*names), fraction)
