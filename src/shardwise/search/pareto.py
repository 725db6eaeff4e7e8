"""What is kept of a stream of priced layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = tuple[float, float, tuple[int, int, int]]
Floats = NDArray[np.float64]


class Front:
    """The fastest that fit, the Pareto front of (time, memory) among these, and the leanest of all.

    `fastest` and `fastest_even` are by factorisation: of all that fit, and of those that share the batch out evenly.
    """

    def __init__(self, top: int, capacity_bytes: float) -> None:
        self.top = top
        self.capacity = capacity_bytes
        self.rows: list[Row] = []
        self.front: list[Row] = []
        self.leanest: Row = (np.inf, np.inf, (0, 0, 0))  # pure data parallelism is always legal, so a row replaces it
        self.fastest: dict[int, Row] = {}
        self.fastest_even: dict[int, Row] = {}
        self.num_rows = 0
        self.num_fitting = 0

    def add(self, seconds: Floats, memory: Floats, where: tuple[Any, Any, int], factorisation: Any, even: Any) -> None:
        """Take a chunk: `where` holds the candidates' and placements' numbers and the recompute policy.

        `factorisation` numbers the factorisation of each row, and never falls along the chunk; `even` says of each row whether
        it shares the batch out evenly.
        """
        self.num_rows += len(seconds)
        lean = int(np.argmin(memory))
        if memory[lean] < self.leanest[1]:
            self.leanest = self.row(seconds, memory, where, lean)
        fits = memory <= self.capacity
        self.num_fitting += int(np.count_nonzero(fits))
        limit = self.rows[-1][0] if len(self.rows) == self.top else np.inf
        self.keep_best(np.nonzero(fits & (seconds < limit))[0], seconds, memory, where)
        self.keep_front(fits, seconds, memory, where)
        self.keep_fastest(self.fastest, np.where(fits, seconds, np.inf), memory, where, factorisation)
        even_seconds = np.where(fits & even, seconds, np.inf)
        self.keep_fastest(self.fastest_even, even_seconds, memory, where, factorisation)

    def keep_fastest(
        self, fastest: dict[int, Row], seconds: Floats, memory: Floats, where: tuple[Any, Any, int], factorisation: Any
    ) -> None:
        """The fastest of each factorisation: the rows of one lie together."""
        starts = np.concatenate([[0], np.nonzero(np.diff(factorisation))[0] + 1])
        ends = [*starts[1:].tolist(), len(seconds)]
        for start, end, least in zip(starts.tolist(), ends, np.minimum.reduceat(seconds, starts).tolist(), strict=True):
            number = int(factorisation[start])
            if least < np.inf and (number not in fastest or least < fastest[number][0]):
                fastest[number] = self.row(seconds, memory, where, start + int(np.argmin(seconds[start:end])))

    def row(self, seconds: Floats, memory: Floats, where: tuple[Any, Any, int], index: int) -> Row:
        candidate, placed, recompute = where
        return float(seconds[index]), float(memory[index]), (int(candidate[index]), int(placed[index]), recompute)

    def keep_best(self, chosen: Any, seconds: Floats, memory: Floats, where: tuple[Any, Any, int]) -> None:
        if len(chosen) > self.top:
            chosen = chosen[np.argpartition(seconds[chosen], self.top)[: self.top]]
        if len(chosen):
            self.rows = sorted([*self.rows, *(self.row(seconds, memory, where, i) for i in chosen)])[: self.top]

    def keep_front(self, fits: Any, seconds: Floats, memory: Floats, where: tuple[Any, Any, int]) -> None:
        """Rows that no row of the front so far beats on both; few are left after the first chunks."""
        if self.front:
            bytes_ = np.array([row[1] for row in self.front])
            fastest = np.array([np.inf, *(row[0] for row in self.front)])
            fits = fits & (seconds < fastest[np.searchsorted(bytes_, memory, side="right")])
        chosen = np.nonzero(fits)[0]
        if not len(chosen):
            return
        order = chosen[np.lexsort((seconds[chosen], memory[chosen]))]
        best = np.minimum.accumulate(seconds[order])
        leads = order[np.concatenate([[True], seconds[order][1:] < best[:-1]])]
        merged = sorted(
            [*self.front, *(self.row(seconds, memory, where, i) for i in leads)], key=lambda row: (row[1], row[0])
        )
        self.front = []
        for row in merged:
            if not self.front or row[0] < self.front[-1][0]:
                self.front.append(row)

    def best(self) -> list[Row]:
        return self.rows

    def pareto(self) -> list[Row]:
        return self.front
