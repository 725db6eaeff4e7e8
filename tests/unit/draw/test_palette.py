"""The palette: contrast with both pages, distances for four kinds of colour vision, a colour for every term."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from shardwise.present.charts.palette import (
    EMPTY,
    FAINT,
    HUES,
    INK,
    PAPER,
    TERM_COLOURS,
    Colour,
    alternate,
    contrast,
    palette_payload,
    series,
    shade,
    text_on,
)
from shardwise.records.step_log import MEASURED_TERMS
from shardwise.values.estimate_term_names import MEMORY_TERMS, TIME_TERMS

THEMES = ("light", "dark")
MARKS = (*HUES, *map(alternate, HUES), INK, FAINT)
# What each kind of sight makes of linear sRGB, at full severity. Source: Machado, Oliveira and Fernandes (2009), "A
# Physiologically-based Model for Simulation of Color Vision Deficiency", table 1.
VISIONS = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
# Linear sRGB to cone responses, and those to Oklab. Source: Björn Ottosson (2020), "A perceptual color space for image
# processing".
CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
OKLAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
APART = 0.07  # in Oklab, where 0.02 is just noticed

APART_TERMS = 0.03  # of a run's time, which has more terms than there are hues: two of them are alternates


def linear(colour: str) -> NDArray[np.float64]:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def perceived_colour(colour: str, vision: str) -> NDArray[np.float64]:
    cones = np.array(CONES) @ np.clip(np.array(VISIONS[vision]) @ linear(colour), 0.0, 1.0)
    return np.array(OKLAB) @ np.cbrt(cones)


def nearest(colours: Sequence[Colour], theme: str, vision: str) -> tuple[float, str, str]:
    places = [(colour.name, perceived_colour(getattr(colour, theme), vision)) for colour in colours]
    return min((float(np.linalg.norm(a - b)), first, second) for (first, a), (second, b) in combinations(places, 2))


@pytest.mark.parametrize("theme", THEMES)
def test_marks_stand_out_from_their_page_and_text_from_marks(theme: str) -> None:
    paper = getattr(PAPER, theme)
    for mark in MARKS:
        assert contrast(getattr(mark, theme), paper) >= 3.0, mark
        assert contrast(getattr(text_on(mark), theme), getattr(mark, theme)) >= 4.5, mark


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_legible_on_the_page_on_empty_cells_and_on_the_scale(theme: str) -> None:
    for page in (PAPER, EMPTY):
        assert contrast(getattr(INK, theme), getattr(page, theme)) >= 7.0
    for step in range(33):
        fill = shade(step / 32)
        assert contrast(getattr(text_on(fill), theme), getattr(fill, theme)) >= 4.5


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", THEMES)
def test_hues_are_distinguishable_for_every_vision(theme: str, vision: str) -> None:
    distance, first, second = nearest(HUES, theme, vision)
    assert distance >= APART, (first, second)


@pytest.mark.parametrize("terms", [MEASURED_TERMS, MEMORY_TERMS])
def test_terms_of_a_chart_are_distinguishable(terms: tuple[str, ...]) -> None:
    colours = [TERM_COLOURS[term] for term in terms]
    for theme in THEMES:
        for vision in VISIONS:
            distance, first, second = nearest(colours, theme, vision)
            assert distance >= APART_TERMS, (theme, vision, first, second)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", THEMES)
def test_alternate_shades_are_distinguishable(theme: str, vision: str) -> None:
    for hue in HUES:
        assert nearest((hue, alternate(hue)), theme, vision)[0] >= APART, hue


def test_every_term_has_a_colour_and_lines_have_them_all() -> None:
    assert {*TIME_TERMS, *MEASURED_TERMS, *MEMORY_TERMS} <= TERM_COLOURS.keys()
    assert [series(index) for index in range(len(HUES))] == list(HUES)
    assert series(len(HUES)) == series(0)


def test_the_payload_has_both_themes() -> None:
    payload = palette_payload()
    assert payload.keys() == set(THEMES)
    for theme, colours in payload.items():
        assert colours["terms"]["forward"] == getattr(TERM_COLOURS["forward"], theme)
        assert colours["paper"] == getattr(PAPER, theme)
        assert len(colours["series"]) == len(HUES)
        assert {*colours["terms"].values(), *colours["series"]} <= colours["text_on"].keys()
