"""A figure of a book that the product draws: what the original shows and where it is, and what is drawn here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired

from typing_extensions import TypedDict

if TYPE_CHECKING:
    from shardwise.draw.charts import Chart
    from shardwise.draw.drawing import Drawing

SCHEMA = "shardwise.figure/1"
SEVERAL_SCHEMA = "shardwise.figures/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """A book by title, with where it is read."""

    title: str
    url: str


BOOK = Book(title="How to Scale Your Model", url="https://jax-ml.github.io/scaling-book/")
PLAYBOOK = Book(title="The Ultra-Scale Playbook", url="https://huggingface.co/spaces/nanotron/ultrascale-playbook")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure by name. `section` and `path` are where the original is in its book, `original` what it shows, `here` what is
    drawn and what differs; `charts` makes the values that are drawn, one under the other."""

    name: str
    book: Book
    section: str
    original: str
    here: str
    charts: Callable[[], Sequence[Chart]]
    path: str = ""

    @property
    def url(self) -> str:
        """The page of the original."""
        return self.book.url + self.path

    @property
    def command(self) -> str:
        """What draws it."""
        return f"shardwise figures {self.name} --out {self.name}.svg"

    def drawing(self) -> Drawing:
        """The figure, drawn."""
        from shardwise.draw.charts import draw_chart
        from shardwise.draw.drawing import below

        return below([draw_chart(chart) for chart in self.charts()])

    def _repr_html_(self) -> str:
        return self.drawing().svg()


class FigurePayload(TypedDict):
    """A figure of a book: what the original shows, and what is drawn here. `charts` is present when one figure is asked for."""

    schema: Literal["shardwise.figure/1"]
    name: str
    book: str
    section: str
    url: str
    original: str
    here: str
    command: str
    charts: NotRequired[list[dict[str, Any]]]


class FiguresPayload(TypedDict):
    """Several figures, without their numbers."""

    schema: Literal["shardwise.figures/1"]
    figures: list[FigurePayload]


def figures_payload(figures: Sequence[Figure]) -> dict[str, Any]:
    """What `shardwise figures --json` prints of several figures."""
    return {"schema": SEVERAL_SCHEMA, "figures": [figure_payload(figure) for figure in figures]}


def figure_payload(figure: Figure, *, data: bool = False) -> dict[str, Any]:
    """The figure as a value of JSON; with `data` the charts too, number by number."""
    payload: dict[str, Any] = {
        "schema": SCHEMA, "name": figure.name, "book": figure.book.title, "section": figure.section, "url": figure.url,
        "original": figure.original, "here": figure.here, "command": figure.command,
    }  # fmt: skip
    if data:
        payload["charts"] = [{"kind": type(chart).__name__, **_plain(asdict(chart))} for chart in figure.charts()]
    return payload


def _plain(value: Any) -> Any:
    """Mappings whose keys are places have them as text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else ",".join(map(str, key)): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
