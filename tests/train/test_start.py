"""Modules that a rank loads before its first step, and in the observed steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from train.stand_in import write_inputs

SCRIPT = """
import sys
from shardwise.run.trainer import machine_probe as probe; from shardwise import train as rank

probe.BUDGET_S = 0.0
assert rank.rank_main(sys.argv[1:]) == 0
slow = {"sympy", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"}
print(*sorted(slow & set(sys.modules)), sep=", ")
"""


def test_a_rank_loads_neither_a_compiler_nor_checkpoints_of_other_frameworks(tmp_path: Path) -> None:
    """Together they took as long as PyTorch itself: an optimizer of torch.optim loads torch._dynamo, and that sympy."""
    flags = [*write_inputs(tmp_path), "--device", "cpu", "--steps", "3"]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
