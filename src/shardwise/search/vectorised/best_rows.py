"""The rows that are kept from a stream of priced layouts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RankedRow = tuple[float, float, tuple[int, int, int]]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class RowBlock(NamedTuple):
    """Rows that are priced at once: a column for each candidate and placement, and a line for each ZeRO stage.

    `candidate` is the index of a column's first candidate, to which the lines' ZeRO stages are added; `policy` is the index of
    the recomputation and offload. `factorisation` never decreases along the columns; `even`: whether a column splits the batch
    evenly.
    """

    candidate: Ints
    placed: Ints
    policy: int
    factorisation: Ints
    even: Mask

    def row(self, seconds: Floats, memory: Floats, index: int) -> RankedRow:
        """A row by its place among all of them, line after line."""
        line, column = divmod(index, len(self.candidate))
        where = int(self.candidate[column]) + line, int(self.placed[column]), self.policy
        return float(seconds[line, column]), float(memory[line, column]), where


class BestRows:
    """The fastest that fit, the Pareto front of (time, memory) among these, and the one with the least memory of all.

    `fastest` and `fastest_even` are by factorisation: of all that fit, and of those that split the batch evenly.
    """

    def __init__(self, top: int, capacity_bytes: float, num_factorisations: int) -> None:
        self.top = top
        self.capacity = capacity_bytes
        self.rows: list[RankedRow] = []
        self.pareto: list[RankedRow] = []
        self.least_memory: RankedRow = (
            np.inf,
            np.inf,
            (0, 0, 0),
        )  # pure data parallelism is always legal, so a row replaces it
        self.fastest, self.fastest_even = (
            FastestPerFactorisation(num_factorisations),
            FastestPerFactorisation(num_factorisations),
        )
        self.num_rows = 0
        self.num_fitting = 0
        self.num_timed = 0

    @property
    def limit_s(self) -> float:
        """The time that a row must beat to be among the fastest."""
        return self.rows[-1][0] if len(self.rows) == self.top else np.inf

    def count_fitting(self, memory: Floats) -> Mask:
        """Count a chunk by its memory. Returns which rows fit."""
        fits = memory <= self.capacity
        self.num_rows += memory.size
        self.num_fitting += int(np.count_nonzero(fits))
        return fits

    def may_be_kept(self, bound: Floats, memory: Floats, fits: Mask, chunk: RowBlock) -> Mask:
        """Columns of which a row that takes no less than `bound` (over columns) may be kept: it fits, and the bound is below
        the time to beat. The column of the row with the least memory of all is included, fitting or not."""
        beaten = np.where(chunk.even, self.fastest_even.seconds.take(chunk.factorisation), -np.inf)
        beaten = np.maximum(beaten, self.fastest.seconds.take(chunk.factorisation))
        least = np.where(fits, memory, np.inf).min(
            axis=0
        )  # no row of a column needs less, and less time only wins with less memory
        beaten = np.maximum(beaten, self.front_seconds(least))
        found: Mask = (least < np.inf) & ((bound < beaten) | (bound <= self.limit_s))
        lean = int(np.argmin(memory))
        if memory.flat[lean] < self.least_memory[1]:
            found[lean % len(found)] = True
        return found

    def front_seconds(self, memory: Floats) -> Floats:
        """Seconds of the fastest row of the front that needs no more memory."""
        bytes_ = np.array([row[1] for row in self.pareto])
        fastest = np.array([np.inf, *(row[0] for row in self.pareto)])
        return fastest[np.searchsorted(bytes_, memory, side="right")]

    def add(self, seconds: Floats, memory: Floats, fits: Mask, chunk: RowBlock) -> None:
        """Add some columns of a chunk with their times."""
        self.num_timed += seconds.size
        lean = int(np.argmin(memory))
        if memory.flat[lean] < self.least_memory[1]:
            self.least_memory = chunk.row(seconds, memory, lean)
        kept = np.where(fits, seconds, np.inf)
        self.update_best(kept, memory, chunk)
        self.update_front(kept, memory, chunk)
        least = kept.min(axis=0)
        self.fastest.update_rows(least, kept, memory, chunk)
        self.fastest_even.update_rows(np.where(chunk.even, least, np.inf), kept, memory, chunk)

    def update_best(self, seconds: Floats, memory: Floats, chunk: RowBlock) -> None:
        """The fastest; among equals the one with less memory, then the first."""
        limit = self.limit_s
        chosen = np.flatnonzero(seconds <= min(limit, np.finfo(float).max))
        if len(chosen) > self.top:
            found = seconds.flat[chosen]
            chosen = chosen[found <= np.partition(found, self.top - 1)[self.top - 1]]
        if len(chosen):
            rows = (chunk.row(seconds, memory, index) for index in chosen.tolist())
            self.rows = sorted([*self.rows, *rows])[: self.top]

    def update_front(self, seconds: Floats, memory: Floats, chunk: RowBlock) -> None:
        """Rows that no row of the front so far beats on both; few are left after the first chunks."""
        near = np.flatnonzero(seconds < self.front_seconds(memory.min(axis=0)))
        seconds_, bytes_ = seconds.flat[near], memory.flat[near]
        found = seconds_ < self.front_seconds(bytes_)
        chosen, seconds_, bytes_ = near[found], seconds_[found], bytes_[found]
        if not len(chosen):
            return
        order = np.lexsort((seconds_, bytes_))
        best = np.minimum.accumulate(seconds_[order])
        leads = chosen[order[np.concatenate([[True], seconds_[order][1:] < best[:-1]])]]
        rows = (chunk.row(seconds, memory, index) for index in leads.tolist())
        merged = sorted([*self.pareto, *rows], key=lambda row: (row[1], row[0]))
        self.pareto = []
        for row in merged:
            if not self.pareto or row[0] < self.pareto[-1][0]:
                self.pareto.append(row)


class FastestPerFactorisation:
    """The fastest row of each factorisation, and its seconds (infinite where there is none)."""

    def __init__(self, num_factorisations: int) -> None:
        self.seconds, self.memory = np.full(num_factorisations, np.inf), np.zeros(num_factorisations)
        self.where = np.zeros((num_factorisations, 3), dtype=np.int64)

    @property
    def rows(self) -> list[RankedRow]:
        """The rows, by the indices of their factorisations."""
        found = np.flatnonzero(np.isfinite(self.seconds))
        places = map(tuple, self.where[found].tolist())
        return list(zip(self.seconds[found].tolist(), self.memory[found].tolist(), places, strict=True))

    def update_rows(self, least: Floats, seconds: Floats, memory: Floats, chunk: RowBlock) -> None:
        """Add some rows; `least` is over their columns; those of one factorisation are adjacent."""
        starts = np.concatenate([[0], np.flatnonzero(np.diff(chunk.factorisation)) + 1])
        fastest = np.repeat(np.minimum.reduceat(least, starts), np.diff([*starts.tolist(), len(least)]))
        better = np.flatnonzero((least == fastest) & (least < self.seconds.take(chunk.factorisation)))
        number, first = np.unique(chunk.factorisation[better], return_index=True)
        column = better[first]
        line = np.argmin(seconds[:, column], axis=0)
        self.seconds[number], self.memory[number] = least[column], memory[line, column]
        self.where[number, 0], self.where[number, 1] = chunk.candidate[column] + line, chunk.placed[column]
        self.where[number, 2] = chunk.policy
