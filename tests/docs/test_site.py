"""Links of the documents resolve, in the repository and on the site; generated pages have all that they are made from."""

from __future__ import annotations

import argparse
import doctest
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardwise as sw
from shardwise.present.command_line import verb_parsers
from shardwise.present.json_schemas import PAYLOADS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "generate"))
links, stage, offline, cli_pages, api_pages, floors = map(
    import_module, ("links", "stage", "offline", "cli_pages", "api_pages", "floors")
)

DOCUMENTS = (ROOT / "README.md", *stage.documents())
GENERATED = {"python.md", "cli.md", "schemas.md", "index.md"}  # of docs/reference, made when the site is
NAMES = [document.relative_to(ROOT).as_posix() for document in DOCUMENTS]
COMMAND = re.compile(r"^(?:\$ )?(shardwise (?:[^\n]*\\\n)*[^\n]+)$", re.MULTILINE)
INLINE = re.compile(r"`(shardwise [a-z][^`]*)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_relative_links_and_anchors_resolve(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in links.relative_links(text):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if target.parent.name in ("reference", "rooms") and target.name in GENERATED:
            continue
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in links.anchors(target.read_text(encoding="utf-8")), f"{link}: no such anchor"


def test_pages_of_the_site_have_the_links_of_the_documents(tmp_path: Path) -> None:
    stage.stage(tmp_path)
    pages = [page for page in tmp_path.rglob("*.md") if stage.SOURCES not in page.parts]
    for page in pages:
        for link in links.relative_links(page.read_text(encoding="utf-8")):
            target = (page.parent / link.partition("#")[0]).resolve()
            assert target.is_relative_to(tmp_path), f"{page}: {link} leaves the site"
            assert not link.partition("#")[0] or target.is_file(), f"{page}: {link}"
    written = {page.relative_to(tmp_path).as_posix() for page in pages}
    in_nav = set(targets(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Nav)["nav"]))
    listed_elsewhere = re.compile(r"reference/rooms/(?!index)|decisions/\d")
    assert in_nav == {page for page in written if not listed_elsewhere.match(page)}


def test_the_list_of_decisions_is_complete_and_each_has_a_status_and_a_date() -> None:
    folder = ROOT / "docs" / "decisions"
    files = sorted(folder.glob("[0-9]*.md"))
    assert [int(file.name[:3]) for file in files] == list(range(1, len(files) + 1))
    index = (folder / "README.md").read_text(encoding="utf-8")
    for file in files:
        title, _, status = file.read_text(encoding="utf-8").splitlines()[:3]
        assert re.fullmatch(r"Status: (accepted|superseded by \d{3})\. Date: \d{4}-\d\d-\d\d\.", status), file.name
        assert f"| [{file.name[:3]}]({file.name}) | {title.removeprefix('# ')} |" in index


def test_the_picture_of_the_floors_is_that_of_the_import_rules() -> None:
    assert floors.PICTURE.read_text(encoding="utf-8") == floors.draw_floors(floors.floors())


class _Nav(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects that it names."""


_Nav.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def targets(nav: Any) -> list[str]:
    """The pages of a navigation, however deep."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in targets(part)]


def test_the_reference_has_every_verb_and_every_flag() -> None:
    page = cli_pages.cli_reference("0")
    for verb, parser in verb_parsers().items():
        section = page.split(f"\n## {verb}\n")[1].split("\n## ")[0]
        for action in parser._actions:
            if action.dest != "help" and action.help != argparse.SUPPRESS:
                assert all(f"`{name}" in section for name in action.option_strings or [cli_pages.value_of(action)])


def test_the_reference_has_every_public_name_and_every_room() -> None:
    page = api_pages.names_page(sw.__all__)
    assert {name for name in sw.__all__ if not name.startswith("_")} == set(
        re.findall(r"^::: shardwise\.(\w+)$", page, re.M)
    )
    rooms = set(api_pages.rooms())
    in_sources = {
        path.stem
        for path in (ROOT / "src" / "shardwise").iterdir()
        if path.name[0] not in "_." and path.name != "py.typed"
    }
    assert rooms == in_sources


def test_the_reference_has_every_payload() -> None:
    from schema_pages import schema_files

    files = schema_files()
    for verb in PAYLOADS:
        for name in sw.json_schemas(verb):
            assert f"## {name}\n" in files["schemas.md"]
            assert f"schemas/{name.replace('/', '-')}.json" in files


def test_examples_of_the_generators() -> None:
    result = doctest.testmod(links)
    assert result.attempted > 0
    assert result.failed == 0


def test_examples_of_docstrings_are_blocks_of_code() -> None:
    fenced = import_module("doctest_blocks").fenced
    assert fenced("One.\n\n>>> 1 + 1\n2\n\nMore.") == "One.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    assert fenced(">>> f(\n...     [8, 16])\n(1,)") == "```pycon\n>>> f(\n...     [8, 16])\n(1,)\n```"


def test_loads_from_other_hosts_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://x.org">x</a><link rel="canonical" href="https://x.org"><img src="b.svg">'
    )
    assert not list(offline.loaded_from_elsewhere(tmp_path))
    (tmp_path / "a.html").write_text(
        '<script src="https://x.org/a.js"></script><link rel="stylesheet" href="//x.org/a.css">'
    )
    (tmp_path / "a.css").write_text("@font-face { src: url('https://x.org/a.woff2') } a { background: url(b.svg) }")
    assert list(offline.loaded_from_elsewhere(tmp_path)) == [
        "a.html: https://x.org/a.js", "a.html: //x.org/a.css", "a.css: https://x.org/a.woff2",
    ]  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_commands_that_are_not_run_are_commands(document: Path) -> None:
    """What test_sessions.py runs is run there; of all others the verb and the flags exist."""
    text, known = document.read_text(encoding="utf-8"), verb_parsers()
    written = [command for fence in links.FENCE.finditer(text) for command in COMMAND.findall(fence.group())]
    written += INLINE.findall(links.FENCE.sub("", text))
    for command in written:
        words = shlex.split(command.replace("\\\n", " ").split(" #")[0])[1:]
        if words and words[0][0] != "-":
            assert words[0] in known, command
            flags = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
            assert flags <= known[words[0]]._option_string_actions.keys(), command
