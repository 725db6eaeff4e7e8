"""Report of the books' figures: a list of them, or where they were drawn to."""

from __future__ import annotations

from shardwise.present.figures.figure import FigureSet
from shardwise.present.rendering.report import Report, Section


def figures_report(figures: FigureSet) -> Report:
    """Report the files that figures were drawn to; otherwise names by book, with where the originals are and what they show."""
    if figures.files:
        return [Section(figures.files)]
    books: dict[str, list[str]] = {}
    for figure in figures.figures:
        lines = books.setdefault(f"{figure.book.title}  {figure.book.url}", [])
        lines += [f"  {figure.name}: {figure.section}", f"    {figure.original}", f"    here: {figure.here}"]
    return [Section(lines, title=title) for title, lines in books.items()]
