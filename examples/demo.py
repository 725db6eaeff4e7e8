"""The main job, whole, on this machine: measure it, plan a small Llama for its GPUs, or for two processes of its CPU, train that
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
# Of each device: the flags of its measurement, and the number format of the plan.
CHOICES = {"cuda": ("--device cuda", "bf16"), "cpu": ("--device cpu --processes 2", "fp32")}


def choose_device() -> str:
    """Return "cuda" where PyTorch finds a GPU, otherwise "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def commands(device: str) -> tuple[str, ...]:
    """Return the commands of the demo on a device."""
    machine, precision = CHOICES[device]
    return (
        "plan llama-3-70b h100:512 --batch-tokens 4Mi --seq-len 8192 --tokens 15T",
        f"tokenize --python-library 4MB --vocab-size 2048 --held-out 0.05 --out {OUT}/data --force",
        f"bench machine {machine} --out {OUT}/machine.toml",
        f"plan {MODEL} {OUT}/machine.toml --batch-tokens 2Ki --seq-len 128 --precision {precision} --runnable "
        f"--out {OUT}/plan.json",
        f"train {OUT}/plan.json --data {OUT}/data --device {device} --steps 200 --learning-rate 5e-3 --warmup 20 "
        f"--out {OUT}/run --force",
        f"reconcile {OUT}/plan.json {OUT}/run --plot {OUT}/reconcile.svg",
    )


def demo() -> int:
    """Run each command as a user would and stop at the first that fails."""
    os.chdir(Path(__file__).parent.parent)
    OUT.mkdir(parents=True, exist_ok=True)
    device = choose_device()
    reason = "PyTorch finds a GPU" if device == "cuda" else "PyTorch finds no GPU"
    print(f"{reason}: measured, planned for and trained with --device {device}\n", flush=True)
    for run in commands(device):
        print(f"$ shardwise {run}\n", flush=True)
        code = subprocess.run([sys.executable, "-m", "shardwise", *shlex.split(run)], check=False).returncode
        if code:
            return code
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(demo())
