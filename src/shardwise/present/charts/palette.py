"""Colours of charts by term and series, on light and dark pages; the same colours as a style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

Channels = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Colour:
    """A colour by name, as #rrggbb on a light and on a dark page."""

    name: str
    light: str
    dark: str


PAPER = Colour("paper", "#ffffff", "#0f1720")
INK = Colour("ink", "#1c2733", "#e6ebf0")  # text, and lines that others are compared with
FAINT = Colour("faint", "#76818d", "#808c98")  # frames and edges
GRID = Colour("grid", "#e3e7eb", "#26313d")  # behind the marks: nothing is read from it alone
EMPTY = Colour("empty", "#eef0f2", "#1b2530")  # where there is nothing: idle time, absent values

BLUE = Colour("blue", "#2d5da3", "#6d96fe")
ORANGE = Colour("orange", "#e57720", "#e78b0f")
GREEN = Colour("green", "#054603", "#b7eab3")
VIOLET = Colour("violet", "#8457e4", "#9347d0")
SKY = Colour("sky", "#179ddc", "#6ac8fc")
GOLD = Colour("gold", "#7f730e", "#fce162")
RED = Colour("red", "#c75f5c", "#b93d38")
TEAL = Colour("teal", "#32848f", "#64f7fb")
PINK = Colour("pink", "#992579", "#e2a1bf")
LIME = Colour("lime", "#4f6103", "#aec77b")
BROWN = Colour("brown", "#624640", "#b47d56")
SLATE = Colour("slate", "#2b2d33", "#4f6d7d")
GREY = Colour("grey", "#8d9699", "#8c929a")
HUES = (BLUE, ORANGE, GREEN, VIOLET, SKY, GOLD, RED, TEAL, PINK, LIME, BROWN, SLATE, GREY)

_PAGE_COLOURS = {colour.name: colour for colour in (PAPER, INK, FAINT, GRID, EMPTY)}

LEAST_CONTRAST = 3.0  # of a mark with its page; source: WCAG 2.2, 1.4.11
_BLACK, _WHITE = "#000000", "#ffffff"


def series(index: int) -> Colour:
    """Return the colour of a numbered line, shard or device; they repeat."""
    return HUES[index % len(HUES)]


def mix(start: str, end: str, part: float) -> str:
    """Return a colour between two, `part` of the way from the first.

    >>> mix("#ffffff", "#000000", 0.5)
    '#808080'
    """
    return "#" + "".join(
        f"{round(255 * (a + (b - a) * part)):02x}" for a, b in zip(*map(_channels, (start, end)), strict=True)
    )


def alternate(colour: Colour) -> Colour:
    """Return the same hue in another shade: for every other one of things that share a colour."""
    light, dark = _other_shade(colour.light, PAPER.light), _other_shade(colour.dark, PAPER.dark)
    return Colour(f"alternate-{colour.name}", light, dark)


def _other_shade(colour: str, paper: str) -> str:
    """Return the colour half way to black or white: of those that stand out from the page, the one with most contrast to it."""
    candidates = (mix(colour, end, 0.5) for end in (_BLACK, _WHITE))
    return max(
        (candidate for candidate in candidates if contrast(candidate, paper) >= LEAST_CONTRAST),
        key=lambda candidate: contrast(candidate, colour),
    )


def shade(part: float, steps: int = 32) -> Colour:
    """Return the colour of a number from 0 to 1, on a scale of so many steps from the page's colour to blue."""
    step = round(part * steps)
    light, dark = (
        mix(paper, blue, step / steps) for paper, blue in ((PAPER.light, BLUE.light), (PAPER.dark, BLUE.dark))
    )
    return Colour(f"shade-{step}", light, dark)


def text_on(fill: Colour) -> Colour:
    """Return black or white, whichever is more legible on a fill, on either page.

    >>> text_on(BLUE).light, text_on(ORANGE).light
    ('#ffffff', '#000000')
    """
    light, dark = (max((_BLACK, _WHITE), key=lambda text: contrast(text, on)) for on in (fill.light, fill.dark))
    return Colour(f"on-{light[1]}{dark[1]}", light, dark)


