"""A systolic array at work: cycle by cycle, and how busy it is."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.book_formulas.rules import SystolicArray
from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Line, LineChart
from shardwise.present.draw.strip import Cell, Frame, Strip
from shardwise.present.pictures.book_figures.axes import spread


def systolic_frames(num_rows: int = 2, side: int = 3) -> Strip:
    """Which row of activations each cell multiplies with its weight, cycle by cycle. Source: the book, "TPUs", appendix B."""
    array = SystolicArray(side=side)

    def column(cycle: int, place: int) -> tuple[Cell, ...]:
        rows = ((depth, array.row_at(cycle, depth, place)) for depth in range(side))
        return tuple(
            Cell(row=depth, colour=row, label=f"row {row}") for depth, row in rows if row is not None and row < num_rows
        )

    cycles = range(1, array.cycles(num_rows) + 1)
    frames = (
        Frame(title=f"cycle {cycle}", columns=tuple(column(cycle - 1, place) for place in range(side)))
        for cycle in cycles
    )
    return Strip(
        title=f"[{num_rows}, {side}] · [{side}, {side}] on a systolic array of {side} x {side} cells",
        subtitle=f"{array.fill} cycles for the weights, {num_rows} for the rows, {array.drain} until the last sum.",
        devices=tuple(f"column {place}" for place in range(side)), rows=tuple(f"k = {k}" for k in range(side)),
        frames=tuple(frames),
        legend="A cell multiplies the row of activations that is written in it; sums go down, activations to the right.",
    )  # fmt: skip


def systolic_use(sides: Sequence[int] = (128, 256), rows: tuple[float, float] = (8.0, 8192.0)) -> LineChart:
    """The share of cells and cycles that multiply, against the rows of activations for each tile of weights. Source: the book,
    "TPUs", appendix B: of [8, 128] · [128, 128] in a long stream, 8 cycles each."""

    def line(side: int, num_tiles: int) -> Line:
        array = SystolicArray(side=side)
        points = tuple((float(round(each)), array.busy(round(each), num_tiles)) for each in spread(*rows))
        tiles = "one tile of weights" if num_tiles == 1 else f"{num_tiles} tiles, one after the other"
        return Line(label=f"{side} x {side}, {tiles}", points=points)

    return LineChart(
        title="How busy a systolic array is",
        subtitle="Less than 1 is filling and draining, and waiting for the next tile of weights.",
        x=Axis(title="rows of activations for each tile of weights"),
        y=Axis(title="share of cells and cycles", unit="%", linear=True),
        lines=tuple(line(side, num_tiles) for side in sides for num_tiles in (1, 64)),
    )  # fmt: skip
