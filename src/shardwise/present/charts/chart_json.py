"""Charts as JSON for the page: fields without their defaults, ticks in sets for wide and narrow plots."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args

from shardwise.present.charts.chart import Axis, Chart, Shape

WRITTEN = ("kind", "size")  # of marks and panels, defaults included
POINT_SAMPLES = ("point", *get_args(Shape))


def chart_to_json(chart: Chart) -> dict[str, Any]:
    """Return a chart as JSON. Its legend has the labelled points too; the page writes labels of curves at their ends."""
    points = (entry for panel in chart.panels for entry in panel.legend() if entry.sample in POINT_SAMPLES)
    return {**_to_json(chart), "legend": [_to_json(entry) for entry in dict.fromkeys([*points, *chart.legend])]}


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(part) for part in value]
    kind: type = type(value)
    defaults = _defaults(kind)
    values = {
        name: _to_json(getattr(value, name))
        for name, default in defaults.items()
        if name in WRITTEN or getattr(value, name) != default
    }
    if isinstance(value, Axis):
        values["ticks"] = _to_json(value.tick_sets())
    return values if defaults else value


@cache
def _defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields; empty for any other type."""
    return {field.name: field.default for field in fields(kind)} if is_dataclass(kind) else {}
