"""SVG: well-formed, deterministic, escaped, with a title for those who do not see it, light and dark."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from shardwise.present.charts.drawing import Drawing, below
from shardwise.present.charts.palette import BLUE, INK, ORANGE, PAPER
from shardwise.present.charts.svg import number

from .page import SVG, parsed


def drawing() -> Drawing:
    drawing = Drawing(100, 50.5, "a < b", 'c > "d"')
    with drawing.group(x=10, y=20):
        drawing.rect(1, 2, 3, 4, fill=BLUE)
        drawing.line(0, 0, 5, 5)
    drawing.text(50, 25, 'x < "y" & z', anchor="middle")
    drawing.circle(5, 5, 2, fill=ORANGE, stroke=PAPER)
    drawing.area([(0, 0), (1, 0), (1, 1)], fill=BLUE)
    drawing.text(5, 5, "up", upward=True)
    return drawing


def test_marks_are_elements_at_their_places() -> None:
    root = parsed(drawing())
    assert root.get("viewBox") == "0 0 100 50.5"
    tags = [element.tag.removeprefix(SVG) for element in root]
    assert tags == ["title", "desc", "style", "rect", "rect", "polyline", "text", "circle", "polygon", "text"]
    _, rect = root.findall(f"{SVG}rect")
    assert (rect.get("x"), rect.get("y"), rect.get("fill")) == ("11", "22", BLUE.light)
    line = root.find(f"{SVG}polyline")
    assert line is not None
    assert line.get("points") == "10.00,20.00 15.00,25.00"
    first, second = root.findall(f"{SVG}text")
    assert first.text == 'x < "y" & z'
    assert second.get("transform") == "rotate(-90 5 5)"


def test_a_picture_has_a_title_and_a_description() -> None:
    root = parsed(drawing())
    assert root.get("role") == "img"
    assert root.get("aria-label") == 'a < b. c > "d"'
    assert (root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")) == ("a < b", 'c > "d"')
    assert parsed(Drawing(1, 1, "alone")).get("aria-label") == "alone"


def test_a_dark_page_has_the_dark_colours() -> None:
    """Every coloured element has its light colour as an attribute, and a class that the style sheet makes dark."""
    root = parsed(drawing())
    style = root.findtext(f"{SVG}style") or ""
    assert style.startswith("@media (prefers-color-scheme: dark){")
    rules = dict(re.findall(r"\.([\w-]+)\{(?:fill|stroke):(#\w+)\}", style))
    assert rules == {
        "sw-fill-paper": PAPER.dark, "sw-fill-blue": BLUE.dark, "sw-fill-ink": INK.dark, "sw-fill-orange": ORANGE.dark,
        "sw-stroke-ink": INK.dark, "sw-stroke-paper": PAPER.dark,
    }  # fmt: skip
    light = {"blue": BLUE, "ink": INK, "paper": PAPER, "orange": ORANGE}
    for element in root.iter():
        for name in (element.get("class") or "").split():
            _, kind, colour = name.split("-")
            assert element.get(kind) == light[colour].light


def test_the_page_is_paper() -> None:
    paper = parsed(Drawing(10, 10, "")).find(f"{SVG}rect")
    assert paper is not None
    assert (paper.get("width"), paper.get("fill")) == ("100%", "#ffffff")


def test_the_same_drawing_gives_the_same_bytes() -> None:
    assert drawing().svg() == drawing().svg()
    assert ElementTree.fromstring(drawing().svg()).tag == f"{SVG}svg"


def test_numbers_are_short_and_have_no_negative_zero() -> None:
    assert [number(value) for value in (1.0, 0.1 + 0.2, -0.001, 100.0, -2.5, 1 / 3)] == [
        "1", "0.3", "0", "100", "-2.5", "0.33",
    ]  # fmt: skip


def test_stacked_drawings_do_not_overlap() -> None:
    page = below([drawing(), Drawing(300, 10, "second")])
    assert (page.width, page.height, page.title) == (300, 60.5, "a < b")
    assert page.marks == drawing().marks


def test_a_notebook_shows_the_picture() -> None:
    assert drawing()._repr_html_() == drawing().svg()
