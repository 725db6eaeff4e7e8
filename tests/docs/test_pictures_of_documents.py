"""Every picture of the documents: its texts are on the page, apart and legible, and it says what it is in light and in dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from unit.draw.page import SVG, check_texts, parsed

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = sorted(DOCS.rglob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=[picture.stem for picture in PICTURES])
def test_texts_are_on_the_page_and_apart(picture: Path) -> None:
    check_texts(picture.read_text(encoding="utf-8"))


@pytest.mark.parametrize("picture", PICTURES, ids=[picture.stem for picture in PICTURES])
def test_a_picture_says_what_it_is(picture: Path) -> None:
    root = parsed(picture.read_text(encoding="utf-8"))
    title = root.findtext(f"{SVG}title")
    assert title
    assert root.get("role") == "img"
    assert (root.get("aria-label") or "").startswith(title)
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")


def test_every_picture_is_in_a_document() -> None:
    shown = {
        (page.parent / name).resolve()
        for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md")
        for name in re.findall(r"!\[[^]]*\]\(([^)]+\.svg)\)", page.read_text(encoding="utf-8"))
    }
    assert set(PICTURES) == shown
