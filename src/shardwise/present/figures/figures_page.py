"""All figures of the books by name; figures as files, and the page beside them: each with what the original shows, where that is,
and the command that draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path

from shardwise.present.charts.palette import FAINT, INK, PAPER
from shardwise.present.charts.svg import FONT
from shardwise.present.exports import ending_of, write_file, write_picture
from shardwise.present.figures.figure import Figure, FigureSet
from shardwise.present.figures.scaling_book import FIGURES as _BOOK
from shardwise.present.figures.ultrascale_playbook import FIGURES as _PLAYBOOK
from shardwise.values import InputError, Progress, argument_label, describe_unknown, run_all

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


PAGE = "index.html"
STYLE = f"""
:root {{ color-scheme: light dark; }}
body {{ font-family: {FONT}; color: {INK.light}; background: {PAPER.light}; }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
figure {{ margin: 2rem 0; border-top: 1px solid {FAINT.light}; padding-top: 1rem; }}
img {{ max-width: 100%; height: auto; }}
a {{ color: inherit; }}
dt {{ font-weight: bold; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: {INK.dark}; background: {PAPER.dark}; }}
  figure {{ border-color: {FAINT.dark}; }}
}}
"""


def draw_figures(figures: FigureSet, target: str, progress: Progress) -> FigureSet:
    """Draw figures to one file, or to a folder with a page, and return them with the names of the files.

    Raises `InputError` for a place that cannot be written, and for one file of several figures.
    """
    label = argument_label("out")
    if ending_of(target) in (".svg", ".png", ".pdf"):
        return _draw_file(figures, target, label)
    folder = Path(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{label}: cannot write {target}: {error.strerror}; choose a writable path") from None
    pictures = {figure.name: str(folder / f"{figure.name}.svg") for figure in figures.figures}
    for number, figure in enumerate(figures.figures, 1):
        progress(figure.name, number, len(pictures))
        write_picture(label, pictures[figure.name], tuple(figure.charts()))
    page = str(folder / PAGE)
    write_file(label, page, figures_page(figures.figures))
    return replace(figures, files=(*pictures.values(), page))


def _draw_file(figures: FigureSet, target: str, label: str) -> FigureSet:
    if len(figures.figures) > 1:
        raise InputError(
            f"{label}: found {target!r} for {len(figures.figures)} figures; a folder, or one NAME, is required"
        )
    write_picture(label, target, tuple(figures.figures[0].charts()))
    return replace(figures, files=(target,))


def figures_page(figures: Iterable[Figure]) -> str:
    """Return the page as HTML without scripts; each picture is a file NAME.svg beside it."""
    parts = []
    for book, group in groupby(figures, key=lambda figure: figure.book):
        elements = "\n".join(map(_figure_html, group))
        parts.append(f'<h2><a href="{escape(book.url)}">{escape(book.title)}</a></h2>\n{elements}')
    title = "Figures of the books, drawn by Shardwise"
    viewport = '<meta name="viewport" content="width=device-width">'
    head = f'<meta charset="utf-8"><title>{title}</title>{viewport}<style>{STYLE}</style>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n'
    )


def _figure_html(figure: Figure) -> str:
    name = escape(figure.name)
    return f"""<figure id="{name}">
<img src="{name}.svg" alt="{escape(figure.original)} {escape(figure.here)}">
<figcaption><dl>
<dt>{name}</dt><dd><a href="{escape(figure.url)}">{escape(figure.section)}</a></dd>
<dt>the original</dt><dd>{escape(figure.original)}</dd>
<dt>here</dt><dd>{escape(figure.here)}</dd>
<dt>command</dt><dd><code>{escape(figure.command)}</code></dd>
</dl></figcaption>
</figure>"""
