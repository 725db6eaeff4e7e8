"""A systolic array cycle by cycle: weights move down into place, activations right, and sums down and out.

The cells of a diagonal do the same as those of the previous diagonal one cycle later.
`book_formulas.rules.SystolicArray` has the number of cycles in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystolicRun:
    """The product, the cycles from an empty array to the last sum, and the mean share of cells that multiplied."""

    product: Array
    cycles: int
    busy: float


def run_systolic(left: Array, right: Array, side: int) -> SystolicRun:
    """Multiply left[M, D] by right[D, F] on an array of side x side cells; D and F are padded with zeros to multiples.

    The tiles of `right` follow one another; while one is used, the next loads. Sums over D's tiles are added outside.
    """
    rows, (depth, width) = len(left), right.shape
    padded_left = np.pad(left, ((0, 0), (0, -depth % side)))
    padded_right = np.pad(right, ((0, -depth % side), (0, -width % side)))
    starts = [(d, f) for f in range(0, padded_right.shape[1], side) for d in range(0, padded_right.shape[0], side)]
    cells = _Cells(
        [padded_left[:, d : d + side] for d, _ in starts],
        [padded_right[d : d + side, f : f + side] for d, f in starts],
    )  # fmt: skip
    product = np.zeros((rows, padded_right.shape[1]))
    while cells.collected < len(starts) * rows * side:
        for tile, row, column, value in cells.step():
            product[row, starts[tile][1] + column] += value
    return SystolicRun(product=product[:, :width], cycles=cells.cycle, busy=cells.work / (cells.cycle * side**2))


class _Cells:
    """Registers of all cells: an activation with its place in the stream, a sum, weights in use and loading."""

    def __init__(self, rows: list[Array], weights: list[Array]) -> None:
        self.rows, self.weights = rows, weights
        self.side, self.num_rows = len(weights[0]), len(rows[0])
        self.period = max(self.num_rows, self.side)  # a tile's rows, or as long as the next one's weights take to load
        shape = (self.side, self.side)
        self.activation, self.sum, self.used, self.loading = (np.zeros(shape) for _ in range(4))
        self.place = np.full(shape, -1)  # in the stream of rows; -1 where there is none
        self.cycle = self.work = self.collected = 0

    def step(self) -> list[tuple[int, int, int, float]]:
        """Advance one cycle; return the sums that leave: tile, row, column, value."""
        self.shift()
        first = (self.place >= 0) & (self.place % self.period == 0)
        self.used = np.where(first, self.loading, self.used)  # a tile's first row brings its weights into use
        self.sum += self.activation * self.used
        self.load()
        self.work += int(np.count_nonzero(self.place >= 0))
        self.cycle += 1
        return self.collect_sums()

    def shift(self) -> None:
        """Move activations right and sums down; array row i takes the stream's row that entered row 0 i cycles ago."""
        for register, empty in ((self.activation, 0.0), (self.place, -1)):
            register[:, 1:] = register[:, :-1].copy()
            register[:, 0] = empty
        self.sum[1:] = self.sum[:-1].copy()
        self.sum[0] = 0.0
        for i in range(self.side):
            tile, row = divmod(self.cycle - self.side - i, self.period)
            if 0 <= tile < len(self.rows) and row < self.num_rows:
                self.activation[i, 0] = self.rows[tile][row, i]
                self.place[i, 0] = tile * self.period + row

    def load(self) -> None:
        """Move the next tile's weights down a cell per cycle, the lowest row's first; column j is j cycles late."""
        for j in range(self.side):
            since = self.cycle - j - self.side  # column j's first row of the first tile
            tile, sunk = divmod(since, self.period) if since >= 0 else (-1, since + self.side)
            if 0 <= sunk < self.side and tile + 1 < len(self.weights):
                self.loading[1 : sunk + 1, j] = self.loading[:sunk, j].copy()
                self.loading[0, j] = self.weights[tile + 1][self.side - 1 - sunk, j]

    def collect_sums(self) -> list[tuple[int, int, int, float]]:
        places = self.place[-1]
        sums = [
            (*divmod(int(place), self.period), column, float(self.sum[-1, column]))
            for column, place in enumerate(places)
            if place >= 0
        ]
        self.collected += len(sums)
        return sums
