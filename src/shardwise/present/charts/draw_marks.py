"""Points, letters, stripes and legend samples as shapes, and the places of letters that would overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.present.charts.chart import Curve, LegendEntry, Points
from shardwise.present.charts.drawing import SMALL, Canvas
from shardwise.present.charts.palette import FAINT, HUES, INK, PAPER, Colour, by_name, shade

DASHES = ((), (9, 4), (3, 4), (12, 3, 3, 3), (18, 6), (8, 3, 2, 3, 2, 3), (5, 2))
REFERENCE, RULE, EDGE = (6, 4), (2, 3), (1, 3)
LETTER, LEADER = 9.0, 30.0  # radius of a letter's circle, and how far above its point it stands
LARGEST, LEAST = 26.0, 4.0  # radius of a point whose share is 1, and of one without a share
STRIPE = 3.0
RING_CORNERS = 32
RADII = {"dot": 2.6, "disc": 7.0, "ring": 9.0, "triangle": 4.5, "cross": 8.0}
SCALE_WIDTH, SCALE_STEPS = 160.0, 16


def style_of(curve: Curve) -> tuple[Colour, float, Sequence[float]]:
    """Return colour, width and dashes of a curve; where colours repeat, dashes differ."""
    return _line_style(curve.colour, is_reference=curve.reference)


def _line_style(colour: str, *, is_reference: bool) -> tuple[Colour, float, Sequence[float]]:
    if is_reference:
        return by_name(colour), 2.0, REFERENCE
    number = int(colour.removeprefix("series:")) if colour.startswith("series:") else 0
    turn, place = divmod(number, len(HUES))
    return by_name(colour), 3.0, DASHES[(place + turn) % len(DASHES)]


def point_radius(mark: Points) -> float:
    """Return the radius of a point: that of its shape, or of a circle whose area is its share."""
    if mark.shape != "circle":
        return RADII[mark.shape]
    return max(LEAST, LARGEST * math.sqrt(mark.share)) if mark.letter else LEAST if mark.texts else 3.5


def draw_point(canvas: Canvas, x: float, y: float, mark: Points) -> None:
    """Draw a mark's shape; for a circle a square where the colours of series repeat."""
    radius, fill = point_radius(mark), by_name(mark.colour)
    if mark.shape == "ring":
        turns = (2 * math.pi * step / RING_CORNERS for step in range(RING_CORNERS + 1))
        corners = [(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns]
        canvas.path(corners, stroke=fill, width=2.6)
        return
    if mark.shape == "cross":
        for start, end in (((x - radius, y), (x + radius, y)), ((x, y - radius), (x, y + radius))):
            canvas.path([start, end], stroke=fill, width=3.0)
        return
    if mark.shape == "triangle":
        canvas.area([(x, y - radius - 1), (x + radius + 1, y + radius), (x - radius - 1, y + radius)], fill=fill)
        return
    thick = 1.5 if mark.letter or mark.texts else 0.5
    if (
        mark.colour.startswith("series:")
        and int(mark.colour.removeprefix("series:")) // len(HUES) % 2
        and not mark.letter
    ):
        canvas.rect(x - 3.2, y - 3.2, 6.4, 6.4, fill=fill, stroke=PAPER, stroke_width=thick)
    else:
        canvas.circle(x, y, radius, fill=fill, stroke=INK if mark.shape == "disc" else PAPER, stroke_width=thick)


def draw_letter(canvas: Canvas, x: float, y: float, letter: str) -> None:
    canvas.circle(x, y, LETTER, fill=PAPER, stroke=INK)
    canvas.text(x, y + 4.2, letter, size=SMALL, anchor="middle", bold=True)


def draw_stripe(canvas: Canvas, left: float, bottom: float, width: float, ink: Colour) -> None:
    inset = min(2.0, width / 4)
    canvas.rect(left + inset, bottom - STRIPE - 1.0, width - 2 * inset, STRIPE, fill=ink)


def draw_sample(canvas: Canvas, entry: LegendEntry, x: float, y: float, width: float) -> float:
    """Draw a legend's sample around the height y; return where it ends."""
    match entry.sample:
        case "line" | "reference":
            colour, thick, dash = _line_style(entry.colour, is_reference=entry.sample == "reference")
            canvas.path([(x, y), (x + width, y)], stroke=colour, width=thick, dash=dash)
        case "limit":
            canvas.path([(x, y), (x + width, y)], stroke=INK, width=1.5, dash=REFERENCE)
        case "band" | "idle" | "stripe":
            canvas.rect(x, y - 7.0, width, 14.0, fill=by_name(entry.colour), stroke=FAINT)
            if entry.sample == "stripe":
                draw_stripe(canvas, x, y + 7.0, width, INK)
        case "point":
            draw_point(canvas, x + width / 2, y, Points(points=(), colour=entry.colour))
        case "circle" | "dot" | "disc" | "ring" | "triangle" | "cross":
            draw_point(canvas, x + width / 2, y, Points(points=(), colour=entry.colour, shape=entry.sample))
        case "letter":
            draw_letter(canvas, x + width / 2, y, entry.letter)
        case "scale":
            width = SCALE_WIDTH
            for step in range(SCALE_STEPS):
                part = width / SCALE_STEPS
                canvas.rect(x + part * step, y - 7.0, part, 14.0, fill=shade((step + 0.5) / SCALE_STEPS))
            canvas.rect(x, y - 7.0, width, 14.0, stroke=FAINT)
        case "box":
            width = min(width, 14.0)
            canvas.rect(x, y - 7.0, width, 14.0, fill=by_name(entry.colour), radius=2)
    return x + width


def letter_places(places: Sequence[tuple[float, float]], radii: Sequence[float]) -> list[tuple[float, float]]:
    """Return where letters stand: above their points, those of points at like heights side by side."""
    rows: dict[int, list[int]] = {}
    for i in sorted(range(len(places)), key=lambda i: (round(places[i][1] / LEADER), places[i][0])):
        rows.setdefault(round(places[i][1] / LEADER), []).append(i)
    letters: dict[int, tuple[float, float]] = {}
    for row in rows.values():
        height = min(places[i][1] - radii[i] for i in row) - LEADER + LETTER
        letters |= {
            i: (x, height) for i, x in zip(row, apart([places[i][0] for i in row], 2 * LETTER + 3), strict=True)
        }
    return [letters[i] for i in range(len(places))]


def apart(places: Sequence[float], distance: float) -> list[float]:
    """Return the nearest places to some in order that are no nearer to each other than a distance.

    >>> apart([0.0, 1.0, 50.0], 10.0)
    [-4.5, 5.5, 50.0]
    """
    runs: list[tuple[float, int]] = []  # sum of where runs would begin, and how many are in them
    for number, place in enumerate(places):
        total, count = place - number * distance, 1
        while runs and runs[-1][0] / runs[-1][1] > total / count:
            before, more = runs.pop()
            total, count = total + before, count + more
        runs.append((total, count))
    begins = [total / count for total, count in runs for _ in range(count)]
    return [begin + number * distance for number, begin in enumerate(begins)]
