"""The main job, whole, on a machine without a GPU: measure this machine, plan a small Llama for two processes of it, train that
plan on real text, and hold what was measured against what was predicted. First, a plan of the size that one plans for.

make demo
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

OUT = Path("out/demo")
MODEL = Path("examples/small-llama/config.json")
RUNS = (
    "plan llama-3-70b h100:512 --batch-tokens 4Mi --seq-len 8192 --tokens 15T",
    f"tokenize --python-library 4MB --vocab-size 2048 --held-out 0.05 --out {OUT}/data --force",
    f"bench machine --processes 2 --out {OUT}/machine.toml",
    f"plan {MODEL} {OUT}/machine.toml --batch-tokens 2Ki --seq-len 128 --precision fp32 --runnable --out {OUT}/plan.json",
    f"train {OUT}/plan.json --data {OUT}/data --steps 200 --learning-rate 5e-3 --warmup 20 --out {OUT}/run --force",
    f"reconcile {OUT}/plan.json {OUT}/run --plot {OUT}/reconcile.svg",
)


def demo() -> int:
    """Run each command as a user would and stop at the first that fails."""
    os.chdir(Path(__file__).parent.parent)
    OUT.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        print(f"$ shardwise {run}\n", flush=True)
        code = subprocess.run([sys.executable, "-m", "shardwise", *shlex.split(run)], check=False).returncode
        if code:
            return code
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(demo())
