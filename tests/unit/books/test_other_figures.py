"""Figures of pipelines, systolic arrays, split sequences and shardings against counts by hand and cycle by cycle."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.book_formulas.rules import SystolicArray
from shardwise.present.charts.chart import Cells, Chart, Curve, Points, Spans, StackedBars
from shardwise.present.figures.playbook_charts import SCHEMES, bubbles, pipeline_timeline, ring_work, sharding_scheme
from shardwise.present.figures.roofline_charts import systolic_frames, systolic_use
from shardwise.verify.systolic_simulation import _Cells, run_systolic
from unit.draw.page import marks_of


def test_bubbles_equal_the_playbooks() -> None:
    """Eight stages: 7 of the naive pipeline, 7/8 with eight micro-batches, half of it with twice the stages on a device."""
    chart = bubbles()
    labels = [category.label for category in chart.panels[0].y.categories]
    sums = dict(zip(labels, marks_of(chart, StackedBars)[0].sums, strict=True))
    assert sums["m = 1, v = 1"] == 7.0
    assert sums["m = 8, v = 1"] == 0.875
    assert sums["m = 8, v = 2"] == sums["m = 16, v = 1"] == 0.4375
    assert sums["m = 32, v = 8"] == pytest.approx(7 / 256)
    assert "m = 1, v = 2" not in sums


def test_a_naive_pipeline_is_mostly_idle() -> None:
    chart = pipeline_timeline("naive", 4, 1)
    busy = sum(span.end - span.start for span in marks_of(chart, Spans)[0].spans)
    assert busy / (4 * chart.panels[0].x.domain[1]) == 0.25


def test_work_along_a_split_sequence_equals_a_count() -> None:
    """Places of a causal mask of 16 over four ranks: 10, 26, 42 and 58 of 136 in order, 34 each in a zigzag."""
    chart = ring_work()
    ring, zigzag = ([value for _, value in marks_of(chart, Points, panel)[0].points] for panel in range(2))
    mask = np.tril(np.ones((16, 16)))
    in_order = [mask[4 * rank : 4 * rank + 4].sum() / mask.sum() for rank in range(4)]
    assert ring == pytest.approx(in_order)
    assert in_order == pytest.approx([share / 136 for share in (10, 26, 42, 58)])
    assert zigzag == pytest.approx([0.25] * 4)


def test_frames_of_a_systolic_array_equal_its_cycles() -> None:
    """The simulator's registers, cycle by cycle: which row of activations each cell has."""
    rng = np.random.default_rng(0)
    activations, weights = rng.random((2, 3)), rng.random((3, 3))
    strip = systolic_frames(2, 3)
    assert len(strip.panels) == run_systolic(activations, weights, 3).cycles
    cells = _Cells([activations], [weights])
    for panel in range(len(strip.panels)):
        cells.step()
        drawn_colours = {(cell.row, cell.column): cell.colour for cell in marks_of(strip, Cells, panel)[0].cells}
        expected_colours = {(int(i), int(j)): f"series:{cells.place[i, j]}" for i, j in np.argwhere(cells.place >= 0)}
        assert drawn_colours == expected_colours


def test_utilisation_of_a_systolic_array_equals_the_simulation() -> None:
    chart = systolic_use(sides=(4,), rows=(2.0, 8.0))
    single_tile, many_tiles = marks_of(chart, Curve)
    rng = np.random.default_rng(0)
    for line, num_tiles in ((single_tile, 1), (many_tiles, 64)):
        rows, busy = line.points[0]
        assert rows == 2
        if num_tiles == 1:
            assert busy == pytest.approx(run_systolic(rng.random((2, 4)), rng.random((4, 4)), 4).busy)
        assert busy == SystolicArray(side=4).busy(2, num_tiles)


def captions(chart: Chart) -> list[str]:
    return [panel.title for panel in chart.panels]


def test_shardings_equal_the_books() -> None:
    """FSDP gathers weights; tensor parallelism gathers activations, and scatters the sum that it leaves."""
    first, second = sharding_scheme("FSDP", {"X": 4})
    assert captions(first) == ["In[B_X, D]", "Win[D_X, F]", "Win[D, F]", "Tmp[B_X, F]"]
    assert captions(second) == ["Tmp[B_X, F]", "Wout[F, D_X]", "Wout[F, D]", "Out[B_X, D]"]
    first, second = sharding_scheme("tensor parallelism", {"Y": 4})
    assert captions(first) == ["In[B, D_Y]", "Win[D, F_Y]", "In[B, D]", "Tmp[B, F_Y]"]
    assert captions(second) == ["Tmp[B, F_Y]", "Wout[F_Y, D]", "Out[B, D]{U_Y}", "Out[B, D_Y]"]
    ringed = [any(cell.ringed for cell in marks_of(second, Cells, panel)[0].cells) for panel in range(4)]
    assert ringed == [False, False, True, False]
    first, _ = sharding_scheme("data parallelism", {"X": 4})
    assert len(first.panels) == 3, "data parallelism must have no panel of communication"
    assert len(SCHEMES) == 4
