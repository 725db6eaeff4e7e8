"""Every cell of the matrix, held against a plain loop in one process, and its collectives against the instruction list.

    python tests/distributed/matrix.py            # every cell, `make matrix`: about half an hour on two cores
    python tests/distributed/matrix.py cp ring    # those with these words in their names

In float64: loss and norm to 1e-12, each gradient and weight to 1e-10. Ends with 1 where a cell fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from cells import Cell, cells  # noqa: E402
from training import Found as Plain  # noqa: E402
from training import plain  # noqa: E402

from shardwise.run.spawn import run_in_processes  # noqa: E402
from shardwise.values.errors import InputError  # noqa: E402
from shardwise.verify.training.compare_runs import CaseResult, collective_differences, relative_errors, run_case  # noqa: E402  # noqa: E402


def run(rank: int, size: int, device: torch.device, asked: Sequence[Cell]) -> Iterator[CaseResult]:
    """All cells of one size, one after the other in the same processes."""
    torch.set_num_threads(1)
    yield from (run_case(cell.case.small(), captures=True) for cell in asked)


def judged(cell: Cell, found: CaseResult) -> list[str]:
    """What is wrong with a cell."""
    judged = relative_errors(found, as_found(plain(cell.case)))
    problems = [] if judged.ok else [f"{judged.largest}, gradient of {judged.gradient}, weight {judged.weight}"]
    return [*problems, *collective_differences(cell.case.small(), found.issued)]


def as_found(wanted: Plain) -> CaseResult:
    """What the plain loop gives, as the engine's."""
    gradients = [{name: one.numpy() for name, one in step.items()} for step in wanted.gradients]
    weights = {name: one.numpy() for name, one in wanted.weights.items()}
    return CaseResult(losses=wanted.losses, norms=wanted.norms, gradients=gradients, weights=weights)


def outcomes(asked: Sequence[Cell], size: int) -> Iterator[tuple[Cell, list[str]]]:
    """What is wrong with each cell of a size; behind one that ends its processes the others go on in new ones."""
    left = list(asked)
    while left:
        try:
            for found in run_in_processes(run, left, "cpu", size, len(left), "matrix"):
                yield left[0], judged(left.pop(0), found)
        except InputError as error:
            yield left.pop(0), list(error.problems)


def main(words: Sequence[str]) -> int:
    """Run those cells whose names have all words."""
    asked = [cell for cell in cells() if all(word in cell.name for word in words)]
    started, failed, done = time.monotonic(), 0, 0
    for size in sorted({cell.case.layout.num_devices for cell in asked}):
        own = [cell for cell in asked if cell.case.layout.num_devices == size]
        for cell, problems in outcomes(own, size):
            done, failed = done + 1, failed + bool(problems)
            state, seconds = "FAILED" if problems else "equal", time.monotonic() - started
            print(f"{done:4} of {len(asked)}  {seconds:6.0f} s  {size} ranks  {cell.name}  {state}", flush=True)
            for problem in problems:
                print(f"      {problem}", flush=True)
    print(f"{done - failed} of {done} cells equal one process, in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
