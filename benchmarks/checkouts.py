"""How long a step of the engine takes beside one of another checkout's engine.

    git worktree add ../before 5c20add^
    python benchmarks/checkouts.py ../before [--pairs 11] [--steps 1] [--dtype fp32]

The step is that of `train.py`, here and there, in one process each, which take turns. The figure is the
median over pairs of the other's time over ours, with the 80% range: above 1 this checkout is faster.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from train import REQUIRED, Step, engine_step, paired, precision_of, report

# A process with another checkout's modules, which makes a step for each line that it reads.
STEPS = """
import sys
folder, dtype = sys.argv[1:]
sys.path[:0] = [f"{folder}/{part}" for part in ("src", "benchmarks", "tests")]
import torch, train
assert train.__file__.startswith(folder), train.__file__
torch.set_num_threads(1)
step = train.engine_step(train.precision_of(dtype), 1)
for _ in sys.stdin:
    print(step(), flush=True)
"""


def step_of(served: subprocess.Popen[str]) -> Step:
    """A step in another process. Raises `SystemExit` where that has ended."""

    def step() -> float:
        assert served.stdin is not None
        assert served.stdout is not None
        print("step", file=served.stdin, flush=True)
        return float(served.stdout.readline() or sys.exit("error: the other checkout's process has ended"))

    return step


def main() -> int:
    """Print the figure; the exit status says whether this checkout is fast enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="of the other checkout")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    arguments = parser.parse_args()
    if not (arguments.folder / "benchmarks" / "train.py").exists():
        parser.error(f"{arguments.folder} has no benchmarks/train.py: the folder of a checkout is required")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    command = [sys.executable, "-c", STEPS, str(arguments.folder.resolve()), arguments.dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as served:
        ours = engine_step(precision_of(arguments.dtype), 1)
        ratios = paired(ours, step_of(served), arguments.pairs, arguments.steps)
        assert served.stdin is not None
        served.stdin.close()
    return 0 if report(f"one process, the engine of {arguments.folder}", ratios, REQUIRED) else 1


if __name__ == "__main__":
    sys.exit(main())
