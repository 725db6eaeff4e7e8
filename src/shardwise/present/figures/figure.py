"""Figures of the books: by name, drawn from our own numbers, and as a payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypedDict

from shardwise.present import charts
from shardwise.present.charts import Chart

if TYPE_CHECKING:
    from shardwise.present.charts.drawing import Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """Title of a book, and the address at which it is read."""

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
    >>> figure = sw.figure("pipeline-bubbles")
    >>> figure.command
    'shardwise figures pipeline-bubbles --out pipeline-bubbles.svg'
    >>> figure.drawing().svg().startswith("<svg")
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
        return charts.draw_charts(self.charts())

    def _repr_html_(self) -> str:
        return self.drawing().svg()


def book_figure(
    book: Book, name: str, draw: Callable[[], Chart | tuple[Chart, ...]], section: str, original: str, here: str, path: str = ""
) -> Figure:  # fmt: skip
    """Return a figure of a book, of one chart or several."""

    def charts() -> Sequence[Chart]:
        figure_charts = draw()
        return figure_charts if isinstance(figure_charts, tuple) else (figure_charts,)

    return Figure(name=name, book=book, section=section, original=original, here=here, charts=charts, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSet:
    """Figures of the books, and the files with their pictures, if any were written."""

    figures: tuple[Figure, ...]
    files: tuple[str, ...] = ()


class FigureFacts(TypedDict):
    """Description of a figure: the place and the contents of the original, the contents here, and the command that draws it."""

    name: str
    book: str
    section: str
    url: str
    original: str
    here: str
    command: str


class FigurePayload(FigureFacts):
    """Figure of a book with its charts, number by number."""

    schema: Literal["shardwise.figure/2"]
    charts: list[Chart]


class FiguresPayload(TypedDict):
    """Descriptions of several figures, without numbers."""

    schema: Literal["shardwise.figures/1"]
    figures: list[FigureFacts]


def figure_payload(figure: Figure) -> FigurePayload:
    """Return the payload of a figure, with the numbers of its charts."""
    charts: Any = [asdict(chart) for chart in figure.charts()]
    return {"schema": "shardwise.figure/2", **_facts(figure), "charts": charts}


def figures_payload(figures: FigureSet) -> FigurePayload | FiguresPayload:
    """Return the payload of `shardwise figures --json`: a figure with its charts, or the descriptions of several figures."""
    if len(figures.figures) == 1:
        return figure_payload(figures.figures[0])
    return {"schema": "shardwise.figures/1", "figures": [_facts(figure) for figure in figures.figures]}


def _facts(figure: Figure) -> FigureFacts:
    return {
        "name": figure.name, "book": figure.book.title, "section": figure.section, "url": figure.url,
        "original": figure.original, "here": figure.here, "command": figure.command,
    }  # fmt: skip
