"""The page that charts are drawn on: its margins, sizes of text, the colours of lines, and the primitives only charts need.

A legend stands beside or under the plot, never in it; widths are those of a wide sans serif, so that nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.draw.svg import INK, Drawing

SIZE, CHARACTER = 13.0, 0.6  # of text, and the width of a character for each unit of size
MARGIN, ROW = 24.0, 22.0
LEFT, SAMPLE = 84.0, 30.0
GRID = "#e3e7eb"
LINE_COLOURS = (0, 4, 2, 5, 6, 1, 7)  # dark enough on white; yellow is not


def text_width(text: str, size: float = SIZE) -> float:
    """Pixels that a text takes at most in a usual sans serif."""
    return CHARACTER * size * len(text)


class Canvas(Drawing):
    """A drawing with the primitives that only charts need."""

    def polyline(
        self, points: Sequence[tuple[float, float]], *, stroke: str, stroke_width: float, dash: str = "none"
    ) -> None:
        """Straight lines through points, with round joints."""
        shown = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._put(
            "polyline", points=shown, fill="none", stroke=stroke, stroke_width=stroke_width, stroke_dasharray=dash,
            stroke_linejoin="round",
        )  # fmt: skip

    def circle(self, x: float, y: float, radius: float, *, fill: str, stroke: str, stroke_width: float = 1.5) -> None:
        """A circle around (x, y)."""
        self._put("circle", cx=x, cy=y, r=radius, fill=fill, stroke=stroke, stroke_width=stroke_width)

    def upward_text(self, x: float, y: float, content: str) -> None:
        """Text that reads upwards, centred on (x, y)."""
        turn = f"rotate(-90 {x:.2f} {y:.2f})"
        self._put("text", content, x=x, y=y, font_size=SIZE, fill=INK, text_anchor="middle", transform=turn)

    def heading(self, title: str, subtitle: str) -> None:
        """Title and subtitle in the upper left corner."""
        self.text(MARGIN, MARGIN + 16.0, title, size=18.0, weight="bold")
        self.text(MARGIN, MARGIN + 38.0, subtitle)
