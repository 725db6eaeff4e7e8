"""SVG primitives: well-formed, deterministic, escaped, nothing outside the page."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

from shardwise.draw.svg import COLOURS, Cell, Drawing, Frame, colour, number, strip

from .page import SVG


def test_primitives_and_groups() -> None:
    drawing = Drawing(100, 50.5, "a < b")
    with drawing.group(x=10, y=20):
        drawing.rect(1, 2, 3, 4, fill="#fff")
        drawing.line(0, 0, 5, 5)
    drawing.text(50, 25, 'x < "y" & z', anchor="middle")
    root = ElementTree.fromstring(drawing.render())
    group = root.find(f"{SVG}g")
    assert root.get("viewBox") == "0 0 100 50.5"
    assert group is not None
    assert group.get("transform") == "translate(10 20)"
    assert [one.tag.removeprefix(SVG) for one in group] == ["rect", "line"]
    assert [one.text for one in root.iter(f"{SVG}text")] == ['x < "y" & z']
    assert root.findtext(f"{SVG}title") == "a < b"


def test_the_page_is_white() -> None:
    root = ElementTree.fromstring(Drawing(10, 10, "").render())
    paper = root.find(f"{SVG}rect")
    assert paper is not None
    assert (paper.get("width"), paper.get("fill")) == ("100%", "#ffffff")


def test_numbers_are_short_and_have_no_negative_zero() -> None:
    assert [number(value) for value in (1.0, 0.1 + 0.2, -0.001, 100.0, -2.5, 1 / 3)] == [
        "1", "0.3", "0", "100", "-2.5", "0.33",
    ]  # fmt: skip


def test_colours_differ_and_repeat() -> None:
    assert len(set(COLOURS)) == 16
    assert colour(16) == colour(0)


def test_black_text_is_legible_on_every_colour() -> None:
    """WCAG's contrast ratio to the ink is at least 4.5."""

    def luminance(text: str) -> float:
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ink = luminance("#1c2733")
    assert min((luminance(one) + 0.05) / (ink + 0.05) for one in COLOURS) >= 4.5


def strip_of(num_frames: int, num_devices: int) -> ElementTree.Element:
    cells = tuple(Cell(row=i, colour=i, label=str(i), share=0.5, new=i == 0) for i in range(3))
    frames = [Frame(title=f"frame {i}", columns=(cells,) * num_devices) for i in range(num_frames)]
    return ElementTree.fromstring(strip("title", "subtitle", [str(i) for i in range(num_devices)], frames, "legend"))


def test_a_strip_wraps_and_stays_on_its_page() -> None:
    for num_frames, num_devices in ((1, 1), (5, 4), (9, 16), (3, 40)):
        root = strip_of(num_frames, num_devices)
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for group in root.iter(f"{SVG}g"):
            found = re.fullmatch(r"translate\((\S+) (\S+)\)", group.get("transform", ""))
            assert found
            for rect in group.iter(f"{SVG}rect"):
                assert float(found[1]) + float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
                assert float(found[2]) + float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height
        assert len(list(root.iter(f"{SVG}g"))) == num_frames
        assert {"title", "subtitle", "legend", "frame 0"} <= {one.text for one in root.iter(f"{SVG}text")}


def test_frames_do_not_overlap() -> None:
    root = strip_of(9, 4)
    places = set()
    for group in root.iter(f"{SVG}g"):
        found = re.fullmatch(r"translate\((\S+) (\S+)\)", group.get("transform", ""))
        assert found
        places.add((float(found[1]), float(found[2])))
    columns = sorted({x for x, _ in places})
    assert len(places) == 9
    assert min(b - a for a, b in pairwise(columns)) > 4 * 30
