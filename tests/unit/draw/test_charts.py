"""Every builder of a chart: finite marks inside of their axes, texts inside of their boxes and of the page, at any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.batch_size.batch_sweep_fit import fit_sweep
from shardwise.batch_size.run_noise import run_noise
from shardwise.book_formulas.rooflines import block_roofline, load_chip_and_links
from shardwise.pipeline.registry import build_actions
from shardwise.pipeline.timeline import play_actions
from shardwise.present.charts import batch_size_charts, measurement_charts, network_charts, plan_charts, sharding_charts
from shardwise.present.charts.chart import (
    Axis,
    Band,
    Cells,
    Chart,
    Curve,
    Mark,
    Panel,
    Points,
    RuleLine,
    Spans,
    StackedBars,
)
from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.drawing import Drawing, Rect, Text, text_width
from shardwise.present.charts.step_charts import anatomy_chart, step_chart, timeline_chart
from shardwise.present.charts.sweep_charts import sweep_chart
from shardwise.present.figures.figures_page import FIGURES
from shardwise.present.figures.roofline_charts import block_chart
from shardwise.price import Problem
from shardwise.records.step_inspection import MemorySample, MemoryTrace
from shardwise.sharding.notation import parse_tensor
from shardwise.sharding.spec import Mesh
from shardwise.values.dtypes import NUMBER_FORMATS

from .page import check_texts

EXAMPLES = Path(__file__).parents[3] / "examples"
JOB: Mapping[str, Any] = {"global_batch_tokens": 2**19, "seq_len": 4096}
MODEL, CLUSTER = "llama-3.2-1b", "h100:8"
Charts = Callable[[], Sequence[Chart]]


@cache
def plan() -> sw.Plan:
    return sw.plan(MODEL, CLUSTER, **JOB)


def anatomy() -> Chart:
    samples = tuple(MemorySample(number / 10, (10**9, 10**8 * number)) for number in range(9))
    trace = MemoryTrace(step=1, rank=0, terms=("parameters", "activations"), samples=samples)
    return anatomy_chart([trace, trace], "a model")


def shards() -> Chart:
    tensors = map(parse_tensor, ("A[I_X, J]", "B[I, J_Y]{U_X}"))
    moments = [sharding_charts.Moment(heading="start", name=tensor.name, spec=tensor.spec) for tensor in tensors]
    return sharding_charts.shards_chart("shards", moments, Mesh.of({"X": 4, "Y": 2}))


def block() -> Chart:
    chip, links = load_chip_and_links("h100")
    return block_chart(block_roofline(sw.load_model(MODEL), chip, 1, 8192, links=links))


def saved_tensors() -> Chart:
    problem = Problem(sw.load_model(MODEL), sw.load_cluster(CLUSTER), sw.Job(**JOB))
    return plan_charts.kept_chart(problem, plan().layout)


RESULTS: Mapping[str, Charts] = {
    "plan": lambda: plan_charts.estimate_charts("a plan", {"chosen " * 30: plan().estimate, "again": plan().estimate}),
    "kept": lambda: (saved_tensors(),),
    "memory": lambda: (plan_charts.memory_comparison_chart(sw.memory(MODEL, CLUSTER, ["tp=8", "fsdp=8"])),),
    "simulation": lambda: (step_chart(sw.simulation(plan())),),
    "schedule": lambda: (timeline_chart(play_actions(build_actions("zb-v", 4, 8))),),
    "sweep": lambda: (sweep_chart(sw.sweep(MODEL, CLUSTER, over="gpus=8,16", **JOB)),),
    "map": lambda: (sweep_chart(sw.sweep(MODEL, CLUSTER, over=("gpus=8,16", "seq_len=2048,4096"), **JOB)),),
    "anatomy": lambda: (anatomy(),),
    "shards": lambda: (shards(),),
    "formats": lambda: sharding_charts.format_charts([NUMBER_FORMATS[name] for name in ("bf16", "e4m3")]),
    "network": lambda: (network_charts.network_chart(sw.network("h100:64", layout="tp=8 dp=8")),),
    "collective": lambda: (sharding_charts.collective_chart(sw.collective("all-to-all", "1GB", axes="4,4", on="tpu-v5p")),),
    "block": lambda: (block(),),
    "accuracy": lambda: (
        measurement_charts.accuracy_chart({"h100": [(1.0, 1.1), (2.0, 2.5)], "tpu-v5p": [(3.0, 2.8)]}, "of runs"),
        measurement_charts.residual_chart({"h100": [(1.0, 1.1), (2.0, 2.5)], "tpu-v5p": [(3.0, 2.8)]}),
    ),
}  # fmt: skip
BOOKS: Mapping[str, Charts] = {name: figure.charts for name, figure in FIGURES.items() if name != "best-layouts"}
BUILDERS = {**RESULTS, **BOOKS}


def places(mark: Mark, axis: str) -> Iterator[float]:
    """The coordinates of a mark along an axis."""
    across = axis == "x"
    match mark:
        case Curve():
            yield from (x if across else y for x, y in mark.points if across or mark.row is None)
        case Points():
            yield from (x if across else y for x, y in mark.points)
        case Band():
            for x, low, high in mark.edges:
                yield from (x,) if across else (low, high)
        case RuleLine():
            yield from (mark.at,) if mark.axis == axis else ()
        case Cells():
            yield from ((cell.column if across else cell.row) + part for cell in mark.cells for part in (0, 1))
        case Spans():
            for span in mark.spans:
                yield from (span.start, span.end) if across else (span.row, span.row + 1)


def check_axis(axis: Axis, values: Sequence[float]) -> None:
    """All values and ticks are finite and between the ends of the axis."""
    low, high = axis.domain
    room = 1e-9 * (high - low)
    for value in (*values, *(place for place, _ in axis.ticks or ())):
        assert math.isfinite(value)
        assert low - room <= value <= high + room, (axis.title, value)


def check_boxes(drawing: Drawing) -> None:
    """A text drawn in the rectangle of its datum is no wider than the rectangle."""
    widths: dict[int, float] = {}
    for mark in drawing.marks:
        if isinstance(mark, Rect) and mark.about:
            widths[id(mark.about)] = max(mark.width, widths.get(id(mark.about), 0.0))
    for mark in drawing.marks:
        if isinstance(mark, Text) and mark.about and id(mark.about) in widths:
            assert text_width(mark.content, mark.size, bold=mark.bold) <= widths[id(mark.about)] + 1e-6, mark.content


@pytest.mark.parametrize("name", BUILDERS)
def test_marks_lie_within_axes_and_texts_within_boxes(name: str) -> None:
    for chart in BUILDERS[name]():
        assert isinstance(chart, Chart)
        assert chart.panels
        for panel in chart.panels:
            for mark in panel.marks:
                if isinstance(mark, StackedBars):
                    lying = bool(panel.y.categories)
                    check_axis(panel.x if lying else panel.y, mark.sums)
                    assert len(mark.bars) == len((panel.y if lying else panel.x).categories)
            for axis in "xy":
                check_axis(getattr(panel, axis), [place for mark in panel.marks for place in places(mark, axis)])
        drawing = draw(chart)
        check_boxes(drawing)
        check_texts(drawing)


@pytest.mark.parametrize("width", [420.0, 700.0, 1600.0])
@pytest.mark.parametrize("name", ["plan", "kept", "sweep", "simulation", "shards", "collective", "map"])
def test_a_chart_has_the_requested_width(name: str, width: float) -> None:
    for chart in BUILDERS[name]():
        check_texts(draw(chart, width))


@pytest.mark.parametrize(("name", "width"), [("plan", 500.0), ("plan", 1200.0), ("anatomy", 420.0), ("block", 1200.0)])
def test_a_chart_of_numbers_has_the_requested_width(name: str, width: float) -> None:
    for chart in BUILDERS[name]():
        assert draw(chart, width).width == pytest.approx(width, abs=2.0)


def test_marks_of_batch_size_charts_are_within_their_axes() -> None:
    fit, noise = fit_sweep(EXAMPLES / "batch" / "runs.csv").fit, run_noise(EXAMPLES / "noise")
    for chart in (batch_size_charts.pareto_chart(fit), batch_size_charts.run_noise_chart(noise)):
        for panel in chart.panels:
            check_axis(panel.x, [x for mark in panel.marks for x in places(mark, "x")])
            check_axis(panel.y, [y for mark in panel.marks for y in places(mark, "y")])


def test_a_datum_has_its_text_path_and_query_in_the_picture() -> None:
    point = Points(points=((1.0, 2.0),), label="a", hover="a < b", path="estimate.mfu", query="tp=8&pp=2")
    chart = Chart(title="t", subtitle="", panels=(Panel(x=Axis(), y=Axis(), marks=(point,)),))
    svg = draw(chart).svg()
    assert '<g data-path="estimate.mfu" data-query="tp=8&amp;pp=2"><title>a &lt; b</title><circle' in svg
