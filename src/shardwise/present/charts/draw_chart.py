"""Any chart, drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.present.charts.bars import BarChart, draw_bars
from shardwise.present.charts.cells import GridChart, HeatMap, Strip, draw_grids, draw_heat_map, draw_strip
from shardwise.present.charts.curves import LineChart, draw_lines
from shardwise.present.charts.drawing import Drawing
from shardwise.present.charts.panels import PanelChart, draw_panels
from shardwise.present.charts.timeline import TimelineChart, draw_timeline

Chart = BarChart | GridChart | HeatMap | LineChart | PanelChart | Strip | TimelineChart

_DRAWN: Mapping[type, Callable[[Any], Drawing]] = {
    BarChart: draw_bars,
    GridChart: draw_grids,
    HeatMap: draw_heat_map,
    LineChart: draw_lines,
    PanelChart: draw_panels,
    Strip: draw_strip,
    TimelineChart: draw_timeline,
}


def draw_chart(chart: Chart) -> Drawing:
    """The chart as a drawing, by its kind."""
    return _DRAWN[type(chart)](chart)


def to_drawing(drawn: Chart | Drawing) -> Drawing:
    """Return a drawing as it is, and a chart drawn."""
    return drawn if isinstance(drawn, Drawing) else draw_chart(drawn)
