"""Drawings as figures of matplotlib, and as PNG and PDF through it. An optional dependency: `shardwise[plot]`.

A figure is what SVG shows on a light page: the same marks at the same places, a pixel a hundredth of an inch.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

from shardwise.present.charts.drawing import Area, Circle, Drawing, Mark, Path, Rect, Text
from shardwise.present.charts.palette import PAPER, Colour
from shardwise.values import InputError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

PER_INCH = 100.0  # pixels of a drawing
POINT = 72.0 / PER_INCH  # of a pixel
DENSITY = 2.0  # pixels of a PNG for one of the drawing
FONT = "DejaVu Sans"  # matplotlib has it; widths of texts are reckoned with it
ENDINGS = (".svg", ".png", ".pdf")
ALIGNED: dict[str, Literal["left", "center", "right"]] = {"start": "left", "middle": "center", "end": "right"}
FIX = "pip install 'shardwise[plot]'"


def require_matplotlib(picture: str) -> None:
    """Raise `InputError` where matplotlib is not installed; the message begins with the `picture` that requires it."""
    if find_spec("matplotlib") is None:
        raise InputError(f"{picture}: found no matplotlib; it is required for pictures other than SVG: {FIX}")


def encoded(drawing: Drawing, ending: str) -> bytes:
    """Return the drawing as a file that ends in `ending`, one of `ENDINGS`. The same drawing gives the same bytes."""
    if ending == ".svg":
        return drawing.svg().encode()
    buffer = BytesIO()
    metadata = {"Title": drawing.title} | ({"CreationDate": None} if ending == ".pdf" else {})
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing", UserWarning
        )  # of a name in another script: a box stands for it
        figure(drawing).savefig(buffer, format=ending[1:], dpi=PER_INCH * DENSITY, metadata=metadata)
    return buffer.getvalue()


def figure(drawing: Drawing) -> Figure:
    """Return the drawing as a figure without axes. Raises `InputError` where matplotlib is not installed."""
    require_matplotlib("figure")
    from matplotlib.figure import Figure

    page = Figure(figsize=(drawing.width / PER_INCH, drawing.height / PER_INCH), dpi=PER_INCH, facecolor=PAPER.light)
    axes = page.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0.0, drawing.width), ylim=(drawing.height, 0.0))
    axes.set_axis_off()
    for order, mark in enumerate(drawing.marks):
        artist = _artist(mark)
        artist.set_zorder(order)
        axes.add_artist(artist)
    return page


def _artist(mark: Mark) -> Artist:
    """Return a mark in the coordinates of the drawing."""
    from matplotlib import lines, patches, text

    match mark:
        case Rect():
            return _rectangle(mark)
        case Path():
            across, down = zip(*mark.points, strict=True)
            dash = tuple(length / mark.stroke_width for length in mark.dash)  # matplotlib multiplies by the width
            style: Any = (0, dash) if dash else "solid"
            width = mark.stroke_width * POINT
            return lines.Line2D(across, down, color=mark.stroke.light, linewidth=width, linestyle=style)
        case Area():
            return patches.Polygon(mark.points, closed=True, facecolor=mark.fill.light, edgecolor="none")
        case Circle():
            return patches.Circle((mark.x, mark.y), mark.radius, **_paint(mark.fill, mark.stroke, mark.stroke_width))
        case Text():
            return text.Text(
                mark.x, mark.y, mark.content, color=mark.fill.light, fontsize=mark.size * POINT, fontfamily=FONT,
                fontweight="bold" if mark.bold else "normal", verticalalignment="baseline",
                horizontalalignment=ALIGNED[mark.anchor],
                rotation=90.0 if mark.upward else 0.0, rotation_mode="anchor", parse_math=False,
            )  # fmt: skip


def _rectangle(mark: Rect) -> Artist:
    from matplotlib import patches

    paint = _paint(mark.fill, mark.stroke, mark.stroke_width)
    radius = min(mark.radius, mark.width / 2, mark.height / 2)
    if radius <= 0:
        return patches.Rectangle((mark.x, mark.y), mark.width, mark.height, **paint)
    corners = f"Round, pad=0, rounding_size={radius}"
    return patches.FancyBboxPatch((mark.x, mark.y), mark.width, mark.height, boxstyle=corners, **paint)


def _paint(fill: Colour | None, stroke: Colour | None, width: float) -> dict[str, Any]:
    return {
        "facecolor": fill.light if fill else "none", "edgecolor": stroke.light if stroke else "none",
        "linewidth": width * POINT if stroke else 0.0,
    }  # fmt: skip
