"""Texts use the words of the glossary: the phrases that `CONTRIBUTING.md` replaces are found nowhere. Names say what
they stand for, in words of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.present.command_line import build_parser, verb_parsers
from shardwise.present.json_schemas import PAYLOADS, json_schemas

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


# A determiner, preposition or participle without its noun fits anything, so that a reader must look up what it stands for.
PLACEHOLDERS = frozenset(
    re.findall(
        r"\w+",
        "again alike around asked at behind beside both drawn each found further given held kept known made many most needed obj "
        "of one other others own res ret said several shown some stuff taken temp thing things tmp together told wanted what "
        "whole words",
    )
)
# With a noun these say no more than the noun alone, or they stand for a word of the glossary. The value: what to write.
DIALECT = {
    **dict.fromkeys(("found", "given", "held", "made", "own", "wanted"), "what distinguishes it, or the noun alone"),
    **dict.fromkeys(("explained", "heard", "said", "told"), "a noun for a value, a verb and its object for a function"),
    **dict.fromkeys(("hear", "say"), "read, parse; print, report"),
    "asked": "requested", "farewell": "exit report", "meeting": "rendezvous", "one": "same, single, or the noun alone",
    "remat": "recompute", "sight": "mask", "silence": "seconds without a heartbeat",
}  # fmt: skip
# Terms of the field with one of these words.
FIELD_TERMS = ("held_out", "one_f_one_b", "one_hot", "one_way")
# Methods that read as a sentence with their class or value: `Mesh.of(sizes)`, `pricer.at(rates)`.
METHODS = frozenset({"at", "of", "connection_made"})  # and one of asyncio.Protocol
EXCEPTIONS = {
    "Zero3Elements.own": "`shardwise rule` prints it",
    "Choices.asked": "a key of plan files",
}


def printed_fields() -> frozenset[str]:
    """The keys of everything that `--json` prints: other programs read them, so fields of values keep these names."""

    def keys(schema: object) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from schema.get("properties", {})
        for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            yield from keys(part)

    return frozenset(key for verb in PAYLOADS for key in keys(list(json_schemas(verb).values())))


def names_of(source: str) -> Iterator[tuple[str, str, int]]:
    """Every name that a Python source binds: the name, its kind ("function", "field", "name"), its line. The name of a field
    begins with its class."""
    tree = ast.parse(source)
    fields = {
        field.target: f"{node.name}.{field.target.id}"
        for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        for field in node.body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }  # fmt: skip
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()) if node in fields:
                yield fields[node], "field", node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, "function", node.lineno
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.ClassDef(name=name)
                | ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name))
            ):  # fmt: skip
                yield name, "name", node.lineno


def unclear(name: str) -> str:
    """What is wrong with a name, or nothing."""
    words = "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower()
    for term in FIELD_TERMS:
        words = words.replace(term, "")
    if words in PLACEHOLDERS:
        return f"{name}: name it for what it holds"
    hits = [word for word in words.split("_") if word in DIALECT]
    return f"{name}: instead of `{hits[0]}` say {DIALECT[hits[0]]}" if hits else ""


def unclear_names(source: str, printed: frozenset[str]) -> Iterator[str]:
    """A line for each name of a source that does not say what it stands for."""
    for name, kind, line in names_of(source):
        _, _, bare = name.rpartition(".")
        is_allowed = (kind == "field" and bare in printed) or (kind == "function" and bare.strip("_") in METHODS)
        if not is_allowed and name not in EXCEPTIONS and (text := unclear(bare)):
            yield f"{line}: {text}"


DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
DATA = sorted(path for suffix in ("toml", "js", "html", "css") for path in SOURCES.rglob(f"*.{suffix}"))


@pytest.mark.parametrize("path", [*DOCUMENTS, *DATA], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_and_catalogues_avoid_replaced_words(path: Path) -> None:
    assert replaced(TABLE.sub("", path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "room", sorted(path for path in SOURCES.iterdir() if path.name[0] not in "_."), ids=lambda path: path.stem
)
def test_messages_docstrings_and_comments_avoid_replaced_words(room: Path) -> None:
    sources = [room] if room.suffix == ".py" else sorted(room.rglob("*.py"))
    hits = {
        path.relative_to(SOURCES).as_posix(): bad_lines
        for path in sources
        if (bad_lines := [line for text in texts_of(path.read_text(encoding="utf-8")) for line in replaced(text)])
    }
    assert hits == {}


def test_names_of_the_package_avoid_replaced_words() -> None:
    printed = printed_fields()
    hits = {
        path.relative_to(SOURCES).as_posix(): lines
        for path in sorted(SOURCES.rglob("*.py"))
        if (lines := [*filter(None, [unclear(path.stem)]), *unclear_names(path.read_text(encoding="utf-8"), printed)])
    }
    assert hits == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = 1", ["found"]),
        ("def made_plan(one, *, given_rows): ...", ["made_plan", "one", "given_rows"]),
        ("class HeldShards:\n    own: int\n    at: int", ["HeldShards", "own"]),
        ("self.meeting = 1\nwith f() as _own: ...\nimport x as what", ["meeting", "_own", "what"]),
        ("for each, (a, other) in b: [said for said in c]", ["each", "other", "said"]),
        ("try: ...\nexcept E as told: ...", ["told"]),
        ("match a:\n    case [of, *others]: ...", ["of", "others"]),
        ("class A:\n    def of(self): ...\n    def say(self): ...", ["say"]),
        ("FOUND_KEYS = foundTheKey = 1", ["FOUND_KEYS", "foundTheKey"]),
    ],
)
def test_an_unclear_name_is_found(source: str, names: list[str]) -> None:
    hits = list(unclear_names(source, frozenset({"at"})))
    assert sorted(line.split(": ")[1] for line in hits) == sorted(names)


def test_clear_names_are_left_alone() -> None:
    source = (
        "one_hot = held_out_loss = ONE_WAY = foundation = 1\nclass Mesh:\n    at: int\n    def of(self, sizes): ...\n"
    )
    assert list(unclear_names(source, frozenset({"at"}))) == []


@pytest.mark.parametrize("verb", ["", *verb_parsers()])
def test_help_avoids_replaced_words(verb: str) -> None:
    parser = verb_parsers()[verb] if verb else build_parser()
    assert replaced(parser.format_help()) == []


@pytest.mark.parametrize("phrase", SAY)
def test_a_phrase_of_the_table_is_found(phrase: str) -> None:
    first, _, remainder = phrase.partition(" ")
    for text in (phrase, phrase.capitalize(), f"({first}\n    {remainder})".replace(" )", ")")):
        assert replaced(f"Here {text}, say.") != []
    (message,) = replaced(f"a {phrase} b")
    assert message.endswith(f"say {SAY[phrase]}")


def test_strings_docstrings_and_comments_of_a_source_are_read() -> None:
    source = (
        'def f(x):\n    """It is\n    told."""\n    # made\n    # anew\n    raise InputError(f"x {x}: as of today")\n'
    )
    hits = [line for text in texts_of(source) for line in replaced(text)]
    assert [line.rpartition(": ")[2] for line in hits] == [f"say {SAY[p]}" for p in ("is told", "of today", "anew")]


def test_other_words_and_code_are_left_alone() -> None:
    assert replaced("Its `hear` is:\n\n>>> heard = hear(1)\n") == []
    assert replaced("A rehearsal, a change on disk, a letter of a gradient, renewed.") == []


def names_below(folder: str) -> Iterator[tuple[str, str, int]]:
    """Every name that the sources of a folder bind: the path, the name, its line. Names of tests are sentences, and left out."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name, _, line in names_of(path.read_text(encoding="utf-8")):
            if not (bare := name.rpartition(".")[2]).startswith("test_"):
                yield path.relative_to(ROOT).as_posix(), bare, line


def test_names_in_unit_tests() -> None:
    printed = printed_fields() | METHODS
    assert [hit for hit in names_below("tests/unit") if hit[1] not in printed and unclear(hit[1])] == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "docs"])
def test_names_in_tests_and_benchmarks(folder: str) -> None:
    """A part of the placeholders, which say nothing of a value of a test either."""
    placeholders = {
        "alone",
        "each",
        "found",
        "given",
        "held",
        "made",
        "mine",
        "most",
        "one",
        "others",
        "own",
        "said",
        "told",
        "what",
    }
    assert [hit for hit in names_below(folder) if hit[1] in placeholders] == []
