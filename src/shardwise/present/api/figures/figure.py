"""A figure of a book that the product draws: what the original shows and where it is, and what is drawn here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.present.draw.charts import Chart
    from shardwise.present.draw.drawing import Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """A book by title, with where it is read."""

    title: str
    url: str


BOOK = Book(title="How to Scale Your Model", url="https://jax-ml.github.io/scaling-book/")
PLAYBOOK = Book(title="The Ultra-Scale Playbook", url="https://huggingface.co/spaces/nanotron/ultrascale-playbook")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a book, drawn from functions of Shardwise.

    `section` and `path` say where the original is in its `book`, `original` what it shows, `here` what is drawn and what differs;
    `charts` makes the values that are drawn, one chart below the other.

    >>> import shardwise as sw
    >>> found = sw.figure("pipeline-bubbles")
    >>> found.command
    'shardwise figures pipeline-bubbles --out pipeline-bubbles.svg'
    >>> found.drawing().svg().startswith("<svg")
    True
    """

    name: str
    book: Book
    section: str
    original: str
    here: str
    charts: Callable[[], Sequence[Chart]]
    path: str = ""

    @property
    def url(self) -> str:
        """The web page of the original."""
        return self.book.url + self.path

    @property
    def command(self) -> str:
        """The command that draws the figure."""
        return f"shardwise figures {self.name} --out {self.name}.svg"

    def drawing(self) -> Drawing:
        """The charts as one drawing; its `svg()` is the text of an SVG file."""
        from shardwise.present.draw.charts import draw_chart
        from shardwise.present.draw.drawing import below

        return below([draw_chart(chart) for chart in self.charts()])

    def _repr_html_(self) -> str:
        return self.drawing().svg()
