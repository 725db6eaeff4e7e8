"""The texts of a picture with the boxes that they take, and the check that all are on the page and apart."""

from __future__ import annotations

from itertools import combinations
from typing import TypeVar
from xml.etree import ElementTree

from shardwise.present.charts.chart import Chart
from shardwise.present.charts.drawing import Drawing, text_width

Mark = TypeVar("Mark")
SVG = "{http://www.w3.org/2000/svg}"


def marks_of(chart: Chart, kind: type[Mark], panel: int = 0) -> list[Mark]:
    """The marks of one kind in a panel."""
    return [mark for mark in chart.panels[panel].marks if isinstance(mark, kind)]


def boxes(drawing: Drawing | str) -> list[tuple[str, float, float, float, float]]:
    """Content and box (left, top, right, bottom) of every horizontal text."""
    found = []
    for one in parsed(drawing).iter(f"{SVG}text"):
        if one.get("transform") is None:
            content, size = one.text or "", float(one.get("font-size", "13"))
            bold = one.get("font-weight") == "bold"
            x, y, width = float(one.get("x", "0")), float(one.get("y", "0")), text_width(content, size, bold=bold)
            left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")] * width
            found.append((content, left, y - 0.75 * size, left + width, y))
    return found


def parsed(drawing: Drawing | str) -> ElementTree.Element:
    """The root of an SVG document."""
    return ElementTree.fromstring(drawing if isinstance(drawing, str) else drawing.svg())


def texts(drawing: Drawing | str) -> list[str]:
    """Content of every horizontal text."""
    return [content for content, *_ in boxes(drawing)]


def check_texts(drawing: Drawing | str) -> None:
    """Every text is on the page and legible, and none runs over another."""
    root = parsed(drawing)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    found = boxes(drawing)
    for content, left, top, right, bottom in found:
        assert left >= 0, content
        assert top >= 0, content
        assert right <= width, content
        assert bottom <= height - 4, content
    assert all(float(one.get("font-size", "13")) >= 11 for one in root.iter(f"{SVG}text"))
    for (one, *a), (other, *b) in combinations(found, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{one!r} on {other!r}"
