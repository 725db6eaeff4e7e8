"""The texts of a picture with their boxes, and the check that all are on the page and do not overlap."""

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
    text_boxes = []
    for element in parsed(drawing).iter(f"{SVG}text"):
        if element.get("transform") is None:
            content, size = element.text or "", float(element.get("font-size", "13"))
            bold = element.get("font-weight") == "bold"
            x, y, width = (
                float(element.get("x", "0")),
                float(element.get("y", "0")),
                text_width(content, size, bold=bold),
            )
            left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor", "start")] * width
            text_boxes.append((content, left, y - 0.75 * size, left + width, y))
    return text_boxes


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
    text_boxes = boxes(drawing)
    for content, left, top, right, bottom in text_boxes:
        assert left >= 0, content
        assert top >= 0, content
        assert right <= width, content
        assert bottom <= height - 4, content
    assert all(float(element.get("font-size", "13")) >= 11 for element in root.iter(f"{SVG}text"))
    for (first, *first_box), (second, *second_box) in combinations(text_boxes, 2):
        apart = (
            first_box[2] <= second_box[0]
            or second_box[2] <= first_box[0]
            or first_box[3] <= second_box[1]
            or second_box[3] <= first_box[1]
        )
        assert apart, f"{first!r} overlaps {second!r}"
