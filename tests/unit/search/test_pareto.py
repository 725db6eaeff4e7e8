"""What is kept of a stream of rows is what is kept of all of them at once, and what bounds leave out changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.search.vectorised.best_rows import BestRows, RankedRow, RowBlock

CAPACITY, NUM_FACTORISATIONS, NUM_LINES = 60.0, 6, 3


def stream(
    seed: int, num_chunks: int, num_columns: int, *, bounded: bool
) -> tuple[BestRows, list[RankedRow], list[tuple[int, bool]]]:
    """A front that took random rows, of few different values so that there are equals, and all of the rows, with the
    factorisation and the evenness of each. `bounded`: it took no columns whose bound says that none of their rows is kept."""
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
            kept = np.flatnonzero(front.may_be_kept(bound, memory, fits, chunk))
            if not len(kept):
                continue
            chunk = RowBlock(candidate[kept], chunk.placed[kept], policy, factorisation[kept], chunk.even[kept])
            seconds, memory, fits = seconds[:, kept], memory[:, kept], fits[:, kept]
        front.add(seconds, memory, fits, chunk)
    return front, rows, marks


SIZES = pytest.mark.parametrize(("num_chunks", "num_columns"), [(1, 1), (1, 70), (40, 1), (8, 20)])


@pytest.mark.parametrize("seed", range(5))
@SIZES
def test_a_stream_keeps_what_all_rows_together_keep(seed: int, num_chunks: int, num_columns: int) -> None:
    front, rows, _ = stream(seed, num_chunks, num_columns, bounded=False)
    fitting = [row for row in rows if row[1] <= CAPACITY]
    assert (front.num_rows, front.num_timed, front.num_fitting) == (len(rows), len(rows), len(fitting))
    assert front.least_memory[1] == min(row[1] for row in rows)
    assert front.least_memory in rows
    assert front.rows == sorted(fitting)[:5]
    beaten = {
        row for row in fitting for other in fitting
        if other[0] <= row[0] and other[1] <= row[1] and other[:2] != row[:2]
    }  # fmt: skip
    assert [row[:2] for row in front.pareto] == sorted(
        {row[:2] for row in fitting if row not in beaten}, key=lambda row: row[1]
    )
    assert set(front.pareto) <= set(fitting)


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_of_each_factorisation_of_all_and_of_even_batches(seed: int) -> None:
    front, rows, marks = stream(seed, 8, 20, bounded=False)
    for found, only_even in ((front.fastest, False), (front.fastest_even, True)):
        expected: dict[int, float] = {}
        for row, (factorisation, even) in zip(rows, marks, strict=True):
            if row[1] <= CAPACITY and (even or not only_even):
                expected[factorisation] = min(row[0], expected.get(factorisation, row[0]))
        assert [row[0] for row in found.rows] == [seconds for _, seconds in sorted(expected.items())]
        assert set(found.rows) <= set(rows)


@pytest.mark.parametrize("seed", range(20))
@SIZES
def test_bounds_leave_out_nothing_that_is_kept(seed: int, num_chunks: int, num_columns: int) -> None:
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
