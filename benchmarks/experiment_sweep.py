"""A sweep of many configurations of a small model on this machine: how many runs does it take to find the best?

    shardwise tokenize --python-library 1MB --vocab-size 512 --out data
    shardwise bench machine --processes 2 --out machine.toml
    python benchmarks/experiment_sweep.py --cluster machine.toml --data data --folder sweep

The sweep runs what its predictions leave open. Then the others are run too, into another ledger: was the best found, and do the
measured steps lie in the intervals that were predicted when the sweep ended? An hour or more, on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from shardwise.measure import ExperimentRequest, run_experiment
from shardwise.measure.experiments.backends import LocalProcesses
from shardwise.measure.experiments.candidates import Candidate, list_candidates
from shardwise.measure.experiments.driver import ExperimentDriver
from shardwise.measure.experiments.grid_file import ExperimentBudget, ExperimentGrid, read_grid
from shardwise.measure.experiments.ledger import Ledger, LedgerRow, read_ledger
from shardwise.measure.experiments.ledger_summary import best_row
from shardwise.measure.experiments.listed_order import ListedOrder
from shardwise.measure.experiments.run_experiment import describe_experiment, record_candidates
from shardwise.measure.experiments.run_targets import make_target
from shardwise.run.faults.stop_request import StopRequest

MODEL = Path(__file__).parents[1] / "examples" / "small-llama" / "config.json"
GRID = """
target = "train"
steps = {steps}
data = ["{data}"]
start = "30s"
[problem]
model = "{model}"
cluster = "{cluster}"
batch_tokens = 4096
seq_len = 64
precision = "fp32"
[layouts]
top = {top}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="local:2")
    parser.add_argument("--data", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--top", type=int, default=200, help="configurations")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--others", type=int, help="how many of the others are run, at random; all by default")
    arguments = parser.parse_args()
    folder = Path(arguments.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = Path(arguments.cluster)
    cluster = str(file.resolve()) if file.is_file() else arguments.cluster
    text = GRID.format(
        steps=arguments.steps, data=Path(arguments.data).resolve(), model=MODEL, cluster=cluster, top=arguments.top
    )
    grid_file = folder / "grid.toml"
    grid_file.write_text(text, encoding="utf-8")
    # One run at a time: runs side by side share the memory's bandwidth, which no prediction knows.
    run_experiment(ExperimentRequest(grid=grid_file, ledger=folder / "sweep.jsonl", settings={"devices": "1"}))
    rows = read_ledger(folder / "sweep.jsonl").rows
    num_run = sum(bool(row.attempts) for row in rows.values())
    best = best_row(rows.values())
    if best is None or best.measurement is None:
        print("no configuration was measured")
        return 1
    print(f"{num_run} of {len(rows)} configurations run ({num_run / len(rows):.0%}); best: {best.configuration.label}")

    grid = read_grid(grid_file)
    candidates = list_candidates(grid)
    not_run = {name: item for name, item in candidates.items() if not rows[name].attempts}
    if arguments.others is not None:
        chosen = random.Random(0).sample(sorted(not_run), min(arguments.others, len(not_run)))
        not_run = {name: not_run[name] for name in chosen}
    rows_of_rest = run_all(grid, not_run, folder / "rest.jsonl")
    best_name = best.configuration.fingerprint
    (again,) = run_all(grid, {best_name: candidates[best_name]}, folder / "again.jsonl").values()
    inside, widths = 0, []
    for name, row in rows_of_rest.items():
        prediction = rows[name].prediction
        if row.measurement and prediction and prediction.interval90:
            low, high = prediction.ends
            widths.append((high / low) ** 0.5 - 1)
            inside += low <= row.measurement.step_time_s <= high
    if again.measurement is not None:
        drift = again.measurement.step_time_s / best.measurement.step_time_s
        print(f"the best found takes {drift:.3f} of its first time at the end: how far the machine has drifted")
    best_left = best_row(rows_of_rest.values())
    if best_left is not None and best_left.measurement is not None:
        ratio = best.measurement.step_time_s / best_left.measurement.step_time_s
        print(
            f"the best found takes {ratio:.3f} of the best of the {len(rows_of_rest)} others, {best_left.configuration.label}"
        )
    if widths:
        width = statistics.median(widths)
        print(
            f"{inside} of {len(widths)} ({inside / len(widths):.0%}) of the others lie in their intervals, ±{width:.0%}"
        )
    return 0


def run_all(grid: ExperimentGrid, candidates: Mapping[str, Candidate], ledger_file: Path) -> dict[str, LedgerRow]:
    """Run all of some configurations, one at a time, and return their rows."""
    with Ledger(ledger_file) as ledger, StopRequest() as stop:
        experiment = describe_experiment(grid)
        record_candidates(ledger, experiment, candidates)
        chooser = ListedOrder(tuple(candidates), ExperimentBudget(), experiment)
        driver = ExperimentDriver(
            ledger=ledger, backend=LocalProcesses(1), target=make_target(grid, candidates), chooser=chooser,
            experiment=experiment, versions={}, report=print,
        )  # fmt: skip
        if driver.run(stop):
            sys.exit("stopped; the same command goes on")
        return dict(ledger.rows)


if __name__ == "__main__":
    sys.exit(main())
