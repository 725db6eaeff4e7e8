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
from training import RunResult, plain  # noqa: E402

from shardwise.run.spawn import run_in_processes  # noqa: E402
from shardwise.values.errors import InputError  # noqa: E402
from shardwise.verify.training.compare_runs import CaseResult, collective_differences, relative_errors, run_case  # noqa: E402


def run(rank: int, size: int, device: torch.device, selected: Sequence[Cell]) -> Iterator[CaseResult]:
    """All cells of one size, one after the other in the same processes."""
    torch.set_num_threads(1)
    yield from (run_case(cell.case.small(), captures=True) for cell in selected)


def problems_of(cell: Cell, result: CaseResult) -> list[str]:
    """Return the differences of a cell from one process."""
    errors = relative_errors(result, as_case_result(plain(cell.case)))
    problems = [] if errors.ok else [f"{errors.largest}, gradient of {errors.gradient}, weight {errors.weight}"]
    return [*problems, *collective_differences(cell.case.small(), result.issued)]


def as_case_result(reference: RunResult) -> CaseResult:
    """Return the result of the plain loop in the form of the engine's."""
    gradients = [{name: gradient.numpy() for name, gradient in step.items()} for step in reference.gradients]
    weights = {name: weight.numpy() for name, weight in reference.weights.items()}
    return CaseResult(losses=reference.losses, norms=reference.norms, gradients=gradients, weights=weights)


def outcomes(selected: Sequence[Cell], size: int) -> Iterator[tuple[Cell, list[str]]]:
    """Return the problems of each cell of a size; if a cell ends its processes, new ones run the rest."""
    remaining = list(selected)
    while remaining:
        try:
            for result in run_in_processes(run, remaining, "cpu", size, len(remaining), "matrix"):
                yield remaining[0], problems_of(remaining.pop(0), result)
        except InputError as error:
            yield remaining.pop(0), list(error.problems)


def main(words: Sequence[str]) -> int:
    """Run the cells whose names have all words."""
    selected = [cell for cell in cells() if all(word in cell.name for word in words)]
    started, failed, done = time.monotonic(), 0, 0
    for size in sorted({cell.case.layout.num_devices for cell in selected}):
        of_size = [cell for cell in selected if cell.case.layout.num_devices == size]
        for cell, problems in outcomes(of_size, size):
            done, failed = done + 1, failed + bool(problems)
            state, seconds = "FAILED" if problems else "equal", time.monotonic() - started
            print(f"{done:4} of {len(selected)}  {seconds:6.0f} s  {size} ranks  {cell.name}  {state}", flush=True)
            for problem in problems:
                print(f"      {problem}", flush=True)
    print(f"{done - failed} of {done} cells equal one process, in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
