"""Put the pages of the site into one folder: the documents, those of the repository's root, and the generated references.

    python docs/generate/stage.py build/pages

What comes out is plain Markdown with relative links. Files of the repository that a page links to are copied beside the pages, so
that the site needs no other host.
"""

from __future__ import annotations

import posixpath
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from api_pages import names_page, room_pages
from cli_pages import cli_reference
from links import SCHEME, replace_links
from schema_pages import schema_files

import shardwise

ROOT = Path(__file__).parents[2]
OF_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
FILES = ("assets", "pictures")  # folders of docs/ that go beside the pages as they are
SOURCES = "source"  # where the files that pages link to are copied


def stage(target: Path) -> None:
    """Write all pages into an empty folder. Raises `FileNotFoundError` for a link to a file that does not exist."""
    shutil.rmtree(target, ignore_errors=True)
    for source in documents():
        page = staged(source)
        text = source.read_text(encoding="utf-8")
        _write(target / page, replace_links(text, lambda link, at=source: _relinked(link, at, target)))
    for folder in FILES:
        shutil.copytree(ROOT / "docs" / folder, target / folder)
    reference = target / "reference"
    _write(reference / "cli.md", cli_reference(shardwise.__version__))
    _write(reference / "python.md", names_page(shardwise.__all__))
    for name, text in {**room_pages(), **schema_files()}.items():
        _write(reference / name, text)


def documents() -> Iterator[Path]:
    """The Markdown files that become pages."""
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from (ROOT / name for name, page in OF_ROOT.items() if page != "index.md" and (ROOT / name).is_file())


def staged(source: Path) -> str:
    """The path of a document among the pages, or of another file of the repository."""
    path = source.relative_to(ROOT).as_posix()
    if path in OF_ROOT:
        return OF_ROOT[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{SOURCES}/{path}"


def _relinked(link: str, source: Path, target: Path) -> str:
    """The link from the staged page to the same file; a file that is no page is copied."""
    path, hash_sign, anchor = link.partition("#")
    if SCHEME.match(link) or not path:
        return link
    linked = (source.parent / path).resolve()
    if not linked.is_relative_to(ROOT / "docs") and linked.name not in OF_ROOT:
        copy = target / staged(linked)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(linked, copy)
    return posixpath.relpath(staged(linked), posixpath.dirname(staged(source)) or ".") + hash_sign + anchor


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    stage(Path(sys.argv[1]).resolve())
