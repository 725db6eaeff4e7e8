"""The page beside drawn figures: each with what the original shows, where that is, and the command that draws it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from shardwise.present.charts.palette import FAINT, INK, PAPER
from shardwise.present.charts.svg import FONT
from shardwise.present.figures.figure import Figure

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


def figures_page(figures: Iterable[Figure]) -> str:
    """The page as HTML without scripts; each picture is a file NAME.svg beside it."""
    parts = []
    for book, group in groupby(figures, key=lambda one: one.book):
        shown = "\n".join(map(_shown, group))
        parts.append(f'<h2><a href="{escape(book.url)}">{escape(book.title)}</a></h2>\n{shown}')
    title = "Figures of the books, drawn by Shardwise"
    wide = '<meta name="viewport" content="width=device-width">'
    head = f'<meta charset="utf-8"><title>{title}</title>{wide}<style>{STYLE}</style>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n'
    )


def _shown(figure: Figure) -> str:
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
