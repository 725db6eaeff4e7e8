"""What `shardwise figures --json` prints: the list of figures, or one with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.present.draw.bars import BarChart
from shardwise.present.draw.grids import Grid, GridChart
from shardwise.present.draw.heat_map import HeatMap
from shardwise.present.draw.line_chart import LineChart
from shardwise.present.draw.panels import PanelChart
from shardwise.present.draw.strip import Strip
from shardwise.present.draw.timeline import TimelineChart
from shardwise.values import MergedFields

if TYPE_CHECKING:
    from shardwise.present.api.figures.figure import Figure


class _Labels(TypedDict):
    """The labels of cells by row and column, such as "0,1"."""

    labels: dict[str, str]


class _Grids(TypedDict):
    kind: Literal["GridChart"]
    grids: list[Annotated[dict[str, Any], MergedFields(Grid, _Labels)]]


class _Bars(TypedDict):
    kind: Literal["BarChart"]


class _Lines(TypedDict):
    kind: Literal["LineChart"]


class _Map(TypedDict):
    kind: Literal["HeatMap"]


class _Panels(TypedDict):
    kind: Literal["PanelChart"]


class _Strip(TypedDict):
    kind: Literal["Strip"]


class _Timeline(TypedDict):
    kind: Literal["TimelineChart"]


# The values of `draw`, each with its kind.
ChartPayload = (
    Annotated[dict[str, Any], MergedFields(BarChart, _Bars)]
    | Annotated[dict[str, Any], MergedFields(GridChart, _Grids)]
    | Annotated[dict[str, Any], MergedFields(HeatMap, _Map)]
    | Annotated[dict[str, Any], MergedFields(LineChart, _Lines)]
    | Annotated[dict[str, Any], MergedFields(PanelChart, _Panels)]
    | Annotated[dict[str, Any], MergedFields(Strip, _Strip)]
    | Annotated[dict[str, Any], MergedFields(TimelineChart, _Timeline)]
)


class FigureFacts(TypedDict):
    """A figure by name: where the original is and what it shows, what is drawn here, and the command that draws it."""

    name: str
    book: str
    section: str
    url: str
    original: str
    here: str
    command: str


class FigurePayload(FigureFacts):
    """One figure with its charts, number by number."""

    schema: Literal["shardwise.figure/1"]
    charts: list[ChartPayload]


class FiguresPayload(TypedDict):
    """Several figures, without numbers."""

    schema: Literal["shardwise.figures/1"]
    figures: list[FigureFacts]


def figure_payload(figure: Figure) -> FigurePayload:
    """The figure with its charts."""
    charts = [{"kind": type(chart).__name__, **_plain(asdict(chart))} for chart in figure.charts()]
    return {"schema": "shardwise.figure/1", **_facts(figure), "charts": charts}


def figures_payload(figures: Sequence[Figure]) -> FiguresPayload:
    """What figures there are."""
    return {"schema": "shardwise.figures/1", "figures": [_facts(figure) for figure in figures]}


def _facts(figure: Figure) -> FigureFacts:
    return {
        "name": figure.name, "book": figure.book.title, "section": figure.section, "url": figure.url,
        "original": figure.original, "here": figure.here, "command": figure.command,
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Mappings whose keys are places have them as text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else ",".join(map(str, key)): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
