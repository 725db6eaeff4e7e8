"""What is kept of a stream of rows is what is kept of all of them at once."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.search.pareto import Front, Row

CAPACITY = 60.0


def stream(seed: int, num_chunks: int, num_rows: int) -> tuple[Front, list[Row], list[tuple[int, bool]]]:
    """A front that took random rows, of few different values so that there are equals, and all of the rows, with the
    factorisation and the evenness of each."""
    rng = np.random.default_rng(seed)
    front, rows, marks = Front(5, CAPACITY), [], []
    for chunk in range(num_chunks):
        seconds, memory = (rng.integers(1, 100, num_rows).astype(float) for _ in range(2))
        candidate, placed = np.arange(num_rows) + chunk * num_rows, rng.integers(0, 9, num_rows)
        factorisation, even = np.sort(rng.integers(0, 6, num_rows)), rng.random(num_rows) < 0.3
        front.add(seconds, memory, (candidate, placed, chunk), factorisation, even)
        for i in range(num_rows):
            rows.append((seconds[i], memory[i], (int(candidate[i]), int(placed[i]), chunk)))
            marks.append((int(factorisation[i]), bool(even[i])))
    return front, rows, marks


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_chunks", "num_rows"), [(1, 3), (1, 200), (40, 1), (8, 50)])
def test_a_stream_keeps_what_all_rows_together_keep(seed: int, num_chunks: int, num_rows: int) -> None:
    front, rows, _ = stream(seed, num_chunks, num_rows)
    fitting = [row for row in rows if row[1] <= CAPACITY]
    assert (front.num_rows, front.num_fitting) == (len(rows), len(fitting))
    assert front.leanest[1] == min(row[1] for row in rows)
    assert front.leanest in rows
    assert [row[0] for row in front.best()] == sorted(row[0] for row in fitting)[:5]
    assert set(front.best()) <= set(fitting)
    beaten = {
        row for row in fitting for other in fitting
        if other[0] <= row[0] and other[1] <= row[1] and other[:2] != row[:2]
    }  # fmt: skip
    assert [row[:2] for row in front.pareto()] == sorted(
        {row[:2] for row in fitting if row not in beaten}, key=lambda row: row[1]
    )
    assert set(front.pareto()) <= set(fitting)


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_of_each_factorisation_of_all_and_of_even_batches(seed: int) -> None:
    front, rows, marks = stream(seed, 8, 50)
    for found, only_even in ((front.fastest, False), (front.fastest_even, True)):
        expected: dict[int, float] = {}
        for row, (factorisation, even) in zip(rows, marks, strict=True):
            if row[1] <= CAPACITY and (even or not only_even):
                expected[factorisation] = min(row[0], expected.get(factorisation, row[0]))
        assert {number: row[0] for number, row in found.items()} == expected
        assert set(found.values()) <= set(rows)
