"""All figures of the books by name."""

from __future__ import annotations

from shardwise.present.figures.figure import Figure
from shardwise.present.figures.scaling_book import FIGURES as _BOOK
from shardwise.present.figures.ultrascale_playbook import FIGURES as _PLAYBOOK
from shardwise.values import InputError, describe_unknown

FIGURES: dict[str, Figure] = {one.name: one for one in (*_BOOK, *_PLAYBOOK)}


def figure(name: str) -> Figure:
    """A figure of one of the books by name, with the charts that Shardwise draws for it.

    Raises `InputError` that lists the names (`shardwise figures` prints them).

    >>> import shardwise as sw
    >>> found = sw.figure("pipeline-bubbles")
    >>> found.book.title, found.charts()[0].title
    ('The Ultra-Scale Playbook', 'Bubble of a pipeline of 8 stages')
    """
    if name not in FIGURES:
        raise InputError(f"figure: {describe_unknown(name, FIGURES)}")
    return FIGURES[name]
