"""Any chart, drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.present.draw.bars import BarChart, draw_bars
from shardwise.present.draw.drawing import Drawing
from shardwise.present.draw.grids import GridChart, draw_grids
from shardwise.present.draw.heat_map import HeatMap, draw_heat_map
from shardwise.present.draw.line_chart import LineChart
from shardwise.present.draw.lines import draw_lines
from shardwise.present.draw.panels import PanelChart, draw_panels
from shardwise.present.draw.strip import Strip, draw_strip
from shardwise.present.draw.timeline import TimelineChart, draw_timeline

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
