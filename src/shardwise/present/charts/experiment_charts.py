"""Charts of an experiment: a heat map of the best configurations, scaling curves, predictions beside measurements."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.present.charts.axis_ticks import padded_range
from shardwise.present.charts.chart import Axis, Cell, Cells, Chart, Curve, LegendEntry, Panel, Points
from shardwise.present.charts.common_charts import categories, curve_chart
from shardwise.values import format_seconds, pluralize

if TYPE_CHECKING:
    from shardwise.measure.experiments.experiment_report import BestConfiguration, ExperimentReport

LINE_CHARACTERS, MOST_LINES = 20, 5  # of a cell of the heat map
MOST_ROWS, MOST_COLUMNS = 30, 12  # of the heat map


def experiment_charts(report: ExperimentReport) -> tuple[Chart, ...]:
    """Return the charts of a report that has something for them."""
    makers = (best_map, scaling_chart, pairs_chart)
    return tuple(chart for make in makers if (chart := make(report)) is not None)


def best_map(report: ExperimentReport) -> Chart | None:
    """Return the best configuration of each model and number of nodes; darker is a higher MFU."""
    models = list(dict.fromkeys(cell.model_name for cell in report.best))[:MOST_ROWS]
    places = sorted({(cell.num_nodes, cell.num_devices) for cell in report.best})[:MOST_COLUMNS]
    best = {(cell.model_name, (cell.num_nodes, cell.num_devices)): cell for cell in report.best}
    if not report.best:
        return None
    highest_mfu = max((cell.mfu or 0.0 for cell in report.best), default=0.0)
    cells = tuple(
        _map_cell(row, column, best.get((model, place)), highest_mfu)
        for row, model in enumerate(models)
        for column, place in enumerate(places)
    )
    names = (f"{pluralize(nodes, 'node')}, {devices:,} devices" for nodes, devices in places)
    panel = Panel(
        x=Axis(title="nodes", categories=categories(names), side="top"), y=Axis(title="model", categories=categories(models)),
        marks=(Cells(cells=cells),), size=(124.0, 26.0 + 13.0 * MOST_LINES),
    )  # fmt: skip
    return Chart(
        title="Best configuration by model and nodes", subtitle="measured; without a run, why", panels=(panel,),
        legend=(LegendEntry(label=f"MFU: 0% to {highest_mfu:.1%}", colour="ink", sample="scale"),),
    )  # fmt: skip


def _map_cell(row: int, column: int, cell: BestConfiguration | None, highest_mfu: float) -> Cell:
    if cell is None:
        return Cell(row=row, column=column, colour="empty", lines=("–",))
    if cell.step_time_s is None:
        return Cell(row=row, column=column, colour="empty", lines=("–", *textwrap.wrap(cell.failure, LINE_CHARACTERS)))
    lines = textwrap.wrap(cell.label, LINE_CHARACTERS)
    first = f"MFU {cell.mfu:.1%}" if cell.mfu is not None else format_seconds(cell.step_time_s)
    rate = f"{cell.tokens_per_s_per_device:,.0f} tokens/s" if cell.tokens_per_s_per_device else ""
    texts = tuple(filter(None, (first, rate, *lines)))[:MOST_LINES]
    return Cell(
        row=row,
        column=column,
        colour=f"shade:{cell.mfu / highest_mfu if cell.mfu and highest_mfu else 0.0:.4f}",
        lines=texts,
        hover=f"{cell.model_name}: {cell.label}",
    )


def scaling_chart(report: ExperimentReport) -> Chart | None:
    """Return tokens/s of a device over the number of devices, a curve for each model."""
    curves = list(_scaling_curves(report))
    if not curves:
        return None
    rates = [point.tokens_per_s_per_device for point in report.scaling]
    devices = [float(point.num_devices) for point in report.scaling]
    return curve_chart(
        title="Scaling: tokens/s of a device over devices", subtitle="of the best configuration on each number",
        x=Axis(title="devices", log=True, ends=padded_range(devices, log=True)),
        y=Axis(title="tokens/s of a device", log=True, ends=padded_range(rates, log=True)), marks=curves,
    )  # fmt: skip


def _scaling_curves(report: ExperimentReport) -> Iterator[Curve]:
    for model in dict.fromkeys(point.model_name for point in report.scaling):
        points = [(float(p.num_devices), p.tokens_per_s_per_device) for p in report.scaling if p.model_name == model]
        if len(points) > 1:
            yield Curve(label=model, points=tuple(points))


def pairs_chart(report: ExperimentReport) -> Chart | None:
    """Return predicted against measured steps."""
    if not report.pairs:
        return None
    times = [seconds for pair in report.pairs for seconds in (pair.measured_s, pair.predicted_s)]
    low, high = ends = padded_range(times, log=True)
    points = [
        Points(
            points=((pair.measured_s, pair.predicted_s),), colour="faint", shape="dot",
            hover=f"{pair.label}: {format_seconds(pair.measured_s)} measured, {format_seconds(pair.predicted_s)} predicted",
        )
        for pair in report.pairs
    ]  # fmt: skip
    lines = [
        Curve(
            points=((low / min(factor, 1), low * max(factor, 1)), (high / max(factor, 1), high * min(factor, 1))),
            colour="ink",
            reference=factor != 1,
        )
        for factor in (1, 1.25, 0.8)
    ]
    x, y = (Axis(title=f"{kind} step", unit="s", log=True, ends=ends) for kind in ("measured", "predicted"))
    judged = report.status.coverage
    subtitle = f"{judged.num_inside:,} of {judged.num_runs:,} in their 90% intervals; dashed lines are 25% off"
    return curve_chart("Predicted against measured steps", subtitle, x, y, [*lines, *points], 408.0)
