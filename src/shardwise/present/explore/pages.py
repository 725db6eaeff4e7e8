"""The page's files, which travel with the package: read once, served as they are, put together for a report."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import NamedTuple

from shardwise.present.explore.colours import stylesheet

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}


class Page(NamedTuple):
    """A file: its text and media type."""

    text: str
    kind: str


@cache
def pages() -> dict[str, Page]:
    """Every file by its path; nothing else is served."""
    folder = resources.files("shardwise.present.explore").joinpath("page")
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        ending = file.name[file.name.rfind(".") :]
        if ending in KINDS:
            found[f"/{file.name}"] = Page(file.read_text(encoding="utf-8"), KINDS[ending])
    found["/colours.css"] = Page(stylesheet(), KINDS[".css"])
    return found | {"/": found["/index.html"]}
