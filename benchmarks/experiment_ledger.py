"""Processor seconds of `experiments status` and `experiments report` for a ledger of many lines.

    python benchmarks/experiment_ledger.py --lines 100000

A quarter of the lines are configurations of 40 groups; each is predicted, submitted, started and measured.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardwise.measure.experiments.ledger import Ledger
from shardwise.measure.experiments.ledger_lines import Configuration, LedgerLine, RunMeasurement, RunPrediction

LINES_OF_RUN, GROUPS = 4, 40


def ledger_lines(number: int, chance: random.Random) -> Iterator[LedgerLine]:
    """Yield the lines of a configuration that was measured."""
    devices = 8 * 2 ** (number % 4)
    configuration = Configuration(
        settings={"model": f"model-{number % GROUPS // 4}", "cluster": f"h100:{devices}", "layout": f"fsdp=8 tp=8 n={number}"},
        group=f"group {number % GROUPS}", label=f"n={number}", num_nodes=devices // 8, num_devices=devices,
    )  # fmt: skip
    prediction = RunPrediction(
        step_time_s=1 + number / 1e4, interval90=(0.8 + number / 1e4, 1.3 + number / 1e4), memory_bytes=7e10,
        capacity_bytes=8e10, mfu=0.4, usd_per_hour=192.0,
    )  # fmt: skip
    name = configuration.fingerprint
    yield LedgerLine(fingerprint=name, state="predicted", configuration=configuration, prediction=prediction)
    yield LedgerLine(fingerprint=name, state="pending", attempt=1, prediction=prediction, versions={"shardwise": "0"})
    yield LedgerLine(fingerprint=name, state="running", attempt=1, job="123", logs=f"ledger.runs/{name}/attempt-1")
    measured = RunMeasurement(
        step_time_s=1 + chance.random(), tokens_per_s_per_device=1e4 * chance.random(), mfu=chance.random()
    )
    yield LedgerLine(fingerprint=name, state="done", attempt=1, seconds=60.0, measurement=measured)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    arguments = parser.parse_args()
    folder, chance = Path(tempfile.mkdtemp(prefix="ledger-")), random.Random(0)
    path = folder / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(
            *(line for number in range(arguments.lines // LINES_OF_RUN) for line in ledger_lines(number, chance))
        )
    print(f"{arguments.lines:,} lines, {path.stat().st_size / 1e6:.0f} MB")
    for words in (["status"], ["report", "--out", str(folder / "report.html")]):
        before = os.times()
        command = [sys.executable, "-m", "shardwise", "experiments", words[0], str(path), *words[1:]]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"{words[0]}: {seconds:.2f} processor seconds, {after.elapsed - before.elapsed:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
