"""A stream of rows keeps what all rows at once would keep, and rows skipped by bounds change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.search.vectorised.best_rows import BestRows, RankedRow, RowBlock

CAPACITY, NUM_FACTORISATIONS, NUM_LINES = 60.0, 6, 3


def stream(
    seed: int, num_chunks: int, num_columns: int, *, bounded: bool
) -> tuple[BestRows, list[RankedRow], list[tuple[int, bool]]]:
    """A front that received random rows with few different values (so that some are equal), all of the rows, and the
    factorisation and evenness of each. `bounded`: columns whose bound excludes all of their rows are skipped."""
    rng = np.random.default_rng(seed)
    front, rows, marks = BestRows(5, CAPACITY, NUM_FACTORISATIONS), [], []
    for policy in range(num_chunks):
        seconds, memory = (rng.integers(1, 100, (NUM_LINES, num_columns)).astype(float) for _ in range(2))
        bound = seconds.min(axis=0) * rng.choice([0.5, 1.0], num_columns)
        candidate = (np.arange(num_columns) + policy * num_columns) * NUM_LINES
        factorisation = np.sort(rng.integers(0, NUM_FACTORISATIONS, num_columns))
        chunk = RowBlock(
            candidate, rng.integers(0, 9, num_columns), policy, factorisation, rng.random(num_columns) < 0.3
        )
        fits = front.count_fitting(memory)
        for line in range(NUM_LINES):
            for i in range(num_columns):
                where = int(candidate[i]) + line, int(chunk.placed[i]), policy
                rows.append((float(seconds[line, i]), float(memory[line, i]), where))
                marks.append((int(factorisation[i]), bool(chunk.even[i])))
        if bounded:
            columns = np.flatnonzero(front.may_be_kept(bound, memory, fits, chunk))
            if not len(columns):
                continue
            chunk = RowBlock(
                candidate[columns], chunk.placed[columns], policy, factorisation[columns], chunk.even[columns]
            )
            seconds, memory, fits = seconds[:, columns], memory[:, columns], fits[:, columns]
        front.add(seconds, memory, fits, chunk)
    return front, rows, marks


SIZES = pytest.mark.parametrize(("num_chunks", "num_columns"), [(1, 1), (1, 70), (40, 1), (8, 20)])


@pytest.mark.parametrize("seed", range(5))
@SIZES
def test_a_stream_keeps_what_all_rows_at_once_would_keep(seed: int, num_chunks: int, num_columns: int) -> None:
    front, rows, _ = stream(seed, num_chunks, num_columns, bounded=False)
    fitting = [row for row in rows if row[1] <= CAPACITY]
    assert (front.num_rows, front.num_timed, front.num_fitting) == (len(rows), len(rows), len(fitting))
    assert front.least_memory[1] == min(row[1] for row in rows)
    assert front.least_memory in rows
    assert front.rows == sorted(fitting)[:5]
    beaten = {
        row for row in fitting for better in fitting
        if better[0] <= row[0] and better[1] <= row[1] and better[:2] != row[:2]
    }  # fmt: skip
    assert [row[:2] for row in front.pareto] == sorted(
        {row[:2] for row in fitting if row not in beaten}, key=lambda row: row[1]
    )
    assert set(front.pareto) <= set(fitting)


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_rows_are_kept_by_factorisation_for_all_and_for_even_batches(seed: int) -> None:
    front, rows, marks = stream(seed, 8, 20, bounded=False)
    for fastest, only_even in ((front.fastest, False), (front.fastest_even, True)):
        expected: dict[int, float] = {}
        for row, (factorisation, even) in zip(rows, marks, strict=True):
            if row[1] <= CAPACITY and (even or not only_even):
                expected[factorisation] = min(row[0], expected.get(factorisation, row[0]))
        assert [row[0] for row in fastest.rows] == [seconds for _, seconds in sorted(expected.items())]
        assert set(fastest.rows) <= set(rows)


@pytest.mark.parametrize("seed", range(20))
@SIZES
def test_bounds_skip_no_kept_row(seed: int, num_chunks: int, num_columns: int) -> None:
    front, rows, _ = stream(seed, num_chunks, num_columns, bounded=True)
    every, same, _ = stream(seed, num_chunks, num_columns, bounded=False)
    assert rows == same
    assert front.rows == every.rows
    assert front.pareto == every.pareto
    assert front.least_memory == every.least_memory
    assert front.fastest.rows == every.fastest.rows
    assert front.fastest_even.rows == every.fastest_even.rows
    assert (front.num_rows, front.num_fitting) == (every.num_rows, every.num_fitting)
    assert front.num_timed < every.num_timed or num_chunks * num_columns <= 70
