"""The texts of a picture with the boxes that they take, and the check that all are on the page and apart."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

from shardwise.draw.canvas import text_width

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Content and box (left, top, right, bottom) of every horizontal text."""
    found = []
    for one in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        if one.get("transform") is None:
            content, size = one.text or "", float(one.get("font-size", "13"))
            x, y, width = float(one.get("x", "0")), float(one.get("y", "0")), text_width(content, size)
            left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")] * width
            found.append((content, left, y - 0.75 * size, left + width, y))
    return found


def texts(svg: str) -> list[str]:
    """Content of every horizontal text."""
    return [content for content, *_ in boxes(svg)]


def check_texts(svg: str) -> None:
    """Every text is on the page, and none runs over another."""
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    found = boxes(svg)
    for content, left, top, right, bottom in found:
        assert left >= 0, content
        assert top >= 0, content
        assert right <= width, content
        assert bottom <= height - 4, content
    for (one, *a), (other, *b) in combinations(found, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{one!r} on {other!r}"
