"""One rank of four worlds of a thousand ranks and more, each planned, and rehearsed in a process of its own.

    python benchmarks/rehearsals.py [--rank N] [NAME ...]

Prints for each the seconds and the largest memory of the whole command, whether the collectives that it issued are the planned
ones, and the largest differences of memory from the plan: of what rests and what is saved (each term), and of the peak. Exit
status 1 where one takes a minute or 3 GB, or is not as planned.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.present.rendering.plain_text import render_block
from shardwise.present.rendering.report import Table
from shardwise.run.machine_resources import RSS_UNIT

MOST_SECONDS, MOST_BYTES = 60.0, 3e9
# What is planned, with the axes that the rehearsal is to have pinned; the rest of each layout is the search's.
PLANS = {
    "llama-3-8b": "llama-3-8b h100:1024 --batch-tokens 16Mi --seq-len 8Ki --pin tp=8",
    "llama-3-70b": "llama-3-70b h100:8192 --batch-tokens 32Mi --seq-len 32Ki --pin tp=8 --pin cp=4",
    "deepseek-v3": "deepseek-v3 h100:2048 --batch-tokens 64Mi --seq-len 4Ki --pin ep=16",
    "llama-3.1-405b": "llama-3.1-405b h100:16384 --batch-tokens 16Mi --seq-len 8Ki --pin tp=8",
}


class Timed(NamedTuple):
    """What a command printed, how it ended, its seconds, and the most bytes that it had."""

    printed: str
    code: int
    seconds: float
    num_bytes: int


def timed(*words: str) -> Timed:
    """Run a command to its end."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "shardwise", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Timed(printed, process.returncode, time.perf_counter() - begun, usage.ru_maxrss * RSS_UNIT)


def rehearsed(name: str, rank: int) -> tuple[Timed, dict[str, Any]]:
    """A plan's rehearsal, and what it says. Raises `SystemExit` where there is neither."""
    with tempfile.TemporaryDirectory() as place:
        plan = str(Path(place) / "plan.json")
        if timed("plan", *PLANS[name].split(), "--runnable", "--out", plan).code:
            raise SystemExit(f"{name}: no plan")
        done = timed("rehearse", plan, "--rank", str(rank), "--json")
    if done.code > 1:
        raise SystemExit(f"{name}: no rehearsal")
    return done, json.loads(done.printed)


def largest_difference(rehearsal: dict[str, Any], *, peak: bool) -> str:
    """The judged term that is the furthest from the plan, and by how much."""
    memory = rehearsal["memory"]
    judged = [term["name"] for term in memory["terms"] if term["is_judged"] and (term["name"] == "peak") is peak]
    differences = {name: memory["executed"][name] / memory["planned"][name] - 1 for name in judged}
    worst = max(differences, key=lambda name: abs(differences[name]))
    return f"{differences[worst]:+.2%}" + ("" if peak else f" ({worst})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(PLANS)} (default: all)")
    parser.add_argument("--rank", type=int, default=77)
    arguments = parser.parse_args()
    rows, fine = [("model", "ranks", "layout", "seconds", "GB", "collectives", "equal", "worst term", "peak")], True
    for name in arguments.names or PLANS:
        done, rehearsal = rehearsed(name, arguments.rank)
        fine &= rehearsal["ok"] and done.seconds < MOST_SECONDS and done.num_bytes < MOST_BYTES
        rows.append(
            (
                name, f"{rehearsal['ranks']:,}", rehearsal["layout"]["text"], f"{done.seconds:.1f}",
                f"{done.num_bytes / 1e9:.2f}", f"{rehearsal['collectives']['found']:,}",
                str(rehearsal["collectives_equal"]).lower(),
                largest_difference(rehearsal, peak=False), largest_difference(rehearsal, peak=True),
            )
        )  # fmt: skip
    print(render_block(Table(rows=tuple(rows), right=(1, 3, 4, 5))))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
