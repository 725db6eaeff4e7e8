"""How wide a text is, without a font at hand."""

from __future__ import annotations

from unicodedata import east_asian_width

from shardwise.present.draw.drawing import SIZE

# Advance widths in units of the size, rounded up. Source: hmtx of DejaVu Sans 2.35, the widest of the fonts that pictures name.
WIDTHS = {
    0.28: "'ijl", 0.32: " ,.IJ·", 0.40: "()-/:;[\\]ft|", 0.45: "!r", 0.53: "\"*_`sz–", 0.56: "?Lc", 0.60: "Fkvxy",
    0.64: "$0123456789EPSTYabdeghnopqu{}µ", 0.70: "ABCKRVXZ", 0.80: "&DGHNOQU", 0.85: "#+<=>^w~×→≤", 1.00: "%@MWm…",
}  # fmt: skip
OTHER, WIDE = 0.84, 1.05  # of any other character; of one that fills a square, as in Chinese
BOLD = 1.14  # of a bold text over a regular one; source: the medians of DejaVu Sans Bold and Regular
_WIDTH = {character: width for width, characters in WIDTHS.items() for character in characters}


def text_width(text: str, size: float = SIZE, *, bold: bool = False) -> float:
    """Pixels that a text takes at most in a usual sans serif.

    >>> round(text_width("bubble", 10.0), 3)
    34.8
    """
    return size * sum(map(_character_width, text)) * (BOLD if bold else 1.0)


def wrapped(text: str, width: float, size: float = SIZE) -> list[str]:
    """The text in lines of at most so many pixels, broken between words; a longer word is a line of its own.

    >>> wrapped("one two three", 60.0)
    ['one two', 'three']
    """
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _character_width(character: str) -> float:
    known = _WIDTH.get(character)
    if known is None:
        return WIDE if east_asian_width(character) in "WF" else OTHER
    return known
