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
    """Rows that are priced at once: a column for each candidate and placement, a line for each ZeRO stage.

    `candidate` is the index of a column's first candidate; adding the line gives the candidate with that line's ZeRO stage.
    `policy` is the index of recomputation and offload. `factorisation` never decreases along the columns. `even`: the column
    splits the batch evenly."""

    candidate: Ints
    placed: Ints
    policy: int
    factorisation: Ints
    even: Mask

    def row(self, seconds: Floats, memory: Floats, index: int) -> RankedRow:
        """Return a row by its index in the flattened block, line after line."""
        line, column = divmod(index, len(self.candidate))
        indices = int(self.candidate[column]) + line, int(self.placed[column]), self.policy
        return float(seconds[line, column]), float(memory[line, column]), indices


class BestRows:
    """The fastest rows that fit, the Pareto front of (time, memory) among these, and the row with the least memory of all.

    `fastest` and `fastest_even` are by factorisation: of all that fit, and of those that split the batch evenly."""

    def __init__(self, top: int, capacity_bytes: float, num_factorisations: int) -> None:
        self.top = top
        self.capacity = capacity_bytes
        self.rows: list[RankedRow] = []
        self.pareto: list[RankedRow] = []
        # Replaced by a row in every search, since pure data parallelism is always legal.
        self.least_memory: RankedRow = (np.inf, np.inf, (0, 0, 0))
        self.fastest = FastestPerFactorisation(num_factorisations)
        self.fastest_even = FastestPerFactorisation(num_factorisations)
        self.num_rows = 0
        self.num_fitting = 0
        self.num_timed = 0

    @property
    def limit_s(self) -> float:
        """Time that a row must beat to be among the fastest."""
        return self.rows[-1][0] if len(self.rows) == self.top else np.inf

    def count_fitting(self, memory: Floats) -> Mask:
        """Count a block by its memory, and return which rows fit."""
        fits = memory <= self.capacity
        self.num_rows += memory.size
        self.num_fitting += int(np.count_nonzero(fits))
        return fits

    def may_be_kept(self, bound: Floats, memory: Floats, fits: Mask, block: RowBlock) -> Mask:
        """Return the columns with a row that may be kept, if no row is faster than `bound` (by column).

        A column is dropped only if none of the fastest, the front and the fastest per factorisation could take it. The column
        of the row with the least memory of all is kept, fitting or not."""
        seconds_to_beat = np.where(block.even, self.fastest_even.seconds.take(block.factorisation), -np.inf)
        seconds_to_beat = np.maximum(seconds_to_beat, self.fastest.seconds.take(block.factorisation))
        # No row of a column needs less memory than this, and a faster front row only loses to less memory.
        least_memory = np.where(fits, memory, np.inf).min(axis=0)
        seconds_to_beat = np.maximum(seconds_to_beat, self.front_seconds(least_memory))
        mask: Mask = (least_memory < np.inf) & ((bound < seconds_to_beat) | (bound <= self.limit_s))
        least_index = int(np.argmin(memory))
        if memory.flat[least_index] < self.least_memory[1]:
            mask[least_index % len(mask)] = True
        return mask

    def front_seconds(self, memory: Floats) -> Floats:
        """Return the seconds of the fastest row of the front that needs no more memory."""
        bytes_ = np.array([row[1] for row in self.pareto])
        fastest = np.array([np.inf, *(row[0] for row in self.pareto)])
        return fastest[np.searchsorted(bytes_, memory, side="right")]

    def add(self, seconds: Floats, memory: Floats, fits: Mask, block: RowBlock) -> None:
        """Add columns of a block with their times."""
        self.num_timed += seconds.size
        least_index = int(np.argmin(memory))
        if memory.flat[least_index] < self.least_memory[1]:
            self.least_memory = block.row(seconds, memory, least_index)
        fitting_s = np.where(fits, seconds, np.inf)
        self.update_best(fitting_s, memory, block)
        self.update_front(fitting_s, memory, block)
        column_s = fitting_s.min(axis=0)
        self.fastest.update_rows(column_s, fitting_s, memory, block)
        self.fastest_even.update_rows(np.where(block.even, column_s, np.inf), fitting_s, memory, block)

    def update_best(self, seconds: Floats, memory: Floats, block: RowBlock) -> None:
        """Update the fastest rows; among equals the one with less memory, then the first."""
        limit_s = self.limit_s
        chosen = np.flatnonzero(seconds <= min(limit_s, np.finfo(float).max))
        if len(chosen) > self.top:
            chosen_s = seconds.flat[chosen]
            chosen = chosen[chosen_s <= np.partition(chosen_s, self.top - 1)[self.top - 1]]
        if len(chosen):
            rows = (block.row(seconds, memory, index) for index in chosen.tolist())
            # Ties go to less memory, then to the indices of candidate, placement and policy, whatever the size of a block.
            self.rows = sorted([*self.rows, *rows])[: self.top]

    def update_front(self, seconds: Floats, memory: Floats, block: RowBlock) -> None:
        """Update the Pareto front; few rows pass its first test after the first blocks."""
        near = np.flatnonzero(seconds < self.front_seconds(memory.min(axis=0)))
        seconds_, bytes_ = seconds.flat[near], memory.flat[near]
        ahead = seconds_ < self.front_seconds(bytes_)
        chosen, seconds_, bytes_ = near[ahead], seconds_[ahead], bytes_[ahead]
        if not len(chosen):
            return
        order = np.lexsort((seconds_, bytes_))
        best = np.minimum.accumulate(seconds_[order])
        leads = chosen[order[np.concatenate([[True], seconds_[order][1:] < best[:-1]])]]
        rows = (block.row(seconds, memory, index) for index in leads.tolist())
        merged = sorted([*self.pareto, *rows], key=lambda row: (row[1], row[0]))
        self.pareto = []
        for row in merged:
            if not self.pareto or row[0] < self.pareto[-1][0]:
                self.pareto.append(row)


class FastestPerFactorisation:
    """The fastest row of each factorisation, and its seconds (infinite if there is none)."""

    def __init__(self, num_factorisations: int) -> None:
        self.seconds, self.memory = np.full(num_factorisations, np.inf), np.zeros(num_factorisations)
        self.where = np.zeros((num_factorisations, 3), dtype=np.int64)

    @property
    def rows(self) -> list[RankedRow]:
        """Rows in the order of their factorisations."""
        filled = np.flatnonzero(np.isfinite(self.seconds))
        indices = map(tuple, self.where[filled].tolist())
        return list(zip(self.seconds[filled].tolist(), self.memory[filled].tolist(), indices, strict=True))

    def update_rows(self, column_s: Floats, seconds: Floats, memory: Floats, block: RowBlock) -> None:
        """Add the rows of a block; `column_s` is the fastest time of each column. Columns of one factorisation are adjacent."""
        starts = np.concatenate([[0], np.flatnonzero(np.diff(block.factorisation)) + 1])
        fastest = np.repeat(np.minimum.reduceat(column_s, starts), np.diff([*starts.tolist(), len(column_s)]))
        better = np.flatnonzero((column_s == fastest) & (column_s < self.seconds.take(block.factorisation)))
        number, first = np.unique(block.factorisation[better], return_index=True)
        column = better[first]
        line = np.argmin(seconds[:, column], axis=0)
        self.seconds[number], self.memory[number] = column_s[column], memory[line, column]
        self.where[number, 0], self.where[number, 1] = (block.candidate[column] + line, block.placed[column])
        self.where[number, 2] = block.policy
