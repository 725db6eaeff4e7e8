"""The order in which test files run, and the few files that find most faults.

    python tests/order.py          # print the files of `make quick`

Files come in the order of mutants killed per CPU second, so that a broken change fails soon: kills are those recorded in
`benchmarks/mutants.jsonl`, costs those measured into `benchmarks/suite.csv`. Files that mostly wait for processes start first,
one at a time, and those that have killed no mutant come last, the costliest before the others. Files that are not in the tables
count as cheap.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from xdist.scheduler.loadscope import LoadScopeScheduling

TESTS = Path(__file__).parent
COSTS = TESTS.parent / "benchmarks" / "suite.csv"
MUTANTS = TESTS.parent / "benchmarks" / "mutants.jsonl"
# Files that predict the published runs, once for all in one process.
TOGETHER = (
    "unit/calibrate/test_accuracy.py", "unit/calibrate/test_groups.py", "unit/calibrate/test_row.py",
    "unit/reconcile/test_memory.py", "planning/test_choose.py", "planning/test_abilities.py", "planning/test_progress.py",
)  # fmt: skip
WAITING_S = 8.0  # a file that waits for so long starts early
PIECE_S = 12.0  # CPU seconds of the cases that one worker takes at once
QUICK_SHARE = 0.9  # of the recorded mutants that died


class Cost(NamedTuple):
    """CPU and wall seconds of a test file."""

    cpu_s: float
    wall_s: float


CHEAP = Cost(0.5, 0.5)


@cache
def read_costs(path: Path = COSTS) -> Mapping[str, Cost]:
    """Costs by the path of a test file below `tests`."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["file"]: Cost(float(row["cpu_s"]), float(row["wall_s"])) for row in csv.DictReader(file)}


@cache
def read_kills(path: Path = MUTANTS) -> Mapping[str, int]:
    """How many recorded mutants each test file was the first to kill."""
    outcomes = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    tests = (outcome["test"].partition("tests/")[2] for outcome in outcomes if outcome["outcome"] == "died")
    return Counter(test.partition("::")[0] for test in tests)


def is_waiting(piece: str, costs: Mapping[str, Cost] | None = None) -> bool:
    """Return whether a test file, or a piece of one, mostly waits for processes."""
    costs = read_costs() if costs is None else costs
    cost = costs.get(piece.removeprefix("tests/").partition(" ")[0], CHEAP)
    return cost.wall_s - cost.cpu_s > WAITING_S


def order_files(
    files: Iterable[str], costs: Mapping[str, Cost] | None = None, kills: Mapping[str, int] | None = None
) -> list[str]:
    """Return test files in the order in which they run."""
    costs, kills = read_costs() if costs is None else costs, read_kills() if kills is None else kills

    def key(file: str) -> tuple[bool, float, float, str]:
        cost = costs.get(file, CHEAP)
        return not is_waiting(file, costs), -kills.get(file, 0) / max(cost.cpu_s, 0.1), -cost.cpu_s, file

    return sorted(files, key=key)


def named_files(arguments: Sequence[str]) -> list[str]:
    """Return the files below `tests` that arguments of pytest name, or of whose tests; none where any names a folder."""
    paths = [Path(argument.partition("::")[0]).absolute() for argument in arguments]
    return [path.relative_to(TESTS).as_posix() for path in paths] if all(path.suffix == ".py" for path in paths) else []


def quick_files(
    share: float = QUICK_SHARE, costs: Mapping[str, Cost] | None = None, kills: Mapping[str, int] | None = None
) -> list[str]:
    """Return the files that together killed a share of the recorded mutants in the fewest CPU seconds, best first."""
    costs, kills = read_costs() if costs is None else costs, read_kills() if kills is None else kills
    required = math.ceil(share * sum(kills.values()))
    # cheapest[n]: the seconds and the files of the cheapest choice so far with at least n kills
    cheapest: list[tuple[float, tuple[str, ...]]] = [(0.0, ()), *[(math.inf, ())] * required]
    for file in sorted(kills):
        for number in range(required, 0, -1):
            seconds, chosen = cheapest[max(number - kills[file], 0)]
            with_file = seconds + costs.get(file, CHEAP).cpu_s, (*chosen, file)
            cheapest[number] = min(cheapest[number], with_file)
    return sorted(cheapest[required][1], key=lambda file: (-kills[file] / max(costs.get(file, CHEAP).cpu_s, 0.1), file))


class OrderedScheduling(LoadScopeScheduling):
    """Gives each free worker the next file, or the next piece of a file that takes long, in the order of the collection.

    Tests of one file stay together, because they share what is computed once in a process.
    """

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._pieces: dict[str, str] = {}

    def _assign_work_unit(self, node: Any) -> None:
        """Give a worker the next piece; one that mostly waits only while no other worker has one, or two cores would be idle."""
        if any(not done for scope in self._waiting_of_others(node) for done in scope.values()):
            computing = next((piece for piece in self.workqueue if not is_waiting(piece)), None)
            if computing is not None:
                self.workqueue.move_to_end(computing, last=False)
        super()._assign_work_unit(node)

    def _waiting_of_others(self, node: Any) -> list[dict[str, bool]]:
        other_work = [work for worker, work in self.assigned_work.items() if worker is not node]
        return [tests for work in other_work for piece, tests in work.items() if is_waiting(piece)]

    def _split_scope(self, nodeid: str) -> str:
        if not self._pieces:
            self._pieces = cut_into_pieces(self.collection or ())
        return self._pieces[nodeid]


def cut_into_pieces(nodeids: Iterable[str], costs: Mapping[str, Cost] | None = None) -> dict[str, str]:
    """Return, by test, the piece of work that it is in: a file, or consecutive cases of it of about `PIECE_S` CPU seconds."""
    costs = read_costs() if costs is None else costs
    by_file: dict[str, list[str]] = {}
    for nodeid in nodeids:
        by_file.setdefault(nodeid.partition("::")[0], []).append(nodeid)
    pieces = {}
    for file, cases in by_file.items():
        if file.removeprefix("tests/") in TOGETHER:
            pieces |= dict.fromkeys(cases, "published runs")
            continue
        num_pieces = math.ceil(costs.get(file.removeprefix("tests/"), CHEAP).cpu_s / PIECE_S)
        for number, nodeid in enumerate(cases):
            pieces[nodeid] = f"{file} {number * num_pieces // len(cases)}"
    return pieces


if __name__ == "__main__":
    print("\n".join(f"tests/{file}" for file in quick_files()))
