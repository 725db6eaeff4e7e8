"""Texts use the words of the glossary: the phrases that `CONTRIBUTING.md` replaces are found nowhere."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.present.cli import build_parser, verb_parsers

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "shardwise"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
TABLE = re.compile(r"## Phrases that are replaced\n.*?\|---\|---\|\n((?:\|[^\n]*\n?)+)", re.DOTALL)


def replacements() -> dict[str, str]:
    """The table: a phrase, and what to say."""
    rows = TABLE.search(CONTRIBUTING.read_text(encoding="utf-8"))
    assert rows is not None
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.group(1).splitlines()]
    return {phrase: say for phrases, say in cells for phrase in phrases.split(", ")}


SAY = replacements()
CODE = re.compile(r"(?<!`)`[^`\n]+`(?!`)|^ *(?:>>>|\.\.\.) [^\n]*$", re.MULTILINE)  # names, and the input of an example
PHRASE = re.compile(rf"\b(?:{'|'.join(map(re.escape, SAY))})\b", re.IGNORECASE)


def replaced(text: str) -> list[str]:
    """A line for each phrase of the text that the table replaces, wherever the text's lines break."""
    words = re.sub(r"\s+", " ", CODE.sub("", text))
    return [
        f"...{words[max(hit.start() - 40, 0) : hit.end() + 40]}...: say {SAY[hit.group().lower()]}"
        for hit in PHRASE.finditer(words)
    ]


def texts_of(source: str) -> Iterator[str]:
    """Every string of a Python source, messages and docstrings, and its comments as one text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)


DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
DATA = sorted(path for suffix in ("toml", "js", "html", "css") for path in SOURCES.rglob(f"*.{suffix}"))


@pytest.mark.parametrize("path", [*DOCUMENTS, *DATA], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_catalogues_and_the_page(path: Path) -> None:
    assert replaced(TABLE.sub("", path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "room", sorted(path for path in SOURCES.iterdir() if path.name[0] not in "_."), ids=lambda path: path.stem
)
def test_messages_docstrings_and_comments(room: Path) -> None:
    sources = [room] if room.suffix == ".py" else sorted(room.rglob("*.py"))
    hits = {
        path.relative_to(SOURCES).as_posix(): found
        for path in sources
        if (found := [line for text in texts_of(path.read_text(encoding="utf-8")) for line in replaced(text)])
    }
    assert hits == {}


@pytest.mark.parametrize("verb", ["", *verb_parsers()])
def test_help(verb: str) -> None:
    parser = verb_parsers()[verb] if verb else build_parser()
    assert replaced(parser.format_help()) == []


@pytest.mark.parametrize("phrase", SAY)
def test_a_phrase_of_the_table_is_found(phrase: str) -> None:
    first, _, rest = phrase.partition(" ")
    for text in (phrase, phrase.capitalize(), f"({first}\n    {rest})".replace(" )", ")")):
        assert replaced(f"Here {text}, say.") != []
    (found,) = replaced(f"a {phrase} b")
    assert found.endswith(f"say {SAY[phrase]}")


def test_strings_docstrings_and_comments_of_a_source_are_read() -> None:
    source = (
        'def f(x):\n    """It is\n    told."""\n    # made\n    # anew\n    raise InputError(f"x {x}: as of today")\n'
    )
    hits = [line for text in texts_of(source) for line in replaced(text)]
    assert [line.rpartition(": ")[2] for line in hits] == [f"say {SAY[p]}" for p in ("is told", "of today", "anew")]


def test_other_words_and_code_are_left_alone() -> None:
    assert replaced("Its `hear` is:\n\n>>> heard = hear(1)\n") == []
    assert replaced("A rehearsal, a change on disk, a letter of a gradient, renewed.") == []
