"""Any chart, drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.present.charts.cells import GridChart, HeatMap, Strip, draw_grids, draw_heat_map, draw_strip
from shardwise.present.charts.chart import Chart
from shardwise.present.charts.drawing import Drawing, below
from shardwise.present.charts.render import draw
from shardwise.present.charts.timeline import TimelineChart, draw_timeline

AnyChart = Chart | GridChart | HeatMap | Strip | TimelineChart

_DRAWN: Mapping[type, Callable[[Any], Drawing]] = {
    Chart: draw,
    GridChart: draw_grids,
    HeatMap: draw_heat_map,
    Strip: draw_strip,
    TimelineChart: draw_timeline,
}


def draw_chart(chart: AnyChart) -> Drawing:
    """The chart as a drawing, by its kind."""
    return _DRAWN[type(chart)](chart)


def draw_charts(charts: Sequence[AnyChart]) -> Drawing:
    """Return charts as one drawing, one under the other."""
    return below([draw_chart(chart) for chart in charts])
