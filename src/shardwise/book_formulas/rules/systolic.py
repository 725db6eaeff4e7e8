"""A systolic array: what it wastes on shapes that do not fill it, and its cycles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ROWS = 8  # of activations that enter at a time. Source: the book, "TPUs": [8, 128] · [128, 128] in 8 cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """[rows, d_in] · [d_in, d_out], `count` times; the second operand is the one that the array holds."""

    rows: float
    d_in: float
    d_out: float
    count: float = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.rows * self.d_in * self.d_out

    def padded(self, side: int) -> MatrixProduct:
        """The product that an array of `side` x `side` does: dims to multiples of its side, rows to multiples of 8."""
        return MatrixProduct(
            rows=_up(self.rows, ROWS), d_in=_up(self.d_in, side), d_out=_up(self.d_out, side), count=self.count
        )


def _up(size: float, step: int) -> float:
    """Round up to a multiple."""
    return float(math.ceil(size / step) * step)


def padding_efficiency(products: Iterable[MatrixProduct], side: int) -> float:
    """Useful FLOPs over those of the padded products. Source: the book, "TPUs": weights are padded to the unit's side."""
    products = tuple(products)
    return sum(p.flops for p in products) / sum(p.padded(side).flops for p in products)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystolicArray:
    """`side` x `side` cells that each multiply and add once a cycle and hold one weight, with room to load the next.

    Weights come from above and rows of activations from the left, each column and row one cycle behind its neighbour; sums
    leave below. Source: the book, "TPUs", appendix B; Kung, Why Systolic Architectures, 1982.
    """

    side: int = 128

    def cycles(self, rows: int, num_tiles: int = 1) -> int:
        """Cycles of [rows, side] against each of `num_tiles` tiles of weights, from an empty array to the last sum.

        Formula: `fill` for the first tile of weights, max(rows, side) for each tile but the last, as the next one's weights
        load meanwhile, `rows` for the last, and `drain`. `verify.systolic_simulation` counts the same cycle by cycle.
        """
        return self.fill + (num_tiles - 1) * max(rows, self.side) + rows + self.drain

    @property
    def fill(self) -> int:
        """Cycles until the first tile of weights lies in its column: one for each row of it."""
        return self.side

    @property
    def drain(self) -> int:
        """Cycles from the last row's entry to its last sum: down a column, and across to the last one."""
        return 2 * self.side - 2

    def row_at(self, cycle: int, depth: int, column: int) -> int | None:
        """Return the row, of those that enter one after the other, that a cell multiplies in a cycle; None before the first.

        A row enters the array's first row of cells once the weights are in place, the next one a cycle later, and moves right.
        """
        row = cycle - self.fill - depth - column
        return row if row >= 0 else None

    def steady_cycles(self, rows: int) -> int:
        """Cycles that further rows against the same weights add: one each, 8 for [8, 128] · [128, 128]."""
        return self.cycles(2 * rows) - self.cycles(rows)

    def busy(self, rows: int, num_tiles: int = 1) -> float:
        """Share of cells and cycles that do something."""
        return rows * num_tiles / self.cycles(rows, num_tiles)
