"""Displays of values in a notebook: tables and a picture, as HTML without scripts, and as a figure of matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from shardwise.values import InputError

if TYPE_CHECKING:
    from shardwise.present.charts.chart import Chart
    from shardwise.present.charts.drawing import Drawing

CELL_STYLE = "text-align:left;padding:2px 12px 2px 0;vertical-align:top"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookTable:
    """Rows of texts under a head, if there is one; the first of each row names it."""

    rows: tuple[tuple[str, ...], ...]
    head: tuple[str, ...] = ()

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> NotebookTable:
        """Return a table of two columns, names and facts, without the empty facts."""
        return cls(rows=tuple((name, fact) for name, fact in facts.items() if fact))


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookDisplay:
    """Display of a value in a notebook: a title, tables, and charts one under the other.

    `charts` are made when they are drawn, and raise `InputError` where there is too much or nothing to draw.
    """

    title: str
    tables: tuple[NotebookTable, ...]
    charts: Callable[[], Sequence[Chart]]

    def drawing(self) -> Drawing:
        """Draw the charts. Raises `InputError` as they do."""
        from shardwise.present.charts.draw_chart import draw_charts

        return draw_charts(self.charts())

    def html(self) -> str:
        """Return a fragment of HTML that stands by itself: no script, nothing to load, every text escaped."""
        tables = "\n".join(_table(table) for table in self.tables)
        try:
            picture = self.drawing().svg()
        except InputError as error:
            picture = f"<p>{escape(str(error))}</p>"
        return f"<div>\n<p><strong>{escape(self.title)}</strong></p>\n{tables}\n{picture}</div>"


def _table(table: NotebookTable) -> str:
    lines = [_row(table.head, "th")] if table.head else []
    lines += [_row(row, "td", named=not table.head) for row in table.rows]
    return '<table style="border-collapse:collapse">\n' + "\n".join(lines) + "\n</table>"


def _row(cells: Sequence[str], tag: str, *, named: bool = False) -> str:
    """Return a row as HTML; if it is `named`, its first cell is its head."""
    tags = ["th" if named else tag, *[tag] * (len(cells) - 1)]
    cells_html = (f'<{tag} style="{CELL_STYLE}">{escape(cell)}</{tag}>' for tag, cell in zip(tags, cells, strict=True))
    return "<tr>" + "".join(cells_html) + "</tr>"
