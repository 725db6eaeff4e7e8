"""Drawings as SVG: a document with a title and a description, light, and dark where the reader's page is.

Colours are attributes, for programs that know no style sheets, and classes, which a style sheet changes on dark pages.
"""

from __future__ import annotations

from html import escape
from itertools import groupby

from shardwise.present.charts.drawing import About, Area, Circle, Drawing, Mark, Path, Place, Rect, Text
from shardwise.present.charts.palette import PAPER, Colour

FONT = "Inter, 'DejaVu Sans', Helvetica, Arial, sans-serif"
PREFIX = "sw"  # of classes: several pictures may stand in one page, and all mean the same by them


def number(value: float) -> str:
    """Return a coordinate with at most two decimals, so that drawings do not depend on rounding noise."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")


def render(drawing: Drawing) -> str:
    """Return the SVG document."""
    writer = _Writer()
    body = [writer.element("rect", width="100%", height="100%", fill=PAPER)]
    for about, marks in groupby(drawing.marks, key=lambda mark: mark.about):
        elements = map(writer.mark, marks)
        body += elements if about is None else [_group(about, "".join(elements))]
    size = f'width="{number(drawing.width)}" height="{number(drawing.height)}"'
    box = f'viewBox="0 0 {number(drawing.width)} {number(drawing.height)}" style="max-width:100%;height:auto"'
    aria_label = escape(". ".join(filter(None, (drawing.title, drawing.description))))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} font-family="{FONT}" role="img" aria-label="{aria_label}">'
    about = [f"<title>{escape(drawing.title)}</title>"]
    about += [f"<desc>{escape(drawing.description)}</desc>"] if drawing.description else []
    lines = [*about, f"<style>{writer.style()}</style>", *body]
    return "\n".join([head, *(f"  {line}" for line in lines), "</svg>"]) + "\n"


class _Writer:
    """A writer of marks as elements, which notes the colours that they have."""

    def __init__(self) -> None:
        self.used: dict[str, str] = {}  # what a dark page changes, by class

    def style(self) -> str:
        rules = "".join(f".{name}{{{rule}}}" for name, rule in sorted(self.used.items()))
        return f"@media (prefers-color-scheme: dark){{{rules}}}"

    def mark(self, mark: Mark) -> str:
        match mark:
            case Rect():
                return self.element(
                    "rect", x=mark.x, y=mark.y, width=mark.width, height=mark.height, rx=mark.radius,
                    fill=mark.fill or "none", stroke=mark.stroke, stroke_width=mark.stroke_width,
                )  # fmt: skip
            case Path():
                return self.element(
                    "polyline", points=_format_points(mark.points), fill="none",
                    stroke=mark.stroke, stroke_width=mark.stroke_width,
                    stroke_dasharray=" ".join(map(number, mark.dash)) or None, stroke_linejoin="round",
                )  # fmt: skip
            case Area():
                return self.element("polygon", points=_format_points(mark.points), fill=mark.fill)
            case Circle():
                return self.element(
                    "circle", cx=mark.x, cy=mark.y, r=mark.radius,
                    fill=mark.fill, stroke=mark.stroke, stroke_width=mark.stroke_width,
                )  # fmt: skip
            case Text():
                return self.text(mark)

    def text(self, mark: Text) -> str:
        return self.element(
            "text", mark.content, x=mark.x, y=mark.y, font_size=mark.size, fill=mark.fill,
            text_anchor=None if mark.anchor == "start" else mark.anchor, font_weight="bold" if mark.bold else None,
            transform=f"rotate(-90 {number(mark.x)} {number(mark.y)})" if mark.upward else None,
        )  # fmt: skip

    def element(self, tag: str, content: str | None = None, **attributes: str | float | Colour | None) -> str:
        """Return an element, without attributes that are None or have their default of 0."""
        classes = [self.classed(name, value) for name, value in attributes.items() if isinstance(value, Colour)]
        attribute_texts = [f'class="{" ".join(classes)}"'] if classes else []
        for name, value in attributes.items():
            if value is not None and not (value == 0 and name in ("rx", "stroke_width")):
                attribute_texts.append(f'{name.replace("_", "-")}="{_written(value)}"')
        body = "/>" if content is None else f">{escape(content)}</{tag}>"
        return f"<{tag} {' '.join(attribute_texts)}{body}"

    def classed(self, name: str, value: Colour) -> str:
        """Return the class of a colour in an attribute, and note it for the style sheet."""
        class_name = f"{PREFIX}-{name}-{value.name}"
        self.used[class_name] = f"{name}:{value.dark}"
        return class_name


def _group(about: About, elements: str) -> str:
    """Return the elements of one datum, with its text for the pointer, its path and its query."""
    attributes = "".join(
        f' data-{name}="{escape(value)}"' for name, value in (("path", about.path), ("query", about.query)) if value
    )
    return f"<g{attributes}>{f'<title>{escape(about.hover)}</title>' if about.hover else ''}{elements}</g>"


def _written(value: str | float | Colour) -> str:
    if isinstance(value, Colour):
        return value.light
    return escape(value) if isinstance(value, str) else number(value)


def _format_points(points: tuple[Place, ...]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
