"""Where the time of the test suite goes: CPU and wall seconds, and processes started, per test file and per room of tests.

    python benchmarks/suite.py [--out build/suite.csv] [pytest arguments]

Runs pytest with the given arguments (default: the whole suite on two workers) and measures each test on its worker: CPU seconds
include those of every process that the test starts. Prints the totals of each room and the costliest files, and writes one row
per file. CPU seconds are of this machine; the first line states its time for 10 million additions in Python, by which figures
of machines compare. Linux only: it reads `/proc`. With `--out benchmarks/suite.csv` the rows are those by which `tests/order.py`
orders the suite.

A process that outlives the test that started it counts for the tests during which it runs, and one whose parent has ended is
not counted any more. Processes are counted as they start, by a `sitecustomize` that the tests' Pythons inherit: Python only.
"""

from __future__ import annotations

import argparse
import csv
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

REPOSITORY = Path(__file__).parents[1]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FOLDER, STARTED = (
    "SUITE_FOLDER",
    "SUITE_STARTED",
)  # environment: where workers write their rows, and where starts are noted
PLUGIN = "suite_meter"
COLUMNS = ("file", "tests", "cpu_s", "wall_s", "processes")
PYTEST = ("-n", "2", "--dist", "worksteal")
ADDITIONS = """
total = 0
for number in range(10_000_000):
    total += number
"""
NOTE_STARTS = f"""
import os

def note():
    if path := os.environ.get("{STARTED}"):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        os.close(file)

note()
os.register_at_fork(after_in_child=note)
"""


@dataclass(slots=True)
class Cost:
    """What tests took: CPU seconds with those of the processes that they started, wall seconds, and how many those were."""

    tests: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    processes: int = 0

    def add(self, other: Cost) -> None:
        """Add the cost of other tests."""
        self.tests += other.tests
        self.cpu_s += other.cpu_s
        self.wall_s += other.wall_s
        self.processes += other.processes


class Meter:
    """A pytest plugin that measures each test and writes one row per file when the session ends."""

    def __init__(self, folder: Path) -> None:
        self.rows = folder / f"{os.getpid()}.csv"
        self.started = folder / f"{os.getpid()}.started"
        self.costs: dict[str, Cost] = {}
        os.environ[STARTED] = str(self.started)

    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test with its fixtures."""
        cpu_s, wall_s, processes = cpu_of_tree(os.getpid()), time.perf_counter(), self._num_started()
        yield
        file = item.path.relative_to(item.config.rootpath / "tests").as_posix()
        self.costs.setdefault(file, Cost()).add(
            Cost(
                tests=1,
                cpu_s=max(cpu_of_tree(os.getpid()) - cpu_s, 0.0),
                wall_s=time.perf_counter() - wall_s,
                processes=self._num_started() - processes,
            )
        )

    def pytest_sessionfinish(self) -> None:
        """Write the rows of this worker."""
        write_costs(self.rows, self.costs)

    def _num_started(self) -> int:
        return self.started.stat().st_size if self.started.exists() else 0


def pytest_configure(config: pytest.Config) -> None:
    """Register the meter in the process that runs tests: a worker of pytest-xdist, or pytest itself where there are none."""
    import pytest

    if FOLDER in os.environ and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        meter = Meter(Path(os.environ[FOLDER]))
        pytest.hookimpl(wrapper=True)(Meter.pytest_runtest_protocol)
        config.pluginmanager.register(meter)


def cpu_of_tree(pid: int) -> float:
    """CPU seconds of a process, of those that it has waited for, and of all that descend from it."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    children = " ".join(map(_read, glob.glob(f"/proc/{pid}/task/*/children"))).split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S + sum(cpu_of_tree(int(child)) for child in children)


def _read(path: str) -> str:
    """Return what a file of `/proc` has; nothing where its process or thread has ended meanwhile."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def additions_s() -> float:
    """Seconds that this machine takes for 10 million additions in Python, at the level of a module; the best of three."""
    code = compile(ADDITIONS, "<additions>", "exec")  # not in a function: its local variables are faster
    best = float("inf")
    for _ in range(3):
        since = time.perf_counter()
        exec(code, {})
        best = min(best, time.perf_counter() - since)
    return best


def read_costs(paths: Sequence[Path]) -> dict[str, Cost]:
    """Costs by test file; rows of one file, of several workers, are added."""
    costs: dict[str, Cost] = {}
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                cost = Cost(int(row["tests"]), float(row["cpu_s"]), float(row["wall_s"]), int(row["processes"]))
                costs.setdefault(row["file"], Cost()).add(cost)
    return costs


def write_costs(path: Path, costs: dict[str, Cost]) -> None:
    """Write one row per test file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(
            (name, cost.tests, f"{cost.cpu_s:.2f}", f"{cost.wall_s:.2f}", cost.processes)
            for name, cost in sorted(costs.items())
        )


def rooms_of(costs: dict[str, Cost]) -> dict[str, Cost]:
    """Costs by the first folder of test files; of `unit`, which mirrors the package, by the first two."""
    rooms: dict[str, Cost] = {}
    for name, cost in costs.items():
        folders = Path(name).parts[:-1]
        rooms.setdefault("/".join(folders[: 2 if folders[0] == "unit" else 1]), Cost()).add(cost)
    return rooms


def table(costs: dict[str, Cost], max_rows: int | None = None) -> str:
    """The costliest first."""
    rows = sorted(costs.items(), key=lambda item: -item[1].cpu_s)[:max_rows]
    lines = [f"{'':44}{'tests':>7}{'CPU s':>9}{'wall s':>9}{'processes':>11}"]
    lines += [
        f"{name:44}{cost.tests:>7}{cost.cpu_s:>9.1f}{cost.wall_s:>9.1f}{cost.processes:>11}" for name, cost in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the tests, print the tables and write the rows. The exit status is that of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build/suite.csv", help="rows (build/suite.csv)")
    parser.add_argument("--most", type=int, default=40, help="how many files are printed (40)")
    arguments, pytest_arguments = parser.parse_known_args()
    print(f"10 million additions in Python: {additions_s():.2f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(NOTE_STARTS, encoding="utf-8")
        shutil.copy(
            __file__, Path(folder, f"{PLUGIN}.py")
        )  # alone: this folder has modules with the names of the tests'
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, FOLDER: folder, "PYTHONPATH": os.pathsep.join(paths)}
        since = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, *(pytest_arguments or PYTEST)]
        status = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
        wall_s = time.perf_counter() - since
        costs = read_costs(sorted(Path(folder).glob("*.csv")))
    total = Cost()
    for cost in costs.values():
        total.add(cost)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_costs(arguments.out, costs)
    print(table(rooms_of(costs)))
    print()
    print(table(costs, arguments.most))
    print(f"\nall tests: {total.cpu_s:.0f} CPU s, {total.processes} processes; pytest: {wall_s:.0f} s of wall time")
    return status


if __name__ == "__main__":
    sys.exit(main())
