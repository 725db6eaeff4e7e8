"""The page that charts are drawn on: its margins, rows of text, title and subtitle.

A legend stands beside or under the plot, never in it; widths are those of a wide sans serif, so that nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.present.draw.drawing import SIZE, Drawing
from shardwise.present.draw.palette import PAPER
from shardwise.present.draw.text import text_width

MARGIN, ROW = 24.0, 22.0
LEFT, SAMPLE = 84.0, 30.0
SMALL = 11.0  # of text in a plot: none is smaller
TITLE = 18.0
HEADING = MARGIN + 56.0  # height of title and subtitle


class Canvas(Drawing):
    """A drawing with a title and a subtitle in its upper left corner, at least as wide as they are."""

    def __init__(self, width: float, height: float, title: str, subtitle: str) -> None:
        least = 2 * MARGIN + max(text_width(title, TITLE, bold=True), text_width(subtitle))
        super().__init__(max(width, least), height, title, subtitle)
        self.text(MARGIN, MARGIN + 16.0, title, size=TITLE, bold=True)
        self.text(MARGIN, MARGIN + 38.0, subtitle)

    def text_on_paper(
        self, x: float, y: float, content: str, *, size: float = SIZE, anchor: str = "start", bold: bool = False
    ) -> None:
        """Text on the page's colour, where lines run through."""
        width = text_width(content, size, bold=bold)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
        self.rect(left - 2, y - 0.85 * size, width + 4, 1.1 * size, fill=PAPER)
        self.text(x, y, content, size=size, anchor=anchor, bold=bold)


def flowed(labels: Sequence[str], beside: float, right: float) -> Iterator[tuple[str, float, int]]:
    """Legend entries from left to right and from row to row: label, left edge, row; `beside` a label is room for its mark."""
    x, row = MARGIN, 0
    for label in labels:
        width = beside + text_width(label)
        if x + width > right and x > MARGIN:
            x, row = MARGIN, row + 1
        yield label, x, row
        x += width