def contrast(colour: str, background: str) -> float:
    """Return WCAG's contrast ratio, from 1 to 21; the order of the two colours does not matter.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    dim, bright = sorted(map(luminance, (colour, background)))
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour: str) -> float:
    """Return relative luminance, from 0 to 1. Source: WCAG 2.2, "relative luminance", sRGB's constants of IEC 61966-2-1."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _channels(colour: str) -> Channels:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


# By the names of `terms`; then the parts of a backward pass, what is only measured, and the sums that sweeps show.
TERM_COLOURS: Mapping[str, Colour] = {
    "forward": BLUE, "backward": ORANGE, "recompute": GOLD,
    "tp": VIOLET, "cp": PINK, "ep": SKY, "pp": TEAL, "fsdp": GREEN, "dp": LIME, "control": SLATE,
    "host": BROWN, "bubble": GREY, "optimizer": RED,
    "parameters": BLUE, "gradients": ORANGE, "master": VIOLET, "activations": SKY, "workspace": GREEN, "gathered": TEAL,
    "logits": GOLD, "buffers": PINK, "runtime": GREY,
    "backward for activations": PINK, "backward for weights": GOLD,
    "data": alternate(GREEN), "other": alternate(BROWN),
    "compute": BLUE, "exposed communication": VIOLET, "optimizer and host": RED,
}  # fmt: skip


def part_colours(names: Iterable[str]) -> dict[str, str]:
    """Return names of colours for the parts of a sum: those of terms, and for other names hues that no part has yet.

    >>> part_colours(["bubble", "weights"])
    {'bubble': 'term:bubble', 'weights': 'series:0'}
    """
    names = tuple(names)
    used_colours = {TERM_COLOURS.get(name) for name in names}
    free = cycle([number for number, hue in enumerate(HUES) if hue not in used_colours] or range(len(HUES)))
    return {name: f"term:{name}" if name in TERM_COLOURS else f"series:{next(free)}" for name in names}


def by_name(name: str) -> Colour:
    """Return a colour by name: "term:fsdp", "series:3", "shade:0.5" of the scale from 0 to 1, or that of a part of the page.

    >>> by_name("term:fsdp").name, by_name("series:1").name, by_name("shade:0.5").name, by_name("ink").name
    ('green', 'orange', 'shade-16', 'ink')
    """
    kind, _, key = name.partition(":")
    if kind == "term":
        return TERM_COLOURS[key]
    if kind == "series":
        return series(int(key))
    return shade(float(key)) if kind == "shade" else _PAGE_COLOURS[name]


def palette_payload() -> dict[str, Any]:
    """Return every colour by theme, for pages that draw for themselves: `{"light": {...}, "dark": {...}}`.

    Each theme has `paper`, `ink`, `faint`, `grid` and `empty`, `series` (colours of numbered things, in order), `terms` (colours
    by name of a term) and `text_on` (the text's colour by the fill's).
    """
    return {theme: _theme(theme) for theme in ("light", "dark")}


def _theme(theme: str) -> dict[str, Any]:
    def hex_code(colour: Colour) -> str:
        return colour.dark if theme == "dark" else colour.light

    marks = {*HUES, *TERM_COLOURS.values()}
    return {
        **{colour.name: hex_code(colour) for colour in _PAGE_COLOURS.values()},
        "series": [hex_code(colour) for colour in HUES],
        "terms": {name: hex_code(colour) for name, colour in TERM_COLOURS.items()},
        "text_on": {
            hex_code(colour): hex_code(text_on(colour)) for colour in sorted(marks, key=lambda colour: colour.name)
        },
    }


def stylesheet() -> str:
    """Return variables of both themes; a page follows the reader's system unless it says otherwise, and prints light."""
    themes = palette_payload()
    light, dark = (";".join(_variables(themes[name])) for name in ("light", "dark"))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
    )


def _variables(theme: dict[str, Any]) -> Iterator[str]:
    text_colours = theme["text_on"]
    yield from (f"--{name}:{theme[name]}" for name in _PAGE_COLOURS)
    for name, colour in theme["terms"].items():
        plain = name.replace(" ", "-")
        yield f"--term-{plain}:{colour};--on-{plain}:{text_colours[colour]}"
    for number, colour in enumerate(theme["series"]):
        yield f"--series-{number}:{colour};--on-series-{number}:{text_colours[colour]}"
