"""All figures of the books by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardwise.present.figures.figure import Figure, FigureSet
from shardwise.present.figures.scaling_book import FIGURES as _BOOK
from shardwise.present.figures.ultrascale_playbook import FIGURES as _PLAYBOOK
from shardwise.values import InputError, describe_unknown, run_all

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (*_BOOK, *_PLAYBOOK)}


def figure(name: str) -> Figure:
    """Return a figure of one of the books by name, with the charts that Shardwise draws for it.

    Raises `InputError` that lists the names (`shardwise figures` prints them).

    >>> import shardwise as sw
    >>> figure = sw.figure("pipeline-bubbles")
    >>> figure.book.title, figure.charts()[0].title
    ('The Ultra-Scale Playbook', 'Bubble of a pipeline of 8 stages')
    """
    if name not in FIGURES:
        raise InputError(f"figure: {describe_unknown(name, FIGURES)}")
    return FIGURES[name]


def find_figures(names: Sequence[str]) -> FigureSet:
    """Return figures by name, all of them without a name. Raises `InputError` with all unknown names."""
    return FigureSet(figures=tuple(run_all(*(partial(figure, name) for name in names)) or FIGURES.values()))
